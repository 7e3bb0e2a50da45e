"""The block pool: every block is free or held, never both, and never by accident twice."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.engine.scheduling.blocks import BlockManager, OutOfBlocksError


def test_grow_takes_just_enough_blocks() -> None:
    manager = BlockManager(8, 4)
    blocks: list[int] = []
    manager.grow(blocks, 1)
    assert len(blocks) == 1
    manager.grow(blocks, 4)
    assert len(blocks) == 1
    manager.grow(blocks, 5)
    assert len(blocks) == 2
    assert (manager.num_used, manager.num_free) == (2, 6)


def test_grow_takes_nothing_when_it_cannot_take_all() -> None:
    manager = BlockManager(2, 4)
    blocks: list[int] = []
    with pytest.raises(OutOfBlocksError, match="3 blocks asked for, 2 free"):
        manager.grow(blocks, 9)
    assert blocks == []
    assert manager.num_free == 2


def test_a_shared_block_is_free_when_the_last_holder_lets_go() -> None:
    manager = BlockManager(4, 4)
    first: list[int] = []
    manager.grow(first, 8)
    second = list(first)
    manager.share(second)
    manager.release(first)
    assert manager.num_free == 2
    assert first == []
    manager.release(second)
    assert manager.num_free == 4


def test_misuse_is_refused() -> None:
    manager = BlockManager(4, 4)
    with pytest.raises(ValueError, match="not held"):
        manager.release([1])
    with pytest.raises(ValueError, match="free block"):
        manager.share([1])
    with pytest.raises(ValueError, match="at least 1"):
        BlockManager(0, 4)


def test_blocks_freed_last_are_handed_out_last() -> None:
    manager = BlockManager(3, 1)
    blocks: list[int] = []
    manager.grow(blocks, 3)
    manager.release(blocks)
    taken: list[int] = []
    manager.grow(taken, 3)
    assert taken == [2, 1, 0]


def test_a_named_block_is_found_until_it_is_handed_out_anew() -> None:
    manager = BlockManager(3, 1)
    blocks: list[int] = []
    manager.grow(blocks, 3)
    a, b, _ = blocks
    manager.name(a, b"a")
    manager.name(b, b"b")
    manager.release(blocks)
    assert manager.find([b"a", b"b", b"c"]) == [a, b]
    assert manager.num_unheld([a, b]) == 2
    # The one without a key goes first; then the one that was freed first: release() frees from the end.
    taken: list[int] = []
    manager.grow(taken, 2)
    assert b in taken
    assert manager.find([b"a", b"b"]) == [a]
    manager.share([a])
    assert manager.num_free == 0
    assert manager.find([b"a"]) == [a]
    manager.forget([a])
    assert manager.find([b"a"]) == []


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(1, 40)), max_size=60))
def test_any_history_leaves_every_block_free_or_held(history: list[tuple[int, int, int]]) -> None:
    manager = BlockManager(12, 4)
    holders: list[list[int]] = [[] for _ in range(5)]
    for action, who, tokens in history:
        if action == 0 and holders[who]:
            manager.release(holders[who])
        elif action == 1 and not holders[who] and holders[(who + 1) % 5]:
            manager.share(holders[(who + 1) % 5])
            holders[who] = list(holders[(who + 1) % 5])
        elif manager.missing(holders[who], tokens) <= manager.num_free:
            manager.grow(holders[who], tokens)
        held = {block for blocks in holders for block in blocks}
        assert manager.num_used == len(held)
        assert all(len(set(blocks)) == len(blocks) for blocks in holders)
    for blocks in holders:
        manager.release(blocks)
    assert manager.num_free == 12
