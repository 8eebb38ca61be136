"""Damages kept blocks just before they are read."""

from __future__ import annotations

from kvtier.base import OffloadKey
from kvtier.testing.damage import BackingBytes, Damage, inflict
from kvtier.testing.faults.job_faults import random_of
from kvtier.testing.faults.kinds import Fault
from kvtier.tiering.base import TransferJob

__all__ = ["BitRot"]

_MAX_REMEMBERED = 64


class BitRot:
    """Chooses which kept block suffers. Remembers a few stored keys, to have two for a swap."""

    def __init__(self, backing: BackingBytes) -> None:
        self._backing = backing
        self._stored: dict[OffloadKey, None] = {}

    def note_stored(self, job: TransferJob) -> None:
        """These blocks may be kept from now on."""
        self._stored.update(dict.fromkeys(job.keys))
        while len(self._stored) > _MAX_REMEMBERED:
            del self._stored[next(iter(self._stored))]

    def damage_one_of(self, job: TransferJob, fault: Fault) -> bool:
        """Damage one block that the load is about to read. False: there is none to damage."""
        kept = [key for key in job.keys if self._is_kept(job.fingerprint, key)]
        if not kept:
            return False
        chance = random_of(fault)
        key = chance.choice(kept)
        other: OffloadKey | None = None
        if fault.damage is Damage.SWAP:
            candidates = dict.fromkeys(kept) | self._stored
            others = [k for k in candidates if k != key and self._is_kept(job.fingerprint, k)]
            if not others:
                return False
            other = chance.choice(others)
        seed = chance.getrandbits(32)
        inflict(self._backing, job.fingerprint, key, fault.damage, other=other, seed=seed)
        return True

    def _is_kept(self, fingerprint: bytes, key: OffloadKey) -> bool:
        try:
            self._backing.read(fingerprint, key)
        except KeyError:
            return False
        return True
