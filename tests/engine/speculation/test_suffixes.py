"""The suffix automaton against brute force, and what a proposer makes of it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from server.engine.speculation.lookup import LookupProposer
from server.engine.speculation.suffixes import SuffixIndex


def earlier_ends(tokens: list[int], length: int) -> list[int]:
    """Behind which positions the last length tokens end, without the last one."""
    suffix = tokens[len(tokens) - length :]
    return [end for end in range(length, len(tokens)) if tokens[end - length : end] == suffix]


@settings(deadline=None)
@given(st.integers(1, 4).flatmap(lambda most: st.lists(st.integers(0, most), max_size=60)))
def test_the_match_is_the_longest_suffix_that_occurred_before(tokens: list[int]) -> None:
    index = SuffixIndex()
    for count, token in enumerate(tokens, start=1):
        index.append(token)
        seen = tokens[:count]
        assert not earlier_ends(seen, index.match + 1)
        if index.match:
            assert index.end in earlier_ends(seen, index.match)
        following = index.following(5)
        assert following[: count - index.end] == (seen[index.end :][:5] if index.match else [])
        assert len(following) == (5 if index.match else 0)
    assert index.tokens == tokens


def test_a_text_that_repeats_itself_goes_on_with_itself() -> None:
    index = SuffixIndex()
    for token in [9, 1, 2, 3, 1, 2, 3, 1, 2]:
        index.append(token)
    assert index.match == 5
    assert index.following(7) == [3, 1, 2, 3, 1, 2, 3]


def test_a_long_text_costs_a_state_or_two_a_token() -> None:
    index = SuffixIndex()
    tokens = [i * i % 251 % 17 for i in range(20000)]
    for token in tokens:
        index.append(token)
    assert len(index._lengths) <= 2 * len(tokens)
    assert len(index._lengths) == len(index._links) == len(index._next) == len(index._ends)


def followed(prompt: list[int], answer: list[int]) -> LookupProposer:
    proposer = LookupProposer(len(prompt))
    tokens = prompt + answer
    assert proposer.follow(tokens, len(tokens), len(tokens)) == len(tokens)
    return proposer


def test_what_was_right_lately_is_trusted_and_what_was_wrong_is_not() -> None:
    text = list(range(10, 40))
    copying = followed(text, text[:20])
    assert copying.propose(4) == text[20:24]
    survival = copying.survival(4)
    assert survival == sorted(survival, reverse=True)
    assert survival[3] > 0.65
    # The pair 1, 2 is never followed by the same token twice.
    straying = followed([0], [token for i in range(20) for token in (1, 2, 100 + i)] + [1, 2])
    assert straying.survival(1)[0] < 0.1 < followed([1, 2, 5, 1, 2], []).survival(1)[0]


def test_nothing_is_proposed_where_nothing_repeats() -> None:
    proposer = followed([1, 2, 3], [4])
    assert proposer.survival(3) == proposer.propose(3) == []


def test_a_long_prompt_is_followed_in_parts_and_unknown_tokens_are_left_out() -> None:
    proposer, tokens = LookupProposer(10), [*range(10), -1]
    assert [proposer.follow(tokens, 10, 4) for _ in range(4)] == [4, 4, 2, 0]
    assert proposer.known == 10
