"""The tokenizer of one model: text to ids, ids to text, conversations to prompts.

Wraps a Hugging Face fast tokenizer, which loading.py finds. A model without a
vocabulary (files for speed tests) still loads; using text then is an error. Does not know what the ids are run through.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from transformers import PreTrainedTokenizerFast

from ktransformers.errors import ConfigError, UnsupportedError
from ktransformers.media.picture import PictureReader, ReadPicture, texts_of, with_media_ids
from ktransformers.media.records import is_media_id
from ktransformers.tokenizer.answer_parser import AnswerParser, parser_of
from ktransformers.tokenizer.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer, token_bytes_of
from ktransformers.tokenizer.encoding import TextEncoder
from ktransformers.tokenizer.grammars import Grammars
from ktransformers.tokenizer.reasoning import REASONING_TAGS, open_thoughts
from ktransformers.tokenizer.recognition import (
    AnswerFormat,
    Probe,
    Source,
    check_reasoning_format,
    recognize,
    turn_frame,
)
from ktransformers.tokenizer.template_limits import why_no_template
from ktransformers.tokenizer.template_variables import template_variables
from ktransformers.tokenizer.templates import Ending, Message, Rendered, Rendering, TemplateTurns, rendered
from ktransformers.tokenizer.templates.calls import spelled
from ktransformers.tokenizer.templates.pictures import PictureTexts, num_pictures, takes_one, with_pictures
from ktransformers.tokenizer.tools import AUTO, ToolSchemas, tool_format_named
from ktransformers.tokenizer.tools.grammars import ToolGrammar, tool_grammar
from ktransformers.tokenizer.tools.response_template import ResponseTemplateParser, why_not_usable
from ktransformers.tokenizer.tools.shapes import shape_of
from ktransformers.tokenizer.verbatim import Guard, Verbatim

__all__ = ["Message", "Tokenizer"]

_log = logging.getLogger(__name__)

_TOOL_CALL_TAGS = ("<tool_call>", "</tool_call>")
_NO_VOCABULARY = (
    "this model's files hold no vocabulary, so it takes token ids only; pass --model_path with its tokenizer"
)


class Tokenizer:
    """The text and ids of one model. `backend` None: a model without vocabulary, every use of text raises ConfigError.

    eos_token_ids: ids that end an answer; a model's generation config may name more.
    """

    def __init__(self, backend: PreTrainedTokenizerFast | None, eos_token_ids: Sequence[int] = ()):
        self._backend = backend
        self.eos_token_ids = tuple(eos_token_ids)
        self._special: frozenset[int] = frozenset()
        self._skipped: frozenset[int] = frozenset()
        self._token_bytes = None
        self._grammars: dict[tuple[int, tuple[int, ...]], Grammars] = {}
        self._encoder: TextEncoder | None = None
        self._pictures: PictureReader | None = None
        self._format, self._reasoning_format = AnswerFormat(), AUTO
        self._has_own_parser = False
        self._turns: tuple[Any, TemplateTurns] | None = None
        if backend is None:
            return
        # A tokenizer.json may ask for them; they are about training, and would change prompts without a word.
        backend.backend_tokenizer.no_truncation()
        backend.backend_tokenizer.no_padding()
        self._encoder = TextEncoder(backend.backend_tokenizer)
        if not eos_token_ids and backend.eos_token_id is not None:
            self.eos_token_ids = (int(backend.eos_token_id),)
        self._special = frozenset(i for i, token in backend.added_tokens_decoder.items() if token.special)
        self.use_tool_format(AUTO)
        self._token_bytes = token_bytes_of(backend.backend_tokenizer)

    @property
    def has_vocabulary(self) -> bool:
        return self._backend is not None

    @property
    def backend(self) -> Any:
        """The Hugging Face tokenizer. Raises ConfigError when there is no vocabulary."""
        if self._backend is None:
            raise ConfigError(_NO_VOCABULARY)
        return self._backend

    @property
    def vocab_size(self) -> int:
        """The number of token ids, added tokens included."""
        return len(self.backend)

    @property
    def bos_token_id(self) -> int | None:
        return self.backend.bos_token_id  # type: ignore[no-any-return]

    @property
    def eos_token_id(self) -> int | None:
        return self.backend.eos_token_id  # type: ignore[no-any-return]

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids of control tokens; they are not in decoded text, the tags of reasoning and tool calls excepted."""
        return self._special

    @property
    def added_ids(self) -> frozenset[int]:
        """The ids of control tokens, and of tags: <...> and [...] that are one token each."""
        if self._backend is None:
            return frozenset()
        tokens = self._backend.added_tokens_decoder.items()
        tags = {i for i, token in tokens if (token.content[:1], token.content[-1:]) in (("<", ">"), ("[", "]"))}
        return self._special | tags

    def token_id(self, token: str) -> int | None:
        """Return the id of exactly this token, or None."""
        return self.backend.backend_tokenizer.token_to_id(token)  # type: ignore[no-any-return]

    @property
    def max_token_chars(self) -> int:
        """The most characters of text of one token, see TextEncoder. Raises ConfigError without a vocabulary."""
        return self._text_encoder.max_token_chars

    @property
    def _text_encoder(self) -> TextEncoder:
        self.backend  # noqa: B018 - says that there is no vocabulary
        assert self._encoder is not None
        return self._encoder

    def encode(self, text: str, add_special_tokens: bool = True, *, max_len: int | None = None) -> list[int]:
        """Return the token ids of `text`. Special tokens spelled in it are recognized. See TextEncoder.encode.

        Raises ConfigError without a vocabulary, too.
        """
        return self._text_encoder.encode(text, add_special_tokens, max_len)

    @cached_property
    def verbatim(self) -> Verbatim:
        """Texts that no conversation may write as tokens: control tokens, tags of reasoning and tools excepted."""
        added = self.backend.added_tokens_decoder
        # Marks of answers may be what turns are made of, too: who writes those would forge a turn.
        frame = turn_frame(self._format.marks)
        return Verbatim(str(added[i]) for i in self._special if i in self._skipped or added[i].content in frame)

    def encode_guarded(self, text: str, guard: Guard | None, *, max_len: int | None = None) -> list[int]:
        """Return the ids of a rendered conversation whose texts were marked by `guard`. Errors as `encode`."""
        if guard is None:
            return self.encode(text, add_special_tokens=False, max_len=max_len)

        def encode(joined: str, num_cuts: int) -> list[int]:
            return self.encode(joined, False, max_len=None if max_len is None else max_len + num_cuts)

        return self.verbatim.ids_of_pieces(guard.pieces(text), self.token_id, encode)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`: what a Detokenizer returns piece by piece. Pictures have none."""
        return self.detokenizer(skip_special_tokens).all([one for one in token_ids if not is_media_id(one)])

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that this token stands for, special tokens as they are spelled. Empty for an unknown id."""
        if self._token_bytes is not None:
            return self._token_bytes[token_id]
        return str(self.backend.backend_tokenizer.decode([token_id], skip_special_tokens=False)).encode()

    def grammars(self, vocab_size: int, eos_token_ids: Sequence[int]) -> Grammars:
        """Return the reader of constraints on answers; the same object each time for the same arguments."""
        key = (vocab_size, tuple(eos_token_ids))
        if key not in self._grammars:
            self._grammars.setdefault(key, Grammars(self, *key))  # all threads get the first that is there
        return self._grammars[key]

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        """Return a new stream of ids to text."""
        skipped = self._skipped if skip_special_tokens else frozenset()
        if self._token_bytes is not None:
            return ByteDetokenizer(self._token_bytes, skipped)
        decode = self.backend.backend_tokenizer.decode
        return WindowDetokenizer(lambda ids: decode(ids, skip_special_tokens=False), skipped)

    @property
    def has_chat_template(self) -> bool:
        return self._backend is not None and self._backend.chat_template is not None

    def _template_text(self) -> str:
        template = self.backend.chat_template
        return "".join(template.values()) if isinstance(template, dict) else template or ""

    def template_knows(self, name: str) -> bool:
        """Whether the chat template reads the variable `name`: others can be given to it without any effect."""
        if not self.has_chat_template:
            return False
        template = self.backend.chat_template
        texts = template.values() if isinstance(template, dict) else (template,)
        return any(name in template_variables(text) for text in texts)

    def use_chat_template(self, template: str) -> None:
        """Take this Jinja source in place of the chat template that came with the files, and read answers by it.

        To be called before anything is decoded. Raises ConfigError for what is no template, or without a vocabulary.
        """
        wrong = why_no_template(template)
        if wrong:
            raise ConfigError(f"--chat_template: the template cannot be used: {wrong}")
        self.backend.chat_template = template
        self.use_tool_format(AUTO)

    def use_tool_format(self, name: str, reasoning: str | None = None) -> None:
        """Set how this model's answers are read: a name of TOOL_FORMATS, "none", or "auto" for what its files tell.

        reasoning: a name of REASONING_FORMATS, or "auto"; None: the one that was given before. With "auto" a
        checkpoint's own `response_template` comes first, then what the chat template writes (recognition/). To be
        called before anything is decoded. Raises ConfigError for a name that there is not.
        """
        if reasoning is not None:
            check_reasoning_format(reasoning)
            self._reasoning_format = reasoning
        if not self.has_vocabulary:
            if name != AUTO:
                tool_format_named(name)
            return
        is_told = name == self._reasoning_format == AUTO
        self._has_own_parser = is_told and self._has_usable_template()
        self._format = recognize(self._source(), name, self._reasoning_format)
        # Tags that parsers look for must be seen in the text even when a tokenizer calls them special.
        tags = {tag for pair in REASONING_TAGS for tag in pair} | {*_TOOL_CALL_TAGS}
        tokens = self.backend.added_tokens_decoder
        spelled = "\n".join(self._format.texts)
        if self._has_own_parser:
            spelled += json.dumps(self._response_template, ensure_ascii=False).replace("\\", "")
        ids = {i for tag in tags if (i := self.token_id(tag)) is not None}
        ids |= {i for i in self._special if tokens[i].content in spelled and not self._is_plain_end(i)}
        self._skipped = self._special - ids
        for computed in ("verbatim", "_shown_end"):  # what was computed for another format
            self.__dict__.pop(computed, None)

    def _is_plain_end(self, token_id: int) -> bool:
        """Whether this ends answers and is no tag of the format."""
        return token_id in self.eos_token_ids and (
            self._format.tools is None
            or self.backend.added_tokens_decoder[token_id].content not in self._format.tools.tokens
        )

    def _source(self) -> Source:
        """What recognition asks."""
        added = [token.content for token in self.backend.added_tokens_decoder.values()]
        template, probe = self._template_text(), None
        if self.has_chat_template:
            render = partial(rendered, self.backend)  # as the template has it, with nothing folded
            probe = Probe(lambda turns, tools, opens: render(turns, tools, add_generation_prompt=opens), added)
        return Source(template, self.template_knows("tools"), self.token_id, probe)

    def _has_usable_template(self) -> bool:
        wrong = why_not_usable(self._response_template) if self._response_template is not None else "there is none"
        if wrong and self._response_template is not None:
            _log.warning("the model's response_template cannot be used: %s; its chat template tells the format", wrong)
        return not wrong

    @property
    def _response_template(self) -> dict[str, Any] | None:
        template = getattr(self._backend, "response_template", None)
        return template if isinstance(template, dict) else None

    @property
    def tool_format(self) -> str | None:
        """The name of the format by which this model's tool calls are read, or None where none are."""
        if self._has_own_parser:
            return "response_template"
        return None if self._format.tools is None else self._format.tools.name

    @property
    def reasoning_tags(self) -> tuple[str, str] | None:
        """The tags around this model's reasoning, or None when it has none."""
        return self._format.marks.reasoning

    @property
    def has_tool_calls(self) -> bool:
        """Whether tool calls of this model are read: always with a chat template, unless --tool_format is none."""
        return self.tool_format is not None

    def opens_reasoning(self, prompt_ids: Sequence[int]) -> bool:
        """Whether a prompt ends inside the reasoning, because its template (or a caller) wrote the opening tag.

        What a caller wrote behind the tag is reasoning, too.
        """
        return self._open_thoughts(prompt_ids) is not None

    def _open_thoughts(self, prompt_ids: Sequence[int]) -> str | None:
        """The beginning of the answer's reasoning that the prompt ends with; None when it does not end inside."""
        marks = self._format.marks
        if marks.reasoning is None:
            return None
        return open_thoughts(
            partial(self.decode, skip_special_tokens=False), prompt_ids, marks.reasoning, marks.opening
        )

    def answer_parser(
        self,
        prompt_ids: Sequence[int],
        tools: ToolSchemas | None = None,
        *,
        continues_reasoning: bool = False,
        is_forced: bool = False,
    ) -> AnswerParser:
        """Return a parser for one answer to this prompt. tools: those of the request, None when it has none.

        continues_reasoning: the prompt ends in the middle of the answer's reasoning. is_forced: behind its reasoning
        the answer has to be calls, see tool_grammar.
        """
        if self._has_own_parser and self._response_template is not None:
            prompt = self.decode(prompt_ids, skip_special_tokens=False)
            return ResponseTemplateParser(self._response_template, prompt, tools)
        return parser_of(
            self._format,
            tools,
            thoughts=self._open_thoughts(prompt_ids),
            continues_reasoning=continues_reasoning,
            is_forced=is_forced,
            end=self._shown_end,
        )

    @cached_property
    def _shown_end(self) -> str:
        """What decoded text has of the end of a turn: where that is more than a token that is left out."""
        end, added = self._format.marks.end, self.backend.added_tokens_decoder
        for token_id in self._skipped:
            end = end.replace(added[token_id].content, "")
        return end.strip()

    def tool_grammar(
        self,
        tools: ToolSchemas,
        *,
        parallel: bool = True,
        max_thoughts: int | None = None,
    ) -> ToolGrammar | None:
        """Return a grammar in llguidance's Lark for calls of these tools (one, if parallel any number) after reasoning.

        None for a checkpoint's own format. max_thoughts: tokens of the reasoning, where the grammar has to know it.
        Raises ConfigError for tools that the format cannot spell.
        """
        form = self._format.tools
        if self._has_own_parser or form is None or not tools:
            return None
        shape = form.shape or shape_of(form.name, self._template_text())
        added = self.added_ids  # as Grammars see it
        found = {tag: self.token_id(tag) for tag in (*form.tokens, *self._tags_in(shape.texts))}
        ids = {tag: one for tag, one in found.items() if one is not None and one in added}
        return tool_grammar(shape, ids, tools, parallel=parallel, max_thoughts=max_thoughts)

    def _tags_in(self, texts: Sequence[str]) -> list[str]:
        """The special tokens that these texts hold."""
        added = self.backend.added_tokens_decoder
        return [
            token for i in sorted(self.added_ids) if (token := added[i].content) and any(token in one for one in texts)
        ]

    @property
    def turns(self) -> TemplateTurns:
        """The chat template's rendering of conversations. Raises UnsupportedError where there is no template."""
        if not self.has_chat_template:
            self.backend  # noqa: B018 - says that there is no vocabulary, when that is why
            raise UnsupportedError("this model has no chat template; send it plain text, or pass --model_path with one")
        template = self.backend.chat_template
        if self._turns is None or self._turns[0] != template:
            self._turns = (template, TemplateTurns(partial(rendered, self.backend), self._spelled))
        return self._turns[1]

    def _spelled(self, calls: Sequence[Mapping[str, Any]]) -> str:
        """Past calls as this model writes them."""
        form = self._format.tools
        return spelled(calls, None if form is None else form.shape or shape_of(form.name, self._template_text()))

    def use_pictures(self, reader: PictureReader) -> None:
        """Take pictures in conversations, as this reader reads them. To be called before any is rendered."""
        self._pictures = reader

    @property
    def takes_one_picture(self) -> bool:
        """Whether the chat template takes a picture in a message, and no second one."""
        reader = self._pictures if self.has_chat_template else None
        return reader is not None and takes_one(reader.placeholder, self.turns.prober)

    @cached_property
    def _verbatim_of_pictures(self) -> Verbatim:
        """As `verbatim`, with the tokens that hold places of pictures, which need not be special."""
        if self._pictures is None:
            return self.verbatim
        added, ids = self.backend.added_tokens_decoder, self._pictures.position_token_ids
        own = [str(added[i]) for i in ids if i in added]
        return Verbatim([*self.verbatim.spellings, *own, self._pictures.placeholder])

    def _rendered(self, asked: Rendering, pictures: Sequence[ReadPicture] = ()) -> Rendered:
        if not asked.messages:
            raise ConfigError("a conversation needs at least one message")
        count = num_pictures(asked.messages)
        if count != len(pictures):
            raise ConfigError(f"a conversation with {count} pictures came with {len(pictures)}")
        try:
            if not pictures:
                return self.turns.rendered(asked)
            if self._pictures is None:
                raise UnsupportedError("this model reads text only, and the conversation holds pictures")
            texts = PictureTexts(self._pictures.placeholder, texts_of(pictures))
            return with_pictures(self.turns.rendered, self.turns.prober, asked, texts)
        except RecursionError as error:
            raise ConfigError(
                "tools, tool calls or chat_template_kwargs are nested too deeply for a chat template"
            ) from error

    def render_chat_template(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        *,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> str:
        """Return the conversation as text, through the model's own template in transformers' sandbox.

        Turns that the template drops or refuses are folded into those that it keeps, see templates/fold.py.
        continue_final_message: the text ends with the last message's, as the beginning of an answer.

        Raises UnsupportedError when the model has no template, ConfigError when the template refuses the messages.
        """
        ending = Ending(add_generation_prompt, continue_final_message, None, self.reasoning_tags)
        return self._rendered(Rendering(messages, tools, template_kwargs, ending)).text

    def apply_chat_template(  # noqa: PLR0913 - what a prompt is made of
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        *,
        continue_final_message: bool = False,
        continue_reasoning: str | None = None,
        reads_special_tokens: bool = False,
        max_len: int | None = None,
        pictures: Sequence[ReadPicture] = (),
        note_changes: Callable[[Sequence[str]], None] | None = None,
        **template_kwargs: Any,
    ) -> list[int]:
        """Return the prompt ids of a conversation. See render_chat_template and encode.

        continue_reasoning: what the answer has thought so far; it goes on there. note_changes: called with the names of
        what was folded, if anything was. pictures: those of the parts {"type": "image"}, in their order; their
        positions have pseudo-ids in what is returned, see media_items.

        reads_special_tokens: those that a message, a tool or a variable spells are tokens, too; else they are text, so
        that nobody can forge a turn.
        """
        ending = Ending(add_generation_prompt, continue_final_message, continue_reasoning, self.reasoning_tags)
        asked = Rendering(messages, tools, template_kwargs, ending)
        if not reads_special_tokens and self.has_chat_template:
            verbatim = self._verbatim_of_pictures if pictures else self.verbatim
            asked = replace(asked, guard_of=verbatim.guard)
        made = self._rendered(asked, pictures)
        if note_changes is not None and made.changes:
            note_changes(made.changes)
        ids = self.encode_guarded(made.text, made.guard, max_len=max_len)
        if self._pictures is None or not pictures:
            return ids
        return with_media_ids(ids, pictures, self._pictures.position_token_ids)

    def apply_plain_template(self, messages: Sequence[Message], *, reads_special_tokens: bool = False) -> list[int]:
        """Return prompt ids of a conversation for a model without a template: "role: content" lines, then "assistant:".

        reads_special_tokens: as in apply_chat_template.
        """
        lines = [f"{message['role']}: {message['content']}" for message in messages]
        text = "\n".join([*lines, "assistant:"])
        guard = None if reads_special_tokens else self.verbatim.guard(text)
        if guard is None:
            return self.encode(text)
        begins = self.bos_token_id is not None and self.encode("")[:1] == [self.bos_token_id]
        head = [self.bos_token_id] if begins and self.bos_token_id is not None else []
        return head + self.encode_guarded(guard.marked(text), guard)
