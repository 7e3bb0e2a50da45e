"""Keys of KV blocks: a block's key identifies all tokens up to the block's end."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from functools import lru_cache

Spanning = tuple[int, int, bytes]
"""The places [first, second) of something that is no text, an image, and the key that names it."""
_GROUP, _KNOWN_GROUPS = 64, 4096
# Blocks whose keys are remembered together, by their tokens, and how many such groups are: of 4M tokens, in 32 MB.


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
    numbers, width = array("i", tokens[begin * block_size : count * block_size]).tobytes(), 4 * block_size
    index = begin
    while index < count:
        group = 1 if images else min(_GROUP - index % _GROUP, count - index)
        own = numbers[(index - begin) * width : (index - begin + group) * width]
        if images:
            first, end = index * block_size, (index + 1) * block_size
            own += b"".join([key for start, behind, key in images if start < end and behind > first])
            keys.append(_key(previous, own))
        else:
            keys += (_known_chain if group == _GROUP else _chain)(previous, own, width)
        previous, index = keys[-1], index + group


def _chain(previous: bytes, numbers: bytes, width: int) -> list[bytes]:
    """Keys of blocks of `width` bytes, the first of which follows the block with the key `previous`."""
    keys = []
    for at in range(0, len(numbers), width):
        previous = _key(previous, numbers[at : at + width])
        keys.append(previous)
    return keys


# The next turn of a conversation asks for the keys of all turns before it, for which its first token would wait.
_known_chain = lru_cache(maxsize=_KNOWN_GROUPS)(_chain)


def _key(previous: bytes, own: bytes) -> bytes:
    return hashlib.blake2b(previous + own, digest_size=16).digest()
