"""A suffix automaton over a sequence's tokens: the longest suffix that occurred before, and what followed it there.

A state stands for a set of substrings that end at the same positions; its length is that of the longest of them, and its
link leads to the state of their longest suffix that ends at more positions (Blumer et al., 1985). The link of the state of
all tokens is therefore the longest suffix that occurred before. A token adds at most two states, in amortised constant time.
"""

from __future__ import annotations


class SuffixIndex:
    """An index over a growing list of tokens, half a kilobyte a token."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        """Indexed tokens."""
        self._lengths = [0]
        self._links = [-1]
        self._next: list[dict[int, int]] = [{}]
        # The last position known at which each state's substrings end. It is found again only for the states that were the
        # longest repeated suffix; the others keep an earlier one.
        self._ends = [-1]
        self._whole = 0
        self.match = 0
        """Tokens of the longest suffix that occurred before."""
        self.end = 0
        """Behind an earlier occurrence of that suffix: tokens[end] followed it. Of no meaning where match is 0."""

    def append(self, token: int) -> None:
        """Index one more token."""
        lengths, links, following = self._lengths, self._links, self._next
        position, state = len(self.tokens), len(lengths)
        self.tokens.append(token)
        lengths.append(position + 1)
        links.append(0)
        following.append({})
        self._ends.append(position)
        before = self._whole
        while before >= 0 and token not in following[before]:
            following[before][token] = state
            before = links[before]
        suffix = 0
        if before >= 0:
            suffix = following[before][token]
            if lengths[suffix] != lengths[before] + 1:
                suffix = self._split(before, token, suffix)
        links[state] = suffix
        self._whole = state
        self.match = lengths[suffix]
        self.end = self._ends[suffix] + 1
        self._ends[suffix] = position

    def _split(self, before: int, token: int, longer: int) -> int:
        """A state for the substrings of longer that are no longer than before's and the token behind it."""
        state = len(self._lengths)
        self._lengths.append(self._lengths[before] + 1)
        self._next.append(self._next[longer].copy())
        self._ends.append(self._ends[longer])
        self._links.append(self._links[longer])
        self._links[longer] = state
        while before >= 0 and self._next[before].get(token) == longer:
            self._next[before][token] = state
            before = self._links[before]
        return state

    def following(self, count: int) -> list[int]:
        """Give the tokens after the earlier occurrence of the longest suffix: count tokens, or none where match is 0.

        Where it leads to the end of all tokens, it goes on with itself, as a text does that repeats itself.
        """
        if not self.match or count < 1:
            return []
        found = self.tokens[self.end : self.end + count]
        period = len(found)
        while len(found) < count:
            found.append(found[-period])
        return found
