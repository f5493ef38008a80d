"""Serve request router that honours an explicit replica id: how a sequence stays with its workers.

The choice of replica is the caller's, made from `registry.known_replicas`; Serve only delivers. The id
travels as the handle's ``session_id``. See docs/decisions/0001-pinned-routing.md.
"""

from __future__ import annotations

import random

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from specdec.cluster import registry

ROUTER_PATH = "specdec.cluster.router:PinnedRouter"


class PinnedRouter(RequestRouter):
    """Send a call to the replica named by its session id; without one, to any replica."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take the controller's list of running replicas and publish it in this process."""
        super().update_replicas(replicas)
        self._publish()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget a replica found dead before the controller says so."""
        super().on_replica_actor_died(replica_id)
        self._publish()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """One candidate: the pinned replica, or a random one.

        When the pinned replica is not running, the caller gets `ReplicaGone`. Raising it here would only have
        Serve log a traceback; Serve drops what was chosen for a call that is over.
        """
        if pending_request is None or not pending_request.metadata.session_id:
            return [[random.choice(candidate_replicas)]]
        # A replica that is busy is asked again after a pause, not in a spin.
        pending_request.routing_context.should_backoff = True
        pinned = pending_request.metadata.session_id
        found = [replica for replica in candidate_replicas if replica.replica_id.unique_id == pinned]
        if found:
            return [found]
        if not pending_request.future.done():
            name = self._deployment_id.name
            pending_request.future.set_exception(
                registry.ReplicaGone(f"{name} replica {pinned} is not running")
            )
        return [candidate_replicas[:1]]

    def _publish(self) -> None:
        replica_ids = tuple(replica.replica_id.unique_id for replica in self._replicas_list)
        registry.publish(self._deployment_id.app_name, self._deployment_id.name, replica_ids)
