"""Recent answers, apart by adapter and API key, that later requests of the same adapter and key take guesses from."""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque

from server.engine.scheduling.sequence import Owner
from server.engine.speculation.suffixes import END, SuffixIndex

LEAST_BYTES = 2**20
"""The smallest bound."""
_CHUNK = 64
# What a chunk may add at most: two states a token.
_CHUNK_BYTES = _CHUNK * 1024
_WAITING_ANSWER_BYTES = 256


class SharedStore:
    """Indices of answers. Indices of one owner are never given to another.

    Answers wait until they are indexed by work(), which takes a microsecond a token and is called when no request waits for
    it. An owner's answers are in one or two indices: the newest one grows until it has half of the bytes. When all bytes are
    taken, the index that was written to least recently is freed, whoever owns it, piece by piece while others grow.
    """

    def __init__(self, most_bytes: int) -> None:
        """most_bytes: of the indices and of the answers that wait. Raises ValueError for less than LEAST_BYTES."""
        if most_bytes < LEAST_BYTES:
            raise ValueError(f"a shared store of {most_bytes} bytes is too small; it needs {LEAST_BYTES}")
        self._most_bytes = most_bytes
        self._most_waiting = most_bytes // 16
        self._waiting: deque[tuple[Owner, array[int]]] = deque()
        self._waiting_bytes = 0
        self._place = 0
        """Tokens of the first answer that waits that are indexed already."""
        self._indices: dict[Owner, tuple[SuffixIndex, ...]] = {}
        self._owners: OrderedDict[SuffixIndex, Owner] = OrderedDict()
        """The owner of each index, that which was written to least recently first."""
        self._freed: SuffixIndex | None = None
        """An index that nobody reads any more, of which some memory is left."""
        self._index_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Memory that is taken."""
        return self._index_bytes + self._waiting_bytes

    @property
    def has_work(self) -> bool:
        """Whether answers wait to be indexed."""
        return bool(self._waiting)

    def indices(self, owner: Owner) -> tuple[SuffixIndex, ...]:
        """The indices of an owner's answers, the newest last; another tuple whenever they are others."""
        return self._indices.get(owner, ())

    def add(self, owner: Owner, answer: list[int]) -> None:
        """Take an answer, or its last part if it is very long. Where too many wait, the oldest of them are left out."""
        tokens = array("i", answer[-(self._most_waiting // 4) :])
        # Work on the first one may have begun.
        while len(self._waiting) > 1 and self._waiting_bytes + _size(tokens) > self._most_waiting:
            self._waiting_bytes -= _size(self._waiting[1][1])
            del self._waiting[1]
        self._waiting.append((owner, tokens))
        self._waiting_bytes += _size(tokens)

    def work(self, most: int) -> None:
        """Index up to that many tokens of answers that wait, or free as much memory."""
        while most > 0 and self._waiting:
            if self.num_bytes + _CHUNK_BYTES > self._most_bytes:
                self._free(min(most, _CHUNK))
                most -= _CHUNK
            else:
                most -= self._index(min(most, _CHUNK))

    def _index(self, most: int) -> int:
        """Index a part of the first answer that waits; returns its number of tokens."""
        owner, answer = self._waiting[0]
        index = self._newest(owner)
        before = index.num_bytes
        tokens = answer[self._place : self._place + most]
        for token in tokens:
            index.append(token)
        self._place += len(tokens)
        if self._place == len(answer):
            index.append(END)
            self._waiting.popleft()
            self._waiting_bytes -= _size(answer)
            self._place = 0
        self._index_bytes += index.num_bytes - before
        self._owners.move_to_end(index)
        return len(tokens)

    def _newest(self, owner: Owner) -> SuffixIndex:
        """The index that an owner's next tokens belong to."""
        indices = self.indices(owner)
        if indices and indices[-1].num_bytes < self._most_bytes // 2:
            return indices[-1]
        index = SuffixIndex()
        self._index_bytes += index.num_bytes
        self._indices[owner] = (*indices, index)
        self._owners[index] = owner
        return index

    def _free(self, count: int) -> None:
        """Free some memory of the index that was written to least recently."""
        if self._freed is None:
            index, owner = self._owners.popitem(last=False)
            left = tuple(other for other in self._indices.pop(owner) if other is not index)
            if left:
                self._indices[owner] = left
            self._freed = index
        before = self._freed.num_bytes
        if self._freed.shrink(2 * count):
            self._index_bytes -= before - self._freed.num_bytes
        else:
            self._index_bytes -= before
            self._freed = None


def _size(answer: array[int]) -> int:
    return _WAITING_ANSWER_BYTES + answer.itemsize * len(answer)
