"""Requests of one router at each replica, counted from the moment that a replica is chosen."""

from __future__ import annotations

from collections import Counter


class Placement:
    """Requests under way by replica.

    Ray's own counts learn of a request when its replica has accepted it, and are overwritten by what replicas reported
    meanwhile: of requests that come together most would go to the same replica.
    """

    def __init__(self) -> None:
        self._replicas: dict[str, str] = {}
        self._counts: Counter[str] = Counter()

    def place(self, request: str, replica: str) -> None:
        """The request goes to replica; where it was placed before does not count any more."""
        if (before := self._replicas.pop(request, None)) is not None:
            self._counts[before] -= 1
        self._replicas[request] = replica
        self._counts[replica] += 1

    def correct(self, request: str, replica: str) -> None:
        """The request was sent to replica, whichever was chosen; nothing to be done for one that has ended already."""
        if request in self._replicas:
            self.place(request, replica)

    def remove(self, request: str, replica: str | None = None) -> None:
        """The request has ended, at replica if one is given: one that meanwhile was placed elsewhere goes on."""
        if request in self._replicas and replica in (None, self._replicas[request]):
            self._counts[self._replicas.pop(request)] -= 1

    def count(self, replica: str) -> int:
        """Requests that are under way at replica."""
        return self._counts[replica]
