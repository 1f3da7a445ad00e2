"""The commands of a chat, and what they change. The model is a fake that says what it was asked."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ktransformers.cli.chat.commands import COMMANDS, bound_command, find_command
from ktransformers.cli.chat.history import ChatHistory
from ktransformers.cli.chat.input import TurnSource, UserTurn
from ktransformers.cli.chat.loop import ChatLoop, ChatOptions
from ktransformers.cli.chat.output import View, format_stats
from ktransformers.cli.chat.settings import PARAMETERS, Settings
from ktransformers.core import GenerationStats, SamplingParams, TokenEvent
from ktransformers.engine.api.llm import LLM
from ktransformers.errors import ConfigError
from tests.support.engines.fake_runner import CHAT_TEMPLATE, byte_tokenizer, scripted_engine
from tests.support.servers.fake_chat import Chat, reply

THINKING_TEMPLATE = CHAT_TEMPLATE + "{% if enable_thinking %}<think>\n{% endif %}"


class Recorder(View):
    """Keeps what it is shown."""

    def __init__(self) -> None:
        self.answers, self.notes, self.errors, self.thoughts = [""], [""], [""], ""

    def reasoning(self, text: str) -> None:
        self.thoughts += text

    def content(self, text: str) -> None:
        self.answers[-1] += text

    def end(self) -> None:
        self.answers.append("")

    def reading(self, done: int, total: int) -> None:
        pass

    def stats(self, stats: GenerationStats) -> None:
        self.notes.append(format_stats(stats))

    def note(self, text: str) -> None:
        self.notes.append(text)

    def error(self, text: str) -> None:
        self.errors.append(text)


class Script(TurnSource):
    """Turns of a person at a terminal. None is Ctrl-C. says: the answer to every question."""

    def __init__(self) -> None:
        self.turns: list[str | None] = []
        self.prefilled, self.questions, self.says, self.records = "", [""], True, True

    def read_turn(self) -> UserTurn | None:
        if not self.turns:
            return None
        text = self.turns.pop(0)
        if text is None:
            raise KeyboardInterrupt
        return UserTurn(text, is_literal="\n" in text)

    def prefill(self, text: str) -> None:
        self.prefilled = text

    def confirm(self, question: str) -> bool:
        self.questions.append(question)
        return self.says

    def record_history(self, is_on: bool) -> None:
        self.records = is_on


class Room:
    """A chat with a person. asked: the sampling parameters of every answer."""

    def __init__(
        self,
        template: str | None = CHAT_TEMPLATE,
        params: SamplingParams | None = None,
        answer: Callable[[str], str] = reply,
        drops_oldest: bool = True,
    ):
        self.view, self.source, self.asked = Recorder(), Script(), list[SamplingParams]()
        llm = LLM.from_engine(scripted_engine(answer, template=template))
        stream = llm.stream

        def record(prompt: Any, params: Any, *rest: Any) -> Iterator[TokenEvent]:
            self.asked.append(params)
            return stream(prompt, params, *rest)

        llm.stream = record  # type: ignore[method-assign]
        params = params or SamplingParams(temperature=0, max_tokens=200)
        options = ChatOptions(params, is_interactive=True, find_command=bound_command, drops_oldest=drops_oldest)
        self.loop = ChatLoop(llm, self.view, self.source, options)

    def say(self, *turns: str | None) -> str:
        """The last answer, or else the last note."""
        self.source.turns = list(turns)
        answers = len(self.view.answers)
        assert self.loop.run() == 0
        return self.view.answers[-2] if len(self.view.answers) > answers else self.view.notes[-1]

    @property
    def contents(self) -> list[str]:
        return [turn["content"] for turn in self.loop.conversation.turns]


@pytest.fixture
def room() -> Room:
    return Room()


# --- leaving and finding ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["/bye", "/exit", "/quit", "exit", "quit"])
def test_words_that_leave(room: Room, word: str) -> None:
    room.say(word, "never read")
    assert room.loop.is_finished
    assert room.source.turns == ["never read"]


def test_help_names_every_command_within_80_columns(room: Room) -> None:
    shown = room.say("/help")
    assert shown == room.say("/?")
    assert all(name in shown for name in COMMANDS)
    assert max(len(line) for line in shown.splitlines()) <= 79
    assert len(shown.splitlines()) <= 23


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("/regn", "unknown command /regn; did you mean /regen?"),
        ("/zzzzzz", "unknown command /zzzzzz; /help lists the commands"),
        ("/set", "usage: /set parameter|system|history|nohistory|think|nothink"),
        ("/set paramter x 1", "unknown /set paramter; did you mean parameter?"),
        ("/set verbose", "unknown /set verbose; there are parameter, system, history, nohistory, think, nothink"),
        ("/set think hard", "/set think takes nothing more, got 'hard'"),
        ("/set system", "usage: /set system TEXT"),
        ("/set parameter", f"usage: /set parameter NAME VALUE, with NAME one of {', '.join(PARAMETERS)}"),
        ("/show sistem", "unknown /show sistem; did you mean system?"),
        ("/regen", "there is no question yet"),
        ("/edit", "there is no question yet"),
        ("/set think", "this model's chat template has no switch that keeps it from thinking"),
    ],
)
def test_mistakes(typed: str, message: str) -> None:
    room = Room()
    room.say(typed if typed != "/set think" else "/set nothink")
    assert room.view.errors[1:] == [message]


def test_what_is_no_command() -> None:
    for text in ("/usr/bin/x is what?", "/2", "a /help", "//help"):
        assert find_command(text) is None
    found = find_command("/save!  a file ")
    assert found is not None
    assert found == (COMMANDS["/save!"], "a file")


# --- /set and /show --------------------------------------------------------------------------------------------------


def settings(template: str | None = CHAT_TEMPLATE, **params: Any) -> Settings:
    return Settings(byte_tokenizer(template), SamplingParams(**params), force_think=False)


@pytest.mark.parametrize(
    ("name", "value", "field", "expected"),
    [
        ("temperature", "0.5", "temperature", 0.5),
        ("top_p", "0.9", "top_p", 0.9),
        ("top_k", "40", "top_k", 40),
        ("min_p", "0.1", "min_p", 0.1),
        ("repetition_penalty", "1.1", "repetition_penalty", 1.1),
        ("frequency_penalty", "-1", "frequency_penalty", -1.0),
        ("presence_penalty", "1", "presence_penalty", 1.0),
        ("seed", "7", "seed", 7),
        ("seed", "off", "seed", None),
        ("max_tokens", "5", "max_tokens", 5),
        ("num_predict", "5", "max_tokens", 5),
        ("max_new_tokens", "off", "max_tokens", None),
        ("stop", "END", "stop", ("END",)),
        ("stop", r'"a b" "\n"', "stop", ("a b", "\n")),
        ("stop", "off", "stop", ()),
    ],
)
def test_parameters(name: str, value: str, field: str, expected: object) -> None:
    changed = settings(seed=1, max_tokens=9, stop=("x",))
    said = changed.set_parameter(name, value)
    assert changed.params == replace(SamplingParams(seed=1, max_tokens=9, stop=("x",)), **{field: expected})
    assert said.startswith(f"{field} is ")
    assert f"{field:<20}" in changed.describe_parameters()
    assert changed.describe_parameters().count("(changed)") == 1
    changed.set_parameter(name, "default")
    assert "(changed)" not in changed.describe_parameters()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("temperature", "warm", "temperature takes a number, got 'warm'"),
        ("temperature", "inf", "temperature takes a finite number, got 'inf'"),
        ("temperature", "nan", "temperature takes a finite number, got 'nan'"),
        ("temperature", "-1", "temperature must be at least 0, got -1.0"),
        ("top_k", "1.5", "top_k takes a whole number, got '1.5'"),
        ("num_predict", "-1", "max_tokens must be at least 1, got -1"),
        ("seed", "x", "seed takes a whole number or off, got 'x'"),
        ("stop", '"a', "stop takes strings in quotes or off, got '\"a'"),
        ("top_p", "", "usage: /set parameter top_p VALUE; top_p is 1.0"),
        ("temprature", "1", "unknown parameter temprature; did you mean temperature?"),
        ("mirostat", "1", f"unknown parameter mirostat; there are {', '.join(PARAMETERS)}"),
        ("num_ctx", "1", "num_ctx is not a parameter here: start with --cache_lens TOKENS"),
        (
            "repeat_penalty",
            "1",
            "repeat_penalty is not a parameter here: /set parameter repetition_penalty, which looks at the whole text",
        ),
    ],
)
def test_parameters_that_cannot_be(name: str, value: str, message: str) -> None:
    kept = settings()
    with pytest.raises(ConfigError) as caught:
        kept.set_parameter(name, value)
    assert str(caught.value) == message
    assert kept.params == SamplingParams()


def test_parameters_reach_the_next_answer(room: Room) -> None:
    assert room.say("/set parameter stop u", "hello") == "yo"
    assert room.asked[-1].stop == ("u",)
    assert room.say("/set parameter top_k 3") == "top_k is 3, which has no effect at temperature 0"


def test_a_model_without_template_keeps_its_stop_string() -> None:
    room = Room(template=None, answer=lambda prompt: "u")
    room.say("/set parameter stop u", "hello")
    assert room.asked[-1].stop == ("u", "\nuser:")
    room.say("/show template")
    assert room.view.errors[-1] == "this model has no chat template"


def test_thinking_by_the_template() -> None:
    room = Room(THINKING_TEMPLATE)
    assert room.say("hi") == "you said hi"
    assert room.say("/set think", "hi") == "hi"
    assert "it is easy" in room.view.thoughts
    assert room.say("/set nothink", "hi") == "you said hi"


def test_thinking_by_its_tag(room: Room) -> None:
    assert room.say("/set think", "hi") == "hi"
    assert room.say("/set nothink", "hi") == "you said hi"


def test_system_prompts(room: Room) -> None:
    assert room.say("/system") == "there is no system prompt"
    assert room.say('/set system "be brief"', "system") == "be brief"
    assert room.say("/system be kind", "system") == "be kind"
    assert room.say("/show system") == "system prompt: be kind"
    assert room.say("/system off", "system") == "none"


def test_show(room: Room) -> None:
    assert room.say("/show template") == CHAT_TEMPLATE
    assert "temperature         0\n" in room.say("/show parameters")
    assert "thinking            as the template says" in room.view.notes[-1]
    assert room.say("/show model").startswith("model: fake\ncontext: 4,096 tokens")
    before = len(room.view.notes)
    room.say("/show info")
    assert len(room.view.notes) == before + 3


def test_history_goes_to_the_source(room: Room) -> None:
    assert room.say("/set nohistory") == "prompts are not kept for later sessions"
    assert not room.source.records
    room.say("/set history")
    assert room.source.records


# --- /regen and /edit ------------------------------------------------------------------------------------------------


def test_regen_replaces_the_answer(room: Room) -> None:
    room.say("one", "two", "/regen")
    assert room.contents == ["one", "you said one", "two", "you said two"]
    assert any("at temperature 0 answers do not vary" in note for note in room.view.notes)


def test_regen_takes_other_seeds() -> None:
    room = Room(params=SamplingParams(temperature=0.1, seed=5, max_tokens=50))
    room.say("one", "/regen", "/regen", "two")
    assert [params.seed for params in room.asked] == [5, 6, 7, 5]
    room.say("/set parameter seed off", "/regen", "/regen")
    drawn = {params.seed for params in room.asked[-2:]}
    assert len(drawn - {None, 5, 6, 7, 8, 9}) == 2  # anew every time; a saved session knows it


LONG = "x" * 500  # bytes, which are tokens here; the context has 4,096


def test_a_full_context_goes_on_without_its_oldest_turns(room: Room) -> None:
    room.loop.conversation.system = "RULES"
    prompts = []
    stream = room.loop.llm.stream

    def record(prompt: Any, *rest: Any) -> Iterator[TokenEvent]:
        prompts.append(room.loop.llm.tokenizer.decode(prompt, skip_special_tokens=False))
        return stream(prompt, *rest)

    room.loop.llm.stream = record  # type: ignore[method-assign]
    room.say(*(f"{number} {LONG}" for number in range(8)))
    dropped = [note for note in room.view.notes if "are left out" in note]
    assert room.view.errors == [""]
    assert len(prompts) == 8
    assert len(room.contents) == 16  # nothing is forgotten: /save keeps all
    assert "RULES" in prompts[-1]
    assert f"7 {LONG}" in prompts[-1]
    assert f"user\n0 {LONG}" not in prompts[-1]
    assert any(re.match(r"the context is full: the oldest \d+ messages are left out from here on$", n) for n in dropped)
    assert sum("% of the 4096 tokens of context are taken; then the oldest" in n for n in room.view.notes) >= 1
    said = len(dropped)
    room.say("/clear", "again")
    assert len([note for note in room.view.notes if "are left out" in note]) == said


def test_a_full_context_may_be_an_error_instead() -> None:
    room = Room(drops_oldest=False)
    room.say(*(f"{number} {LONG}" for number in range(6)))
    assert "This model's maximum context length is 4096 tokens" in room.view.errors[-1]
    assert any("tokens of context are taken; then no more fits" in note for note in room.view.notes)


def test_a_question_that_cannot_be_answered_again_stays(room: Room) -> None:
    room.say("one", "/set parameter max_tokens 5000")
    room.say("/regen", f"{'x' * 5000}")
    assert "maximum context length is 4096 tokens" in room.view.errors[-1]
    assert room.contents == ["one", "you said one"]


def test_edit_replaces_the_last_question(room: Room) -> None:
    room.say("one", "two", "/edit", "three", "count")
    assert room.source.prefilled == "two"
    assert room.contents == ["one", "you said one", "three", "you said three", "count", "3 turns"]


@pytest.mark.parametrize("end", [None, "", "/stats"])
def test_edit_that_is_given_up(room: Room, end: str | None) -> None:
    room.say("one", "/edit", end)
    assert "the question stays as it was" in room.view.notes
    assert room.say("two") == "you said two"
    assert room.contents == ["one", "you said one", "two", "you said two"]


def test_edit_of_a_question_that_fails_keeps_it(room: Room) -> None:
    room.say("one", "/edit", "x" * 5000)
    assert room.contents == ["one", "you said one"]


def test_edit_shows_what_was_typed(room: Room, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("f.txt").write_text("text")
    assert room.say("see @f.txt") == "you said see @f.txt\n\nf.txt:\n```txt\ntext\n```"
    room.say("/edit")
    assert room.source.prefilled == "see @f.txt"
    room.loop.conversation.turns = [{"role": "user", "content": "/help me"}]  # as if loaded
    room.say("/edit")
    assert room.source.prefilled == '"""/help me"""'


def test_ctrl_c_never_leaves(room: Room) -> None:
    assert room.say(None, None, "count") == "1 turns"
    assert room.view.notes.count("Ctrl-D or /bye leaves") == 2


# --- /save and /load -------------------------------------------------------------------------------------------------


def test_save_asks_before_it_overwrites(room: Room, tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    room.say("one", f"/save {file}")
    assert len(room.source.questions) == 1  # nothing was there
    room.source.says = False
    assert room.say("two", f"/save {file}") == "you said two"
    assert room.view.notes[-1] == "not saved"
    assert len(json.loads(file.read_text())) == 2
    room.source.says = True
    room.say(f"/save {file}")
    assert len(json.loads(file.read_text())) == 4
    assert room.source.questions[1:] == [f"{file} exists. Overwrite it?"] * 2
    room.say("three", f"/save! {file}")
    assert len(json.loads(file.read_text())) == 6
    assert len(room.source.questions) == 3


def test_save_in_a_script(chat: Chat, tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    file.write_text("mine")
    err = chat(f"/save {file}\n", code=1)[1]
    assert err.endswith(f"...\nerror: {file} exists; /save! {file} overwrites it\n")
    assert file.read_text() == "mine"
    chat(f"/save! {file}\n")
    assert file.read_text() == "[]\n"
    for command in ("/edit", "/set history"):
        assert "terminal" in chat(f"a\n{command}\n", code=1)[1]


def files(folder: Path) -> Sequence[str]:
    return sorted(os.listdir(folder))


def test_saving_is_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, link = tmp_path / "c.json", tmp_path / "link"
    file.write_text("old")
    file.chmod(0o600)
    link.symlink_to(file)

    def fail(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(ConfigError, match="No space left"):
            ChatHistory("s").save(file)
    assert file.read_text() == "old"
    ChatHistory("s").save(link)
    assert link.is_symlink()
    assert json.loads(file.read_text())[0]["content"] == "s"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert files(tmp_path) == ["c.json", "link"]


@pytest.mark.parametrize("name", ["missing/c.json", "file/c.json", ".", "n" * 300])
def test_where_nothing_can_be_saved(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot save to "):
        ChatHistory().save(tmp_path / name)
    assert files(tmp_path) == ["file"]


def test_a_device_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="not a regular file"):
        ChatHistory().save(tmp_path / "pipe")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_paths_of_save_and_load(room: Room, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    room.say("one", '/save "~/a b.json"', "/clear", "/load ~/a b.json")
    assert room.contents == ["one", "you said one"]
    room.say("/save", "/load", "/load /none")
    assert room.view.errors[1:] == [
        "usage: /save FILE",
        "usage: /load FILE",
        "cannot load /none: No such file or directory",
    ]


def test_stats(room: Room) -> None:
    assert room.say("one", "/stats") == "you said one"
    assert room.view.notes[-1].startswith("1 answers, 2 messages\n")
