"""Small blocks travel through memory of the tier, large ones straight between slots and pool. Both
are the same objects in the pool."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvtier.seal import SEAL_BYTES
from kvtier.tiering.base import SecondaryTierManager
from kvtier.tiering.mooncake import mover
from kvtier.tiering.mooncake.mover import copied_bytes_of
from kvtier.tiering.mooncake.options import Protocol
from tests.tiering.mooncake.harness import (
    SEGMENT_BYTES,
    MooncakeBacking,
    mooncake_harness,
    plain_client,
)
from tests.tiering.mooncake.pool import Master, mooncake_master, segment
from tests.tiering.networks import Namespace

NEVER, ALWAYS = 0, 1 << 30
NUM_BLOCKS = 7


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory, network: Namespace) -> Iterator[Master]:
    with (
        mooncake_master(tmp_path_factory.mktemp("master"), network) as process,
        segment(process, SEGMENT_BYTES, network),
    ):
        yield process


@pytest.fixture(scope="module")
def backing(master: Master, network: Namespace) -> Iterator[MooncakeBacking]:
    with network.entered(), plain_client(master) as client:
        yield MooncakeBacking(client)


def copies(tier: SecondaryTierManager) -> bool:
    copied: bool = tier._pool_server.copies  # type: ignore[attr-defined]
    return copied


@pytest.mark.parametrize("row_bytes", [4096, 512 << 10])
@pytest.mark.parametrize(("stored", "loaded"), [(NEVER, ALWAYS), (ALWAYS, NEVER)])
def test_who_copies_and_who_does_not_read_the_same(
    master: Master,
    backing: MooncakeBacking,
    monkeypatch: pytest.MonkeyPatch,
    row_bytes: int,
    stored: int,
    loaded: int,
) -> None:
    for largest, is_store in ((stored, True), (loaded, False)):
        monkeypatch.setattr(mover, "_LARGEST_COPIED", largest)
        with mooncake_harness(
            master, row_bytes=row_bytes, num_slots=32, namespace=f"{stored}", segment_bytes=0
        ) as engine:
            assert copies(engine.tier) is (largest == ALWAYS)
            keys = engine.keys(NUM_BLOCKS)
            job = engine.store(keys) if is_store else engine.load(keys)
            (report,) = engine.wait_for(job)
            assert report.result.success
            block = backing.read(engine.tier.fingerprint, keys[0])
            assert len(block) == SEAL_BYTES + row_bytes


def test_a_damaged_copy_is_not_loaded(master: Master, backing: MooncakeBacking) -> None:
    with mooncake_harness(master, namespace="damaged", segment_bytes=0) as engine:
        assert copies(engine.tier)
        keys = engine.keys(3)
        engine.wait_for(engine.store(keys))
        block = bytearray(backing.read(engine.tier.fingerprint, keys[1]))
        block[-1] ^= 1
        backing.write(engine.tier.fingerprint, keys[1], bytes(block))
        (report,) = engine.wait_for(engine.load(keys))
        assert not report.result.success
        assert set(report.result.successful_keys or ()) == {keys[0], keys[2]}


def test_what_is_copied() -> None:
    assert copied_bytes_of(64 << 10, Protocol.TCP) == 64 << 10
    assert copied_bytes_of(1 << 20, Protocol.TCP) == 0
    assert copied_bytes_of(64 << 10, Protocol.RDMA) == 0
