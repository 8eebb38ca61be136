"""One digest of everything that decides what bytes a key stands for."""

from __future__ import annotations

import json
import os
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier.config.offloading import OffloadingConfig

FINGERPRINT_BYTES = 16
_FORMAT_VERSION = 1
_EPOCH_BYTES = 16


def new_epoch() -> bytes:
    """A name, never used before, for the time after a `reset_cache`.

    Random rather than counted: a second engine, or this one after a restart, would count to the
    same number with other weights.
    """
    return os.urandom(_EPOCH_BYTES)


def fingerprint(config: OffloadingConfig, epoch: bytes) -> bytes:
    """See `OffloadingConfig.fingerprint`."""
    model, cache, parallel = config.model, config.cache, config.parallel
    identity = {
        "format_version": _FORMAT_VERSION,
        "epoch": epoch.hex(),
        "namespace": config.options.cache_namespace,
        "model": [model.name, model.dtype, model.weights_revision, *_if_any(model.variant)],
        "kv_cache_layout": config.kv_cache_layout,
        "tokens_per_hash": cache.tokens_per_hash,
        "blocks_per_chunk": cache.blocks_per_chunk,
        "worker_kv_bytes_per_block": config.worker_kv_bytes_per_block,
        # Its padding differs between machines whose page sizes differ.
        "row_bytes": config.row_bytes,
        "parallel": [
            parallel.world_size,
            parallel.tp_size,
            parallel.pp_size,
            parallel.pcp_size,
            parallel.dcp_size,
        ],
        "groups": [
            [
                group.group_id,
                group.tokens_per_block,
                list(group.layer_names),
                group.kind,
                group.window_tokens,
            ]
            for group in config.groups
        ],
    }
    # JSON quotes and brackets every part, so that no two identities run together into one text.
    # A cryptographic digest, because a namespace may be chosen to hit someone else's.
    encoded = json.dumps(identity, sort_keys=True, separators=(",", ":")).encode("ascii")
    return blake2b(encoded, digest_size=FINGERPRINT_BYTES, person=b"kvtier").digest()


def _if_any(text: str) -> list[str]:
    """An engine that has nothing to say keeps the fingerprints from before it could."""
    return [text] if text else []
