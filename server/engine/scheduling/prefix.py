"""Keys of KV blocks: a block's key identifies all tokens up to the block's end."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence


def extend_keys(keys: list[bytes], tokens: Sequence[int], block_size: int, count: int, salt: bytes = b"") -> None:
    """Append to keys until it has count: keys[i] names tokens [i * block_size, (i + 1) * block_size) and all before.

    Sequences with different salts share nothing. Keys are cryptographic: nobody can make a prompt that is taken for
    another's.
    """
    for index in range(len(keys), count):
        previous = keys[-1] if keys else hashlib.blake2b(salt, digest_size=16).digest()
        block = array("q", tokens[index * block_size : (index + 1) * block_size])
        keys.append(hashlib.blake2b(previous + block.tobytes(), digest_size=16).digest())
