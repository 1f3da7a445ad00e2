"""The native extension. Only this package imports it, and everything of it is imported from here."""

from ktransformers.errors import KernelError

try:
    from ktransformers import _native as extension
except ImportError as error:
    raise KernelError(
        f"the native extension ktransformers._native cannot be loaded ({error}); build it with `pip install .`"
    ) from error

__all__ = ["extension"]
