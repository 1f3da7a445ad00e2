"""Makes the backend that --backend_type names. Imports that one alone, since each brings an engine of its own with it.

The routes get their backend with their app (`service_of`): there is no global one, so several models can be served by
one process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ktransformers.errors import UnsupportedError

if TYPE_CHECKING:
    from ktransformers.config import EngineConfig
    from ktransformers.server.backend.base import BackendInterfaceBase
    from ktransformers.server.backend.interfaces.transformers import TransformersInterface
    from ktransformers.server.backend.profiler import ProfileConfig
    from ktransformers.server.balance.supervisor import BalanceConfig

__all__ = ["BACKENDS", "create_interface", "interface_class"]

BACKENDS = ("balance_serve", "ktransformers", "transformers")
"""What --backend_type may be."""


def interface_class(backend_type: str) -> type[BackendInterfaceBase]:
    """Return the class of a backend, and import what it needs. Raises UnsupportedError for a name not in BACKENDS."""
    if backend_type == "balance_serve":
        from ktransformers.server.backend.interfaces.balance_serve import BalanceServeInterface

        return BalanceServeInterface
    return _single_class(backend_type)


def create_interface(
    backend_type: str, config: EngineConfig, profile: ProfileConfig | None = None, balance: BalanceConfig | None = None
) -> BackendInterfaceBase:
    """Make a backend, not started, within the event loop that it will live in.

    config: the model, and what it runs with. profile: where profiles are written. balance: how the processes of
    balance_serve share the model, around the same config; the defaults when None. The other backends have no use for
    it. Raises UnsupportedError for a name not in BACKENDS.
    """
    if backend_type == "balance_serve":
        from ktransformers.server.backend.interfaces.balance_serve import BalanceServeInterface
        from ktransformers.server.balance.supervisor import BalanceConfig

        return BalanceServeInterface(balance or BalanceConfig(config), profile=profile)
    return _single_class(backend_type)(config, profile)


def _single_class(backend_type: str) -> type[TransformersInterface]:
    """The class of a backend that computes one request at a time."""
    if backend_type == "ktransformers":
        from ktransformers.server.backend.interfaces.ktransformers import KTransformersInterface

        return KTransformersInterface
    if backend_type == "transformers":
        from ktransformers.server.backend.interfaces.transformers import TransformersInterface

        return TransformersInterface
    raise UnsupportedError(f"--backend_type {backend_type} is not one of {', '.join(BACKENDS)}")
