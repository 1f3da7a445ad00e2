"""The parser that all commands use: argparse with the spellings, sources and hints that users expect.

Flags are spelled with underscores, as users' scripts have them; hyphens are accepted for them everywhere. A command's
value comes from the command line, else from the environment (KTRANSFORMERS_<FLAG>), else from the file that --config
names, else it is the default; see settings.py. Flags of other programs are rewritten as foreign_flags.py says.
Imports nothing heavy.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

from typing_extensions import override

from ktransformers.cli.parsing import foreign_flags, settings
from ktransformers.cli.parsing.draft_flags import SpeculativeWords
from ktransformers.cli.parsing.foreign_flags import MODEL, ForeignFlag
from ktransformers.cli.parsing.settings import Setting
from ktransformers.config import precision_fields
from ktransformers.errors import ConfigError

__all__ = ["COMMAND_LINE", "ArgumentParser", "add_toggle", "check_place", "leaves", "user_path", "with_underscores"]

COMMAND_LINE = "command line"
_BOOLEANS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Formats help: usage in one line whatever the number of flags; toggles as --[no_]flag; short names of values."""

    def add_usage(self, usage: str | None, actions: Any, groups: Any, prefix: str | None = None) -> None:
        if usage is None:
            words = ["%(prog)s"] + ["[options]"] * any(action.option_strings for action in actions)
            for action in actions:
                if not action.option_strings:
                    words.append(self._format_args(action, self._get_default_metavar_for_positional(action)))
            usage = " ".join(words)
        super().add_usage(usage, actions, groups, prefix)

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        if isinstance(action, argparse._SubParsersAction):  # they are indented once more, which argparse forgets
            self._action_max_length = max(self._action_max_length, max(map(len, action.choices)) + 6)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, _Toggle) and action.negatives:
            shown = [name for name in action.option_strings if name not in action.negatives]
            return ", ".join(f"--[no_]{name[2:]}" if f"--no_{name[2:]}" in action.negatives else name for name in shown)
        return super()._format_action_invocation(action)

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        kind: Any = action.type
        return {int: "N", float: "X", user_path: "PATH", Path: "PATH"}.get(kind, "TEXT")

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Paragraphs are wrapped; those with indented lines are kept as they are."""
        paragraphs = [part.strip("\n") for part in text.split("\n\n")]
        wrap = super(argparse.RawDescriptionHelpFormatter, self)._fill_text
        return "\n\n".join(part if "\n " in part else wrap(part, width, indent) for part in paragraphs)


class _Toggle(argparse.Action):
    """--flag and --no_flag. Stands in for argparse's store_true as well."""

    def __init__(self, option_strings: Sequence[str], dest: str, default: bool | None = False, **kwargs: Any):
        names = list(option_strings)
        positive = [name for name in names if name.startswith("--") and not name.startswith("--no_")]
        self.negatives = frozenset(f"--no_{name[2:]}" for name in positive)
        names += sorted(self.negatives.difference(names))
        super().__init__(names, dest, nargs=0, default=default, **kwargs)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, option_string not in self.negatives)


class _PrintConfig(argparse._StoreTrueAction):
    """--print_config: not a setting itself."""


def add_toggle(parser: argparse._ActionsContainer, name: str, *, default: bool | None, help: str) -> None:
    """Add the flags --name and --no_name."""
    parser.add_argument(f"--{name}", dest=name, action=_Toggle, default=default, help=help)


def user_path(text: str) -> Path:
    """Return the path that a user wrote, ~ expanded. Raises ArgumentTypeError for none: to pathlib it is the current
    folder."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty")
    return Path(text).expanduser()


def check_place(path: Path) -> None:
    """Raise ConfigError unless a file can be written at `path`: asked before the long work of which it is made."""
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; name the file to write")
    if not path.parent.is_dir():
        raise ConfigError(f"{path.parent} is no folder; make it first")


def _is_flag(word: str) -> bool:
    """Whether this is no value: as argparse sees it, a word with a space before any `=` is text."""
    return word.startswith("-") and word != "-" and " " not in word.partition("=")[0]


def _is_file(word: str) -> bool:
    """Whether this must be MODEL, and not one more word of a list."""
    return word.endswith(".gguf") or (word != "" and user_path(word).exists())


class ArgumentParser(argparse.ArgumentParser):
    """The parser of one command, or of several when has_settings is False: then it only finds the command.

    After parse_args, `value_sources` of the namespace says for each dest that is not the default where its value comes
    from: "command line", a variable, or a file with its line.
    """

    def __init__(self, *args: Any, has_settings: bool = True, **kwargs: Any):
        super().__init__(*args, **{"allow_abbrev": False, "formatter_class": HelpFormatter, **kwargs})
        self.register("action", "store_true", _Toggle)
        self._has_settings = has_settings
        self._origin: str | None = None  # of the value that is parsed now, when it is not the command line
        self.elsewhere: Mapping[str, str] = {}
        """Names of other commands' flags, and one of the commands that have them. Known below build_parser only."""
        self.moved: Mapping[str, str] = {}
        """Names of former commands below this one, each with a line that says where it is now."""
        if has_settings:
            text = "YAML file of flags; KTRANSFORMERS_<FLAG> and the command line win over it"
            self.add_argument("--config", type=user_path, metavar="FILE", help=text)
            text = "print every value and where it comes from, as YAML, and end"
            self.add_argument("--print_config", action=_PrintConfig, help=text)

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        """Parse as argparse does.

        Flags that nobody knows are an error here already, while their neighbours are at hand.
        """
        words = sys.argv[1:] if args is None else list(args)
        namespace = argparse.Namespace() if namespace is None else namespace
        actions = self.settings() if self._has_settings else {}
        for action in actions.values():
            setattr(namespace, action.dest, None)  # argparse keeps what is there, so that None means "not given"
        translated = self._translated(words) if self._has_settings else with_underscores(words)
        namespace, unknown = super().parse_known_args(translated, namespace)
        if unknown:
            self.error(self._explain(next(filter(_is_flag, unknown), unknown[0])))
        if self._has_settings:
            self._complete(namespace, actions)
        return namespace, unknown

    def with_settings(
        self, args: argparse.Namespace, *layers: Sequence[Setting], without: Container[str] = ()
    ) -> argparse.Namespace:
        """Return `args` as given, completed by the first layer of settings that says a value, then by defaults.

        without: dests that are as if they were not given. Ends with an error for settings that are wrong.
        """
        actions = self.settings()
        made = argparse.Namespace(**dict.fromkeys(action.dest for action in actions.values()))
        given: dict[str, str] = getattr(args, "value_sources", {})
        sources = {dest: origin for dest, origin in given.items() if dest not in without}
        for dest in sources:
            setattr(made, dest, getattr(args, dest))
        for layer in layers:
            self._merge(made, sources, layer)
        self._fill_in(made, sources, actions)
        return made

    def settings(self) -> dict[str, argparse.Action]:
        """Return actions by the name that the environment and files use: the first long name, a positional's dest."""
        found = {}
        for action in self._actions:
            names = [name for name in action.option_strings if name.startswith("--")]
            is_model = not action.option_strings and action.nargs == argparse.OPTIONAL
            is_value = argparse.SUPPRESS not in (action.dest, action.default) and not isinstance(action, _PrintConfig)
            if is_value and (names or is_model):
                found[names[0][2:] if names else action.dest] = action
        return found

    def option_names(self) -> Iterator[str]:
        """Yield the name of every long flag without its dashes."""
        for name in self._option_string_actions:
            if name.startswith("--"):
                yield name[2:]

    def _is_list(self, name: str) -> bool:
        return isinstance(self._option_string_actions.get(name), argparse._AppendAction)

    def has_option(self, name: str) -> bool:
        """Whether `name`, dashes included, is one of this command's own flags."""
        return name in self._option_string_actions

    # Where values come from

    def _complete(self, namespace: argparse.Namespace, actions: dict[str, argparse.Action]) -> None:
        """Fill in what the command line left open."""
        sources = {}
        for action in actions.values():
            if not action.option_strings and getattr(namespace, action.dest) is action.default:
                setattr(namespace, action.dest, None)
            if getattr(namespace, action.dest) is not None:
                sources[action.dest] = COMMAND_LINE
        self._merge(namespace, sources, settings.from_environment(os.environ, list(actions)))
        if getattr(namespace, "config", None) is not None:
            self._origin = f"--config {namespace.config}"
            try:
                given = settings.from_file(namespace.config)
            except ConfigError as error:
                self.error(str(error))
            self._merge(namespace, sources, given)
        if (precision := getattr(namespace, "precision", None)) is not None:
            fields = precision_fields(precision, {dest: getattr(namespace, dest) for dest in sources})
            own = [Setting(name, (value,), f"--precision {precision}") for name, value in fields.items()]
            self._merge(namespace, sources, [one for one in own if self.has_option(f"--{one.name}")])
        self._fill_in(namespace, sources, actions)
        if vars(namespace).pop("print_config", False):
            values = {name: getattr(namespace, a.dest) for name, a in actions.items() if name != "config"}
            origins = {name: sources[a.dest] for name, a in actions.items() if a.dest in sources}
            self._print_message(settings.as_yaml(self.prog, values, origins), sys.stdout)
            self.exit(0)

    def _fill_in(
        self, namespace: argparse.Namespace, sources: dict[str, str], actions: Mapping[str, argparse.Action]
    ) -> None:
        """Defaults where nothing was said."""
        for action in actions.values():
            if action.dest not in sources and getattr(namespace, action.dest) is None:
                is_text = isinstance(action.default, str)
                default = self._get_value(action, action.default) if is_text else action.default
                setattr(namespace, action.dest, default)
        namespace.value_sources = sources

    def _merge(self, namespace: argparse.Namespace, sources: dict[str, str], given: Sequence[Setting]) -> None:
        """Take the values of one source where no earlier one has said anything. All are checked."""
        scratch = argparse.Namespace()
        origins: dict[str, str] = {}
        for setting in given:
            self._origin = setting.origin
            for dest in self._apply(setting, scratch):
                if origins.setdefault(dest, setting.origin) != setting.origin:
                    self.error(f"{setting.name} says what {origins[dest]} says already; leave one out")
        self._origin = None
        settled = set(sources)
        for rivals in self._rivals():
            if rivals & settled:
                settled |= rivals
        for dest in origins.keys() - settled:
            setattr(namespace, dest, getattr(scratch, dest))
            sources[dest] = origins[dest]

    def _rivals(self) -> list[set[str]]:
        """Dests that are one choice: who names a model, or one of several exclusive flags, has chosen."""
        exclusive = [{action.dest for action in group._group_actions} for group in self._mutually_exclusive_groups]
        return [{"model", "model_path", "gguf_path"}, *exclusive]

    def _apply(self, setting: Setting, namespace: argparse.Namespace) -> Iterator[str]:
        """Parse one setting into `namespace`. Yields the dests that it sets."""
        option = f"--{setting.name}"
        positional = next((a for a in self._actions if not a.option_strings and a.dest == setting.name), None)
        if positional is not None:
            yield self._take(positional, [",".join(setting.texts)], setting.name, namespace)
            return
        if not self.has_option(option) and self._foreign(option) is None:
            if self._owner(option) is None:
                self.error(self._explain(setting.name, "unknown key"))
            print(f"note: {setting.origin}: {setting.name} has no effect on {self.prog}", file=sys.stderr)
            return
        own = self._option_string_actions.get(option)
        if own is not None and own.nargs in (argparse.ZERO_OR_MORE, argparse.ONE_OR_MORE):
            yield self._take(own, list(setting.texts), option, namespace)
            return
        for text in setting.texts if self._is_list(option) else [",".join(setting.texts)]:
            for word in self._translated([f"{option}={text}"]):
                name, equals, value = word.partition("=")
                action = self._option_string_actions.get(name)
                if action is None:  # what foreign flags make of --model
                    action, name, equals, value = self._model_argument(), "model", "=", word
                assert action is not None, f"{word} was translated for another command"
                if action not in self.settings().values() or (action.dest == "config" and setting.is_from_file):
                    self.error(f"{setting.name} cannot be set here")
                yield self._take(action, [value] if equals else [], name, namespace)

    def _take(self, action: argparse.Action, values: list[str], name: str, namespace: argparse.Namespace) -> str:
        """Let `action` check and store `values`. Returns its dest."""
        try:
            action(self, namespace, self._get_values(action, values), name)
        except argparse.ArgumentError as error:
            self.error(f"{name}: {error.message}")
        return action.dest

    # What is rewritten

    def _translated(self, words: Sequence[str]) -> list[str]:
        """Underscores for hyphens, words for toggles' values, our flags for those of other programs.

        Positional arguments come out together, MODEL first: argparse settles all that may be left out at the first
        place that has one, so that in `chat -m MODEL -n 5 "hello"` no PROMPT would be found.
        """
        rest = list(words)
        flags: list[str] = []
        positionals: list[str] = []
        models: list[str] = []  # by another program's flag, which may stand anywhere
        given: dict[str, str] = {}  # names, by what each became
        while rest and rest[0] != "--":
            word = rest.pop(0)
            if not _is_flag(word):
                positionals.append(word)
                continue
            name, equals, value = with_underscores([word])[0].partition("=")
            action = self._option_string_actions.get(name)
            foreign = self._foreign(name) if action is None else None
            if foreign is not None:
                new = self._rewritten(foreign, name, value if equals else None, rest)
                self._refuse_twice(given, name, new)
                is_model = bool(new) and not new[0].startswith("-")
                (models if is_model else flags).extend(new)
                continue
            if action is not None and action.nargs == 0 and not isinstance(action, argparse._HelpAction):
                new = self._switched(action, name, value if equals else None, rest)
            else:
                new = [f"{name}{equals}{value}"]
            if action is not None:
                self._refuse_twice(given, name, new)
                flags += new + ([] if equals else self._values(action, rest))
            else:
                flags += new
        if rest:
            return [*flags, rest[0], *models, *positionals, *rest[1:]]
        return [*models, *positionals, *flags]

    def _values(self, action: argparse.Action, rest: list[str]) -> list[str]:
        """The words that are values of a flag of ours, taken from `rest`, which begins behind it."""
        most = {None: 1, argparse.OPTIONAL: 1}.get(cast(Any, action.nargs), 0 if action.nargs == 0 else len(rest))
        taken: list[str] = []
        while rest and len(taken) < most and (not _is_flag(rest[0]) or self._is_negative(rest[0])):
            if taken and _is_file(rest[0]):
                break  # MODEL behind a list
            taken.append(rest.pop(0))
        return taken

    def _is_negative(self, word: str) -> bool:
        """Whether this is a number below zero, and no flag."""
        return self._negative_number_matcher.match(word) is not None and not self._has_negative_number_optionals

    def _refuse_twice(self, given: dict[str, str], name: str, words: Sequence[str]) -> None:
        """Another program's name for what is given already: which of them should win would be a guess."""
        for word in words:
            target = word.partition("=")[0] if word.startswith("-") else MODEL
            action = self._option_string_actions.get(target)
            before = given.setdefault(target if action is None else action.dest, name)
            is_foreign = not (self.has_option(name) and self.has_option(before))
            if before != name and is_foreign and not self._is_list(target):
                self.error(f"{before} and {name} both mean {target}; leave one out")

    def _switched(self, action: argparse.Action, name: str, value: str | None, rest: list[str]) -> list[str]:
        """--flag=true and --flag false as --flag and --no_flag."""
        if value is None and isinstance(action, _Toggle) and rest and rest[0].lower() in _BOOLEANS:
            value = rest.pop(0)
        if value is None:
            return [name]
        if value.lower() not in _BOOLEANS:
            self.error(f"{name} is on or off: true or false, not {value!r}")
        if not isinstance(action, _Toggle):
            return [name] if _BOOLEANS[value.lower()] else []
        is_on = _BOOLEANS[value.lower()] is (name not in action.negatives)
        if is_on:
            return [next(option for option in action.option_strings if option not in action.negatives)]
        return [min(action.negatives)]

    def _foreign(self, name: str) -> ForeignFlag | None:
        """The entry for another program's flag, if what it means is known to this command."""
        entries = foreign_flags.BY_NAME.get(name[0] + name[1:].replace("-", "_") if name[1:2] != "-" else name, ())
        has_model = self._model_argument() is not None
        return next((one for one in entries if self.has_option(one.flag) or (one.flag == MODEL and has_model)), None)

    def _model_argument(self) -> argparse.Action | None:
        return next((action for action in self._actions if not action.option_strings and action.dest == "model"), None)

    def _rewritten(self, foreign: ForeignFlag, name: str, value: str | None, rest: list[str]) -> list[str]:
        """Our words for another program's flag. Ends with an error that says what to do when there are none."""
        if value is None and foreign.takes_value(rest[0] if rest else None):
            if not rest:
                self.error(f"{name}: expected a value")
            value = rest.pop(0)
            while foreign.is_list and rest and not _is_flag(rest[0]) and not _is_file(rest[0]):
                value += f",{rest.pop(0)}"
        if foreign.read is not None:
            return self._read(foreign.read, name, value or "")
        word = foreign.word(value)
        if word is None:
            self.error(f"{name}: {foreign.error}")
        is_plain = value is not None and value.lower() in foreign.is_plain
        if foreign.note and not is_plain and (not foreign.note_beside or self.has_option(foreign.note_beside)):
            print(f"note: {self._where()}{name}: {foreign.note}", file=sys.stderr)
        return [word] if word else []

    def _read(self, read: Callable[[str], SpeculativeWords], name: str, value: str) -> list[str]:
        """Our words for a flag whose value says several things."""
        try:
            words, note = read(value)
        except ConfigError as error:
            self.error(f"{name}: {error}")
        if note:
            print(f"note: {self._where()}{name}: {note}", file=sys.stderr)
        return words

    # What is said

    def _explain(self, unknown: str, what: str = "unknown argument") -> str:
        name = unknown.partition("=")[0]
        plain = name.lstrip("-")
        if what == "unknown argument" and not name.startswith("-"):
            model = self._model_argument()
            return f"unexpected argument {name}" + ("; MODEL is given already" if model is not None else "")
        owner = self._owner(name)
        if owner is not None:
            return f"{name} is not a flag of {self.prog} but of {owner}"
        near = difflib.get_close_matches(plain, self.option_names(), n=1)
        dashes = "--" if name.startswith("-") else ""
        return f"{what} {name}" + (f"; did you mean {dashes}{near[0]}?" if near else "")

    def _owner(self, name: str) -> str | None:
        """Another command that has a flag or understands another program's."""
        ours = [name[2:]] if name.startswith("--") else []
        foreign = foreign_flags.BY_NAME.get(name, ())
        theirs = ["model" if one.flag == MODEL else one.flag[2:] for one in foreign]
        return next((self.elsewhere[one] for one in ours + theirs if one in self.elsewhere), None)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            if value in self.moved:
                raise argparse.ArgumentError(None, self.moved[value])
            near = difflib.get_close_matches(value, action.choices, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(action.choices)}"
            if not near and Path(value).exists() and "chat" in action.choices:
                hint = f"; to talk to a model: {self.prog} chat {value}"
            raise argparse.ArgumentError(None, f"unknown command {value!r}{hint}")
        super()._check_value(action, value)

    @override
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {self._where()}{message} (see {self.prog} --help)\n")

    def _where(self) -> str:
        return f"{self._origin}: " if self._origin else ""


def with_underscores(words: Sequence[str]) -> list[str]:
    """Return the words with the names of long flags in underscores, up to a bare --."""
    done: list[str] = []
    for index, word in enumerate(words):
        if word == "--":
            return [*done, *words[index:]]
        name, equals, value = word.partition("=")
        spelled = name[2:].replace("-", "_").replace(".", "_")  # a dot: a part of an object, as vLLM has them
        is_flag = name.startswith("--") and spelled.isidentifier()  # not a text with spaces
        done.append(f"--{name[2:].replace('-', '_')}{equals}{value}" if is_flag else word)
    return done


def leaves(parser: argparse.ArgumentParser) -> Iterator[ArgumentParser]:
    """Yield the parsers of all commands below `parser`, each once."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not below and isinstance(parser, ArgumentParser):
        yield parser
    for action in below:
        for child in dict.fromkeys(action.choices.values()):
            yield from leaves(child)
