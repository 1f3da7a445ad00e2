"""Several replicas of a model behind one address, kept by Ray Serve. Needs the extra `cluster`; see docs/cluster.md.

    client ── HTTP ──> Serve's proxy ──> Ingress: the FastAPI app over a ReplicaInterface
                                           │ Ask: token ids          ^ messages: events, in batches
                                           v                         │
                                         EngineReplica: a BalanceServeInterface with processes of its own

What decides and what recovers knows no Ray: `affinity`, `backend`, `replica`, `stats`, over the records of `records`.
Ray is imported by `router`, `handles`, `deployments` and `running` alone.
"""

from typing import Any

from ktransformers.cluster.config import ClusterArgs

__all__ = ["ClusterArgs", "app"]


def app(args: ClusterArgs) -> Any:
    """Make the application, for `serve deploy` with import_path ktransformers.cluster:app. Returns ray.serve's
    Application.

    Raises ConfigError where Ray is not installed, and for what ClusterArgs.checked refuses.
    """
    from ktransformers.cluster.deployments import application  # Ray is an extra: most installations lack it

    return application(args.checked())
