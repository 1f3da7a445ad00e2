"""The exit codes of all commands, and which error ends with which."""

from __future__ import annotations

from ktransformers.errors import ConfigError, ConversationError, FieldError, KTransformersError, RuleError

__all__ = ["FAILED", "INTERRUPTED", "OK", "WRONG_USAGE", "exit_code"]

OK = 0
FAILED = 1
"""What was asked for was begun, or could have been, and failed: weights, memory, the network, a port that is taken."""
WRONG_USAGE = 2
"""What was asked for is refused, however often it is asked: a flag, a value, a rule file, a model that there is not."""
INTERRUPTED = 130
"""Ctrl-C: 128 and the signal's number, as shells have it."""


def exit_code(error: KTransformersError) -> int:
    """Return the code that a command ends with when it raises `error`.

    A conversation that a template refuses and a field of a request are errors of what was said, not of the command.
    """
    is_usage = isinstance(error, ConfigError | RuleError) and not isinstance(error, ConversationError | FieldError)
    return WRONG_USAGE if is_usage else FAILED
