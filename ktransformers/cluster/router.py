"""Ray Serve's router for replicas: `PrefixAffinity` on its interface. Runs in the process that asks."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from typing_extensions import override

from ktransformers.cluster.affinity import PrefixAffinity, keys_in

__all__ = ["PrefixRouter"]


class PrefixRouter(RequestRouter):
    """Ranks all replicas for each request, by the keys of its prompt, which are the second argument of `answer`.

    Serve tries them in this order, and drops those that have died.
    """

    @override
    def initialize_state(self, max_imbalance: int, **kwargs: Any) -> None:
        """Set the router up. max_imbalance: see PrefixAffinity. Called by Serve with request_router_kwargs."""
        self._affinity = PrefixAffinity(max_imbalance)
        self._open: dict[str, tuple[str, PendingRequest]] = {}  # by Serve's id of the request: where it is

    def _loads(self, replicas: list[RunningReplica]) -> dict[str, int]:
        """Answers that each has to do. One that was given up before it was sent is not told of, and found here."""
        for name in [name for name, (_, pending) in self._open.items() if pending.future.cancelled()]:
            del self._open[name]
        counts = Counter(replica for replica, _ in self._open.values())
        return {name: counts[name] for name in (str(replica.replica_id.unique_id) for replica in replicas)}

    @override
    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Rank the replicas for a request, one a rank, see RequestRouter."""
        keys = _keys(pending_request)
        by_name = {str(replica.replica_id.unique_id): replica for replica in candidate_replicas}
        ranked = self._affinity.ranked(keys, self._loads(candidate_replicas))
        if pending_request is not None and ranked:
            self._open[pending_request.metadata.internal_request_id] = ranked[0], pending_request
            self._affinity.took(ranked[0], keys)  # at once, so that its twins in the same moment follow it
        return [[by_name[name]] for name in ranked]

    @override
    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Note which replica a request went to, which may not be the first of those that were chosen."""
        self._open[pending_request.metadata.internal_request_id] = replica_id.unique_id, pending_request
        self._affinity.took(replica_id.unique_id, _keys(pending_request))

    @override
    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Note that a request's answer has ended, or its replica."""
        self._open.pop(internal_request_id, None)

    @override
    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget what a replica that died knew."""
        super().on_replica_actor_died(replica_id)
        self._forget_others()

    @override
    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take in which replicas there are, after others have come or gone."""
        super().update_replicas(replicas)
        self._forget_others()

    def _forget_others(self) -> None:
        self._affinity.keep(replica_id.unique_id for replica_id in self.curr_replicas)


def _keys(pending: PendingRequest | None) -> list[bytes]:
    """Of calls that are no answers there are none."""
    args: list[bytes] = [] if pending is None else pending.args
    return keys_in(args[1]) if len(args) == 2 else []
