"""Ray Serve's request router for engines: prefix affinity within a bound on imbalance, else power of two choices.

Of two replicas with as many requests, a new beginning goes to the one that was sent fewer: placed at random, half of the KV
caches would have more beginnings than they hold while the others have room.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from server.ray_serve.affinity import Beginnings
from server.ray_serve.placement import Placement

# A shorter share of a prompt is not worth a longer queue: short system prompts are the same for many.
LEAST_SHARE = 0.25


class PrefixAffinityRouter(RequestRouter):
    """Sends a prompt where its beginning was sent last, unless that replica has too many more requests than another.

    request_router_kwargs: imbalance (16), by how many requests under way the replica with the beginning may be ahead of the
    one with the fewest; capacity (100,000), how many blocks of beginnings are remembered.
    """

    def initialize_state(self, imbalance: int = 16, capacity: int = 100_000) -> None:
        """Called by Ray with request_router_kwargs. Raises ValueError for impossible values."""
        if imbalance < 0 or capacity < 1:
            raise ValueError(f"imbalance ({imbalance}) must be 0 or more and capacity ({capacity}) 1 or more")
        self._imbalance = imbalance
        self._beginnings = Beginnings(capacity)
        self._placement = Placement()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replica with the prompt's beginning, or the less busy of two at random; in case that is full, others."""
        if not candidate_replicas:
            return []
        two = random.sample(candidate_replicas, min(2, len(candidate_replicas)))
        two.sort(key=lambda replica: (self._load(replica), self._beginnings.count(replica.replica_id.unique_id)))
        preferred = self._with_beginning(candidate_replicas, pending_request)
        chosen = [*([] if preferred is None else [preferred]), *two]
        if pending_request is not None:
            self._place(pending_request, chosen[0])
        return [[replica] for replica in chosen]

    def _load(self, replica: RunningReplica) -> int:
        """Requests under way: as many as this router has sent there, or more, which the replica has reported, of others'."""
        reported = self.replica_queue_len_cache.get(replica.replica_id) or 0
        return max(reported, self._placement.count(replica.replica_id.unique_id))

    def _place(self, pending_request: PendingRequest, replica: RunningReplica) -> None:
        request = pending_request.metadata.internal_request_id
        self._placement.place(request, replica.replica_id.unique_id)

        def remove_if_cancelled(routed: asyncio.Future[Any]) -> None:
            if routed.cancelled():  # before it was sent, so that on_request_completed is never called
                self._placement.remove(request)

        pending_request.future.add_done_callback(remove_if_cancelled)

    def _with_beginning(
        self, candidates: list[RunningReplica], pending_request: PendingRequest | None
    ) -> RunningReplica | None:
        blocks = _blocks(pending_request)
        by_id = {replica.replica_id.unique_id: replica for replica in candidates}
        name, count = self._beginnings.find(blocks, by_id.keys())
        if name is None or count < LEAST_SHARE * len(blocks):
            return None
        ahead = self._load(by_id[name]) - min(map(self._load, candidates))
        return by_id[name] if ahead <= self._imbalance else None

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Remember where the prompt went."""
        self._beginnings.record(_blocks(pending_request), replica_id.unique_id)
        self._placement.correct(pending_request.metadata.internal_request_id, replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """The replica has one request less."""
        self._placement.remove(internal_request_id, replica_id.unique_id)


def _blocks(pending_request: PendingRequest | None) -> tuple[bytes, ...]:
    """The beginnings that the ingress sends along as Engine.answer's second argument."""
    arguments = [] if pending_request is None else pending_request.args
    return arguments[1] if len(arguments) > 1 and isinstance(arguments[1], tuple) else ()
