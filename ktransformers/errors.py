"""Every error that ktransformers raises on purpose, as one tree.

    KTransformersError
    ├── ConfigError             a flag, a path or a config value is wrong
    │   └── UnsupportedError    valid, but this program does not do it
    ├── RuleError               a rule file is wrong; carries file, line and rule number
    ├── WeightError             a weight file is wrong or does not fit the model
    │   ├── FormatError         truncated, corrupt or hostile bytes
    │   └── TensorMismatchError a tensor is missing, left over, or has the wrong shape
    ├── CapacityError           does not fit in memory or in the cache
    │   └── ContextLengthError  prompt plus answer are longer than the cache
    └── KernelError             the native extension is missing or cannot run here

A message says what is wrong and what to do about it. The command line prints it without a traceback.
"""

from __future__ import annotations

__all__ = [
    "CapacityError",
    "ConfigError",
    "ContextLengthError",
    "FormatError",
    "KTransformersError",
    "KernelError",
    "RuleError",
    "TensorMismatchError",
    "UnsupportedError",
    "WeightError",
]


class KTransformersError(Exception):
    """Base of all errors that are reported to the user as one message."""


class ConfigError(KTransformersError, ValueError):
    """A flag, a path or a value of a model's config is wrong."""


class UnsupportedError(ConfigError):
    """The request is well-formed, but this program does not do it."""


class RuleError(KTransformersError, ValueError):
    """A rule file is wrong.

    file, line (1-based) and rule (1-based number of the rule in its file) are part of the message when known.
    """

    def __init__(self, message: str, *, file: str | None = None, line: int | None = None, rule: int | None = None):
        self.file, self.line, self.rule = file, line, rule
        where = file or ""
        if line is not None:
            where += f":{line}"
        if rule is not None:
            where += f" (rule {rule})"
        super().__init__(f"{where.strip()}: {message}" if where else message)


class WeightError(KTransformersError):
    """A weight file is wrong or does not fit the model."""


class FormatError(WeightError, ValueError):
    """A file's bytes are truncated, corrupt or hostile. The message names the file."""


class TensorMismatchError(WeightError, ValueError):
    """A tensor is missing, left over, or has the wrong shape. The message names the tensor."""


class CapacityError(KTransformersError):
    """Something does not fit in the memory or in the cache that there is."""


class ContextLengthError(CapacityError, ValueError):
    """A prompt, or a prompt plus its answer, is longer than the cache.

    prompt_len and max_len are in tokens.
    """

    def __init__(self, message: str, *, prompt_len: int, max_len: int):
        self.prompt_len, self.max_len = prompt_len, max_len
        super().__init__(message)


class KernelError(KTransformersError, RuntimeError):
    """The native extension is missing, was built from another version, or cannot run on this processor."""
