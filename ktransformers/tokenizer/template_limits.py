"""Limits for chat templates, which come with a model's files: of time, of text, and of what a single operation makes.

transformers renders templates in Jinja's sandbox, which keeps them from files and from Python, but lets them loop for
years and multiply text without end. Within `limited()` its templates are compiled in an environment that counts.
"""

from __future__ import annotations

import functools
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer
from transformers.utils import chat_template_utils

from ktransformers.tokenizer.template_sizes import MAX_FORMAT_CHARS, estimated_nbytes, resident_nbytes, text_size

__all__ = ["TEMPLATE_ERRORS", "limited", "why_no_template"]

TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    AttributeError,
    LookupError,
    ArithmeticError,
    AssertionError,  # of Jinja's compiler, for blocks in odd places
    SyntaxError,  # Python's own, for blocks that are nested too deeply, as the next two are
    RecursionError,
    MemoryError,
)
"""What a template may raise that is wrong, or does not fit a conversation."""


MAX_SECONDS = 2.0  # of processor time; a conversation of a megabyte takes a tenth of a second
MAX_CHARS = 1 << 26
MAX_NUMBER = 1 << 20  # of repetitions, columns, spaces
MAX_NBYTES = 1 << 28  # of texts and lists, all together
MAX_TEMPLATE_CHARS = 1 << 21
_LARGE = 1 << 16  # bytes: smaller texts and lists are bounded by the time that making them takes
_WIDTH = re.compile(r"\d{6}")
_CHECK_EVERY = 64

_state = threading.local()


class TemplateLimitError(jinja2.TemplateError):
    """The error for a template that takes too long or makes too much."""


class _Budget:
    """What one rendering has left."""

    def __init__(self) -> None:
        self.deadline = time.thread_time() + MAX_SECONDS
        self.steps = 0
        self.nbytes = 0  # of what was made, gone or not
        self.resident: int | None = None

    def make(self, nbytes: int) -> None:
        """Count `nbytes` that are going to be made.

        Some of it may be gone again; what is kept shows in the process's memory.
        Raises TemplateLimitError.
        """
        if nbytes < _LARGE:
            return
        if self.resident is None:
            self.resident = resident_nbytes() or 0
        self.nbytes += nbytes
        if nbytes > MAX_NBYTES or (self.nbytes > MAX_NBYTES and self._has_kept()):
            raise TemplateLimitError(f"it makes texts of more than {MAX_NBYTES >> 20} MiB")

    def _has_kept(self) -> bool:
        now = resident_nbytes()
        return now is None or now - (self.resident or 0) > MAX_NBYTES // 2

    def step(self) -> None:
        self.steps += 1
        if self.steps % _CHECK_EVERY == 0 and time.thread_time() > self.deadline:
            raise TemplateLimitError(f"it takes longer than {MAX_SECONDS:g} s")


def _step() -> None:
    budget = getattr(_state, "budget", None)
    if budget is not None:
        budget.step()


def _make(nbytes: int) -> None:
    budget = getattr(_state, "budget", None)
    if budget is not None:
        budget.make(nbytes)


def _made(value: Any) -> Any:
    """What an operation has made, counted."""
    if isinstance(value, str | list | tuple | dict):
        _make(sys.getsizeof(value))
    return value


def _as_text(value: Any) -> Any:
    """A value that is to be written or compared: one that reaches the same things again and again may have no end."""
    if isinstance(value, list | tuple | dict | set | frozenset):
        _check(text_size(value, MAX_CHARS))
    return value


def _check(chars: int) -> None:
    if chars > MAX_CHARS:
        raise TemplateLimitError(f"it makes a text of more than {MAX_CHARS} characters")


def _size(value: object) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple | dict) else 0


def _checked_parts(parts: Iterable[Any], separator: int = 0) -> list[Any]:
    """The parts of a text to be joined, each followed by `separator` characters, their sum checked as they come."""
    total, kept = 0, []
    for part in parts:
        total += _size(part) + separator
        _check(total)
        kept.append(part)
    return kept


def _joined(parts: Iterable[Any]) -> str:
    return "".join(_checked_parts(parts))


def _concat(parts: Iterable[Any]) -> str:
    return str(_made(_joined(str(_as_text(part)) for part in parts)))


def _ticking(items: Any) -> Iterator[Any]:
    for item in items:
        _step()
        yield item


def _loop_items(items: Any) -> Any:
    """What a loop goes over, counted; of what has a length, the length stays known."""
    return _CountedSequence(items) if isinstance(items, list | tuple | range | str | dict) else _ticking(items)


class _CountedSequence:
    """The items of a sequence. Loops ask for `__len__` and iterate."""

    def __init__(self, items: Any):
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        return _ticking(self._items)


class _OwnList(list[Any]):
    """A list that a template has made itself, and may therefore change: nobody else holds it."""


_MAKE_LISTS = frozenset({"list", "sort"})  # filters whose result is new
_CHANGES = frozenset({"append", "extend", "insert", "pop", "remove", "reverse", "clear"})
"""Methods by which templates may change their own lists. transformers' sandbox lets them change none."""


@jinja2.pass_context  # so that the compiler does not make one list for all renderings
def _own_list(context: Any, items: Any) -> _OwnList:
    return _OwnList(items)


_STRUCTURAL = frozenset(
    {"attr", "batch", "count", "d", "default", "first", "items", "last", "length", "list", "map", "random", "reject",
     "rejectattr", "reverse", "select", "selectattr", "slice"}
)  # fmt: skip
"""Filters that neither write their subject nor compare what is in it."""


class _Counting(NodeTransformer):
    """Makes loops count their rounds and `~` count its characters, and marks lists as the template's own."""

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Filter(node, "__own_list", [], [], None, None, lineno=node.lineno)

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "__loop_items", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        self.generic_visit(node)
        parts: list[Any] = [node, *node.ops]
        for each in parts:
            if not isinstance(each.expr, nodes.Const):
                each.expr = nodes.Filter(each.expr, "__as_text", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Pair:
        self.generic_visit(node)
        if not isinstance(node.key, nodes.Const):  # hashing goes through all of a tuple
            node.key = nodes.Filter(node.key, "__as_text", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(parts, "__concat", [], [], None, None, lineno=node.lineno)


def _check_arguments(name: str, subject: Any, args: Sequence[Any]) -> None:
    """Refuse what would make very much in one go, before it is made: widths, counts, replacements."""
    if any(isinstance(arg, int) and abs(arg) > MAX_NUMBER for arg in args) and name not in ("int", "float", "abs"):
        raise TemplateLimitError(f"{name} is given a number above {MAX_NUMBER}")
    if name in ("format", "format_map") and isinstance(subject, str) and _WIDTH.search(subject):
        raise TemplateLimitError("it formats with a width of six digits")
    if name in ("strftime_now", "strftime") and any(_size(arg) > MAX_FORMAT_CHARS for arg in args):
        raise TemplateLimitError(f"it formats a date with more than {MAX_FORMAT_CHARS} characters")
    if name not in _STRUCTURAL:
        for value in (subject, *args):
            _as_text(value)
    _make(estimated_nbytes(name, subject, args))
    if name == "replace" and len(args) >= 2 and isinstance(subject, str):
        old, new = str(args[0]), str(args[1])
        _check(len(subject) + (subject.count(old) if old else len(subject) + 1) * len(new))
    if name == "indent" and args:
        _check(_size(subject) + str(subject).count("\n") * (args[0] if isinstance(args[0], int) else _size(args[0])))


def _limited_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    takes_context = hasattr(function, "jinja_pass_arg")

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _step()
        own = args[1:] if takes_context else args
        _check_arguments(name, own[0] if own else None, [*own[1:], *kwargs.values()])
        result = function(*args, **kwargs)
        _check(_size(result))
        _made(result)
        return _OwnList(result) if name in _MAKE_LISTS and type(result) is list else result

    return checked


def _limited_test(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _step()
        for arg in args:
            _as_text(arg)
        return function(*args, **kwargs)

    return checked


_COMPARING = (
    "eq",
    "equalto",
    "==",
    "ne",
    "!=",
    "lt",
    "lessthan",
    "<",
    "le",
    "<=",
    "gt",
    "greaterthan",
    ">",
    "ge",
    ">=",
    "in",
)


def _join(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def checked(eval_ctx: Any, value: Any, d: str = "", attribute: Any = None) -> Any:
        return function(eval_ctx, _checked_parts(_ticking(value), len(str(d))), d, attribute)

    return checked


class _LimitedEnvironment(ImmutableSandboxedEnvironment):
    """transformers' sandbox, whose loops, calls, filters and operators count."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))
    concat = staticmethod(_joined)

    def __init__(self, like: Any):
        super().__init__(trim_blocks=like.trim_blocks, lstrip_blocks=like.lstrip_blocks, finalize=_as_text)
        self.extensions = {name: extension.bind(self) for name, extension in like.extensions.items()}
        self.globals.update(like.globals)
        self.globals.pop("lipsum", None)  # text without a sense, as much of it as is asked for
        tests: dict[str, Any] = self.tests
        tests.update({name: _limited_test(tests[name]) for name in _COMPARING})
        self.filters.update({name: _limited_filter(name, filter_) for name, filter_ in like.filters.items()})
        self.filters["join"] = _limited_filter("join", _join(like.filters["join"]))
        self.filters |= {"__loop_items": _loop_items, "__concat": _concat, "__as_text": _as_text}
        self.filters["__own_list"] = _own_list

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Counting().visit(super()._parse(source, name, filename))
        return tree

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may use an attribute; those that change a list may be used of the template's own."""
        return (isinstance(obj, _OwnList) and attr in _CHANGES) or bool(super().is_safe_attribute(obj, attr, value))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute it, unless the result would be very large. Raises TemplateLimitError."""
        _step()
        if operator == "+":
            _check(_size(left) + _size(right))
            _make(sys.getsizeof(left) + sys.getsizeof(right) if _size(left) + _size(right) else 0)
        elif operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(other, int):
                    _check(_size(one) * other)
                    _make(sys.getsizeof(one) * max(other, 0) if _size(one) else 0)
            if isinstance(left, int) and isinstance(right, int):
                _check(left.bit_length() + right.bit_length())
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check(left.bit_length() * abs(right) * 64)
        elif operator == "%" and isinstance(left, str) and (_WIDTH.search(left) or "*" in left):
            raise TemplateLimitError("it formats with a width of six digits")
        elif operator == "%" and isinstance(left, str):
            _check_arguments("%", left, [right])
        made = super().call_binop(context, operator, left, right)
        return _OwnList(made) if type(made) is list else made

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        _step()
        method = getattr(obj, "__wrapped__", obj)  # the sandbox wraps methods that format
        name, subject = getattr(method, "__name__", ""), getattr(method, "__self__", None)
        if isinstance(subject, str):
            if name == "join" and args:
                args = (_checked_parts(_ticking(args[0]), len(subject)), *args[1:])
            _check_arguments(name, subject, [*args, *kwargs.values()])
        elif isinstance(subject, _OwnList) and name == "extend" and args:
            args = (_checked_parts(_ticking(args[0]), 1),)
            _check(len(subject) + len(args[0]))
        elif name == "strftime_now":
            _check_arguments(name, None, [*args, *kwargs.values()])
        result = super().call(context, obj, *args, **kwargs)
        _check(_size(result))
        return _made(result)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Look a key up as Jinja does, within the limits. Looking a key up hashes it, all of a tuple."""
        return super().getitem(obj, _as_text(argument))


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    if len(template) > MAX_TEMPLATE_CHARS:
        raise TemplateLimitError(f"it is longer than {MAX_TEMPLATE_CHARS} characters")
    return _LimitedEnvironment(_theirs("").environment).from_string(template)


_theirs = chat_template_utils._compile_jinja_template


def _compile(template: str) -> Any:
    """What transformers calls: compiled with limits within `limited()`, as ever outside of it."""
    return _theirs(template) if getattr(_state, "budget", None) is None else _compiled(template)


chat_template_utils._compile_jinja_template = _compile


@contextmanager
def limited() -> Iterator[None]:
    """Limit templates that transformers renders on this thread in the block: they raise jinja2.TemplateError."""
    _state.budget = _Budget()
    try:
        yield
    finally:
        _state.budget = None


def why_no_template(template: str) -> str | None:
    """Return what is wrong with the source of a chat template, or None. Does not render it."""
    try:
        _compiled(template)
    except TEMPLATE_ERRORS as error:
        return str(error)[:200] or type(error).__name__
    return None
