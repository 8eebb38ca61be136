"""Names for prefixes: a chain of hashes, one for every so many tokens."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

__all__ = ["HASH_BYTES", "extend_chain"]

HASH_BYTES = 16
_START = b"kvtier.engine".ljust(HASH_BYTES, b"\0")


def extend_chain(chain: list[bytes], token_ids: Sequence[int], tokens_per_hash: int) -> None:
    """Append the hashes of all full blocks of tokens that `chain` does not have yet.

    Each hash is made of the one before it and its own tokens, so it stands for all tokens up to
    its end. The same in every process and on every machine.
    """
    for end in range((len(chain) + 1) * tokens_per_hash, len(token_ids) + 1, tokens_per_hash):
        tokens = np.asarray(token_ids[end - tokens_per_hash : end], "<u4").tobytes()
        parent = chain[-1] if chain else _START
        chain.append(blake2b(parent + tokens, digest_size=HASH_BYTES).digest())
