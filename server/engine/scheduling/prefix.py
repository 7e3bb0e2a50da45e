"""Keys of KV blocks: a block's key identifies all tokens up to the block's end."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

Spanning = tuple[int, int, bytes]
"""The places [first, second) of something that is no text, an image, and the key that names it."""


def extend_keys(
    keys: list[bytes],
    tokens: Sequence[int],
    block_size: int,
    count: int,
    salt: bytes = b"",
    images: Sequence[Spanning] = (),
) -> None:
    """Append to keys until it has count: keys[i] names tokens [i * block_size, (i + 1) * block_size) and all before.

    images: what stands in the places of placeholders, whose tokens do not tell one image from another. Sequences with
    different salts share nothing. Keys are cryptographic: nobody can make a prompt that is taken for another's.
    """
    begin = len(keys)
    if begin >= count:
        return
    previous = keys[-1] if keys else hashlib.blake2b(salt, digest_size=16).digest()
    # One conversion for all blocks: a prompt may have thousands, whose request waits for this.
    numbers, width = array("q", tokens[begin * block_size : count * block_size]).tobytes(), 8 * block_size
    for index in range(begin, count):
        named = previous + numbers[(index - begin) * width : (index - begin + 1) * width]
        if images:
            first, end = index * block_size, (index + 1) * block_size
            named += b"".join([key for start, behind, key in images if start < end and behind > first])
        previous = hashlib.blake2b(named, digest_size=16).digest()
        keys.append(previous)
