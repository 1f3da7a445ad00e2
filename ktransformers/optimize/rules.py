"""Rule files: parse and validate. A rule says which modules it means and what is to be done with them.

    - match:                                   at least one of name and class; both given: both must hold
        name: "^model\\\\.layers\\\\..*\\\\.mlp$"       regular expression, searched in the module's dotted name
        class: torch.nn.Linear                 isinstance
      replace:
        class: <operator> | default            default or absent: keep the module, record its devices
        kwargs: {generate_device: cuda, ...}
      recursive: true                          false: rules do not look at the module's children
    - include: default-moe.yaml                the rules of another file, in this place (includes.py)

The format is upstream's (see docs/rules.md). Everything that can be checked without a model is checked here: keys,
names, op names, devices and keyword arguments. Knows no module tree and no machine.
"""

from __future__ import annotations

import logging
import re
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import regex
from torch import nn

from ktransformers.errors import RuleError
from ktransformers.operators.base import COMMON_KWARGS, Operator
from ktransformers.optimize.aliases import (
    OLD_KWARGS,
    OLD_OPS,
    NameProblem,
    legacy_names,
    match_class,
    nearest,
    operator_class,
    undriven_hardware,
)
from ktransformers.optimize.document import Item, parse_yaml, read_yaml
from ktransformers.optimize.includes import RuleEntry, RuleFile, read_entries

__all__ = ["DEVICE_PATTERN", "Rule", "Rules", "load_rules", "parse_rules"]

logger = logging.getLogger(__name__)

DEVICE_PATTERN = re.compile(r"cpu|cuda(:\d{1,3})?")
DEVICE_KWARGS = ("generate_device", "prefill_device", "out_device")
OP_KWARGS = ("generate_op", "prefill_op")

_ONLY_MARLIN = "it tunes a GPU kernel that this operator does not use"
_ONE_LAYOUT = "one kernel serves every shape"
_NO_EFFECT: Mapping[str, str] = {
    # Keyword arguments of upstream that an operator need not know, and why they change nothing there.
    "num_bits": "weights keep the type that they have in the file",
    "group_size": _ONLY_MARLIN,
    "act_order": _ONLY_MARLIN,
    "backend": "the CPU kernels pick their instruction set at run time",
    "absorb_for_prefill": "only latent attention has two forms",
    "per_layer_prefill_intput_threshold": "weights are never moved between devices during prefill",
    "block_size": _ONE_LAYOUT,
    "chunck_size": "prefill is cut by --chunk_size",
    "n_deferred_experts": "no expert is deferred: all of a layer's count in that layer",
    "stride": _ONE_LAYOUT,
    "group_max_len": _ONE_LAYOUT,
    "use_quant": "whether a weight is quantized follows from its file",
    "transfer_map": "only the operator of the layer loop moves hidden states",
}

_MAX_SECONDS = 2.0  # of processor time for all names of a model; published rules take milliseconds


class SlowPattern(Exception):
    """Error: searching a model's names for the pattern takes too long."""


class NamePattern:
    """Compiled pattern of names, searched with an end: some take longer than the universe on a short name.

    pattern: its text. Raises re.error, RecursionError or OverflowError for what is none.
    """

    def __init__(self, text: str):
        re.compile(text)  # the dialect of rule files, which says what is wrong with a pattern; it cannot be stopped
        try:
            self._compiled = regex.compile(text, regex.VERSION0)
        except regex.error as error:
            raise re.error(str(error)) from error
        self.pattern = text
        self._left = _MAX_SECONDS

    def search(self, name: str) -> bool:
        """Whether the pattern is found in `name`. Raises SlowPattern."""
        start = time.thread_time()
        try:
            return self._compiled.search(name, timeout=max(self._left, 0.01)) is not None
        except TimeoutError as error:
            raise SlowPattern(
                f"takes longer than {_MAX_SECONDS:g} s, as nested repetitions do; write it simpler"
            ) from error
        finally:
            self._left -= time.thread_time() - start


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_int_or_list(value: object) -> bool:
    return _is_int(value) or (isinstance(value, list) and all(_is_int(item.value) for item in value))


_BACKENDS = ("llamafile", "AMXBF16", "AMXInt8", "AMXInt4")

_KWARG_TYPES: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "num_bits": (_is_int, "a number"),
    "group_size": (lambda v: isinstance(v, int) and not isinstance(v, bool), "a number"),  # -1 is "whole column"
    "act_order": (lambda v: isinstance(v, bool), "true or false"),
    "backend": (lambda v: v in _BACKENDS, f"{', '.join(_BACKENDS[:-1])} or {_BACKENDS[-1]}"),
    "absorb_for_prefill": (lambda v: isinstance(v, bool), "true or false"),
    "per_layer_prefill_intput_threshold": (_is_int, "a number of tokens, 0 for off"),
    "block_size": (_is_int, "a number"),
    "chunck_size": (_is_int, "a number"),
    "n_deferred_experts": (_is_int_or_list, "a number or a list of numbers"),
    "stride": (_is_int, "a number"),
    "group_max_len": (_is_int, "a number"),
    "use_quant": (lambda v: isinstance(v, bool), "true or false"),
}


@dataclass(frozen=True, slots=True)
class Rule:
    """Checked rule of a rule file. operator None keeps the module. number and line are 1-based, in the file that holds
    the rule.

    devices and ops hold what the rule names of DEVICE_KWARGS and OP_KWARGS (an op that is None or "None" is absent);
    kwargs go to the operator's constructor. kwarg_lines says where each stands.
    has_device: replace has the key `device` of the first releases.
    """

    number: int
    line: int
    source: RuleFile
    name: NamePattern | None
    match_class: type | None
    operator: type[Operator] | None
    devices: Mapping[str, str]
    ops: Mapping[str, str]
    kwargs: Mapping[str, Any]
    recursive: bool
    kwarg_lines: Mapping[str, int] = field(default_factory=dict)
    has_device: bool = False

    @property
    def file(self) -> str:
        """Name of the file that holds the rule, as messages spell it."""
        return self.source.name

    @property
    def place(self) -> str:
        """Place of the rule as FILE:LINE, a shipped file without its folder."""
        return f"{self.source.short_name}:{self.line}"

    def matches(self, key: str, module: nn.Module, model_type: str) -> bool:
        """Whether this rule applies to `module`, whose dotted name is `key` in a model of type `model_type`.

        Raises RuleError for a name's pattern that takes too long.
        """
        if self.match_class is not None and not isinstance(module, self.match_class):
            return False
        try:
            if self.name is not None and not any(
                self.name.search(name) for name in legacy_names(model_type, key, self.name.pattern)
            ):
                return False
        except SlowPattern as problem:
            assert self.name is not None
            raise self.error(f"match.name {self.name.pattern!r:.80} {problem}") from problem
        return self.operator is None or self.operator.is_for(module)

    def error(self, message: str, kwarg: str | None = None) -> RuleError:
        """Return a RuleError that points at this rule, or at one of its keyword arguments."""
        line = self.line if kwarg is None else self.kwarg_lines.get(kwarg, self.line)
        return self.source.error(message, line, self.number)

    def seen_from(self, other: Rule) -> str:
        """Return how a message about `other` names this rule: "rule 5 (line 31)", with its file where that is another
        one.
        """
        name = "" if self.file == other.file else f" of {self.source.short_name}"
        return f"rule {self.number}{name} (line {self.line})"

    def describe(self) -> str:
        """Return what the rule looks for, on one line."""
        parts = [] if self.name is None else [f"name {self.name.pattern!r}"]
        if self.match_class is not None:
            parts.append(f"class {self.match_class.__module__}.{self.match_class.__qualname__}")
        return " and ".join(parts)


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of one file and of those that it includes, in the order in which they are tried."""

    file: str
    rules: tuple[Rule, ...]

    def first_match(self, key: str, module: nn.Module, model_type: str) -> Rule | None:
        """Return the rule that decides about a module; None when no rule matches."""
        return next((rule for rule in self.rules if rule.matches(key, module, model_type)), None)


def load_rules(path: Path, trust: bool = False) -> Rules:
    """Read and check the rule file at `path` and the files that it includes. Raises RuleError with file, line and rule.

    trust: whether classes that are not ktransformers', transformers' or torch's may be imported, which runs their code.
    """
    return _rules_from(read_yaml(path), RuleFile(str(path), path), trust)


def parse_rules(text: str, file: str = "<rules>", trust: bool = False) -> Rules:
    """Check the rules in `text`; `file` names them in errors. trust: see `load_rules`. Raises RuleError.

    Text is in no folder: it can include shipped files only.
    """
    return _rules_from(parse_yaml(text, file), RuleFile(file), trust)


def _rules_from(document: Item | None, file: RuleFile, trust: bool) -> Rules:
    rules = tuple(_RuleParser(entry, trust).rule(entry.item) for entry in read_entries(document, file))
    _report_ineffective(rules)
    return Rules(file.name, rules)


def _report_ineffective(rules: Iterable[Rule]) -> None:
    """One log line per file and keyword argument that is accepted for compatibility's sake and changes nothing."""
    reported: set[tuple[str, str]] = set()
    rules = tuple(rules)
    for file in dict.fromkeys(rule.file for rule in rules if rule.has_device):
        logger.info("%s: replace.device has no effect: kwargs say where a module runs", file)
    for rule in rules:
        known = rule.operator.KWARGS if rule.operator else frozenset()
        for kwarg in rule.kwarg_lines:
            if kwarg in _NO_EFFECT and kwarg not in known and (rule.file, kwarg) not in reported:
                reported.add((rule.file, kwarg))
                what = rule.operator.__name__ if rule.operator else "a kept module"
                logger.info("%s: %s has no effect on %s: %s", rule.file, kwarg, what, _NO_EFFECT[kwarg])


def _op(name: object) -> str:
    """An op's name of today."""
    return OLD_OPS.get(str(name), str(name))


class _RuleParser:
    """Checks one rule of a file; carries what its errors say about where they are."""

    def __init__(self, entry: RuleEntry, trust: bool):
        self.file, self.number, self.trust = entry.file, entry.number, trust

    def fail(self, message: str, line: int) -> RuleError:
        return self.file.error(message, line, self.number)

    def fields(self, item: Item, what: str, known: tuple[str, ...]) -> dict[str, Item]:
        """The mapping `item`, its keys checked against `known`."""
        if not isinstance(item.value, dict):
            raise self.fail(f"{what} must be a mapping with the keys {', '.join(known)}, not {item.kind()}", item.line)
        found: dict[str, Item] = {}
        for key, value in item.value.items():
            if key not in known:
                line = item.key_lines.get(key, item.line)
                raise self.fail(f"unknown key {key!r} in {what}{nearest(str(key), known)}", line)
            found[str(key)] = value
        return found

    def rule(self, item: Item) -> Rule:
        fields = self.fields(item, "a rule", ("match", "replace", "recursive"))
        for required in ("match", "replace"):
            if required not in fields:
                raise self.fail(f"a rule needs the key {required!r}", item.line)
        name, wanted_class = self.match(fields["match"])
        replace = self.fields(fields["replace"], "replace", ("class", "kwargs", "device"))
        operator = self.operator(replace.get("class"))
        kwargs = self.kwargs(replace.get("kwargs"), operator)
        recursive = fields.get("recursive")
        if recursive is not None and not isinstance(recursive.value, bool):
            raise self.fail("recursive must be true or false", recursive.line)
        known = operator.KWARGS if operator else frozenset[str]()
        return Rule(
            number=self.number,
            line=item.line,
            source=self.file,
            name=name,
            match_class=wanted_class,
            operator=operator,
            devices={key: str(kwargs[key].value) for key in DEVICE_KWARGS if key in kwargs},
            ops={key: _op(kwargs[key].value) for key in OP_KWARGS if key in kwargs and kwargs[key].value != "None"},
            kwargs={key: value.plain() for key, value in kwargs.items() if key in known},
            recursive=recursive is None or bool(recursive.value),
            kwarg_lines={key: value.line for key, value in kwargs.items()},
            has_device="device" in replace,
        )

    def match(self, item: Item) -> tuple[NamePattern | None, type | None]:
        fields = self.fields(item, "match", ("name", "class"))
        if not fields:
            raise self.fail("match needs a name, a class, or both", item.line)
        for key, value in fields.items():
            if not isinstance(value.value, str) or not value.value:
                raise self.fail(f"match.{key} must be text, not {value.kind()}", value.line)
        pattern = wanted = None
        if "name" in fields:
            pattern = self.pattern(str(fields["name"].value), fields["name"].line)
        if "class" in fields:
            try:
                wanted = match_class(str(fields["class"].value), self.trust)
            except NameProblem as problem:
                raise self.fail(f"match.class: {problem}", fields["class"].line) from problem
        return pattern, wanted

    def pattern(self, text: str, line: int) -> NamePattern:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                pattern = NamePattern(text)
            except (re.error, RecursionError, OverflowError) as error:
                raise self.fail(f"match.name {text!r} is not a regular expression: {error}", line) from error
        for warning in caught:  # such as "possible nested set" for [[
            logger.warning("%s", self.fail(f"match.name {text!r}: {warning.message}", line))
        return pattern

    def operator(self, item: Item | None) -> type[Operator] | None:
        if item is None or item.value == "default":
            return None
        if not isinstance(item.value, str):
            raise self.fail(f"replace.class must be a dotted name or default, not {item.kind()}", item.line)
        try:
            return operator_class(item.value, self.trust)
        except NameProblem as problem:
            raise self.fail(f"replace.class: {problem}", item.line) from problem

    def kwargs(self, item: Item | None, operator: type[Operator] | None) -> dict[str, Item]:
        """The keyword arguments by name, None values left out. Raises RuleError for what is unknown or ill-typed."""
        if item is None or item.value is None:
            return {}
        own = operator.KWARGS if operator else frozenset[str]()
        known = (*sorted(COMMON_KWARGS | own), *sorted(_NO_EFFECT.keys() - own))
        found = self.renamed(self.fields(item, "kwargs", (*known, *(OLD_KWARGS.keys() - own))), own)
        for key, value in found.items():
            if key in DEVICE_KWARGS and value.value is not None:
                self.check_device(key, value)
            elif key in OP_KWARGS and value.value not in (None, "None"):
                self.check_op(key, value, operator)
            elif key == "transfer_map":
                found[key] = self.transfer_map(value)
            elif key in _KWARG_TYPES and not _KWARG_TYPES[key][0](value.value):
                raise self.fail(f"{key} must be {_KWARG_TYPES[key][1]}, got {value.plain()!r}", value.line)
        return {key: value for key, value in found.items() if value.value is not None or key in own}

    def renamed(self, found: dict[str, Item], own: frozenset[str]) -> dict[str, Item]:
        """The keyword arguments under the names that they have today."""
        out: dict[str, Item] = {}
        for key, value in found.items():
            name = key if key in own else OLD_KWARGS.get(key, key)
            if name != key and name in found:
                raise self.fail(f"{key} and {name} mean the same; leave one out", value.line)
            out[name] = value
        return out

    def check_device(self, key: str, item: Item) -> None:
        if not isinstance(item.value, str) or DEVICE_PATTERN.fullmatch(item.value) is None:
            hint = undriven_hardware(str(item.value))
            more = f" ({hint}: hardware that ktransformers does not drive)" if hint else ""
            raise self.fail(f"{key} must be cpu, cuda or cuda:N, got {item.plain()!r}{more}", item.line)

    def check_op(self, key: str, item: Item, operator: type[Operator] | None) -> None:
        if operator is None:
            raise self.fail(f"{key} needs an operator: with class default the module is kept as it is", item.line)
        name = item.value
        if isinstance(name, str) and (_op(name) in operator.OPS or name == operator.__name__):
            return
        hardware = undriven_hardware(str(name))
        if hardware is not None:
            raise self.fail(f"{key} {name} is for {hardware}, hardware that ktransformers does not drive", item.line)
        if not operator.OPS:
            raise self.fail(f"{key}: {operator.__name__} has one implementation; leave {key} out", item.line)
        hint = nearest(str(name), operator.OPS) or f"; it has {', '.join(operator.OPS)}"
        raise self.fail(f"{key}: {operator.__name__} has no op {name!r}{hint}", item.line)

    def transfer_map(self, item: Item) -> Item:
        """`{layer: device}` with whole layer numbers, which YAML may also give as text."""
        if not isinstance(item.value, dict):
            raise self.fail(f"transfer_map must map layer numbers to devices, not be {item.kind()}", item.line)
        layers: dict[Any, Item] = {}
        for key, device in item.value.items():
            line = item.key_lines.get(key, item.line)
            layer = int(key) if isinstance(key, str) and key.isdecimal() else key
            if not _is_int(layer) or layer in layers:
                raise self.fail(f"transfer_map: {key!r} is not a layer number, or stands there twice", line)
            self.check_device("transfer_map", device)
            layers[layer] = device
        return Item(layers, item.line, {})
