"""The formats of tool calls by their names, and which one a chat template writes."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass

from ktransformers.errors import ConfigError
from ktransformers.tokenizer.tools.base import ToolParser
from ktransformers.tokenizer.tools.events import ToolSchemas
from ktransformers.tokenizer.tools.families.deepseek import DeepSeekV3Parser, DeepSeekV31Parser
from ktransformers.tokenizer.tools.families.functionary import FunctionaryParser
from ktransformers.tokenizer.tools.families.gemma import GemmaParser
from ktransformers.tokenizer.tools.families.glm import GlmParser
from ktransformers.tokenizer.tools.families.harmony import HARMONY_TAGS, HarmonyParser
from ktransformers.tokenizer.tools.families.hermes import HermesParser
from ktransformers.tokenizer.tools.families.hunyuan import HunyuanParser
from ktransformers.tokenizer.tools.families.kimi import KimiParser
from ktransformers.tokenizer.tools.families.llama import LlamaJsonParser, LlamaPythonicParser
from ktransformers.tokenizer.tools.families.minimax_m3 import MiniMaxM3Parser
from ktransformers.tokenizer.tools.families.mistral import MistralParser
from ktransformers.tokenizer.tools.families.muse import MuseGlimmerParser
from ktransformers.tokenizer.tools.families.plain_json import PlainJsonParser
from ktransformers.tokenizer.tools.shape_parser import ShapeParser, tags_of
from ktransformers.tokenizer.tools.shapes import SHAPES, CallShape
from ktransformers.tokenizer.tools.xml_text import XmlParser

__all__ = [
    "AUTO",
    "HARMONY",
    "JSON",
    "NONE",
    "TOOL_FORMATS",
    "ToolFormat",
    "find_tool_format",
    "marked_formats",
    "tool_format_named",
]

AUTO = "auto"
"""What stands for the format that the chat template tells."""

NONE = "none"
"""What stands for no format: requests with tools are refused."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A format of tool calls. name: for --tool_format. parser: of one answer, from the request's tools.

    markers: texts that show that a template writes this format, all of one group. tokens: tags of it that some
    tokenizers call special; they have to be seen in the text. wrapper: tags that may stand around the answer's text.
    shape: how calls are spelled, where that is no matter of the name. ends_reasoning: models call in the middle of
    their reasoning, without closing it. has_messages: text has heads that the parser takes off, with tools or without.
    """

    name: str
    parser: Callable[[ToolSchemas], ToolParser]
    markers: tuple[tuple[str, ...], ...]
    tokens: tuple[str, ...]
    wrapper: tuple[str, str] | None = None
    shape: CallShape | None = None
    ends_reasoning: bool = False
    has_messages: bool = False


_DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
)
_MINIMAX = ("<minimax:tool_call>", "</minimax:tool_call>")
_TOOL_CALL = ("<tool_call>", "</tool_call>")
_DSML = "｜DSML｜"
HARMONY = "harmony"
JSON = "json"
"""The format for templates that tell of none: a call is a JSON object and nothing else."""

_TAG = re.compile(r"<[^<>\s=]+>|\[[A-Z_]+\]")


def _shaped(
    name: str,
    *markers: tuple[str, ...],
    wrapper: tuple[str, str] | None = None,
    ends_reasoning: bool = False,
) -> ToolFormat:
    """A format that is nothing but its shape."""
    shape = SHAPES[name]
    tags = {tag for text in shape.texts for tag in _TAG.findall(text)}
    tokens = tuple(dict.fromkeys([*tags_of(shape), *sorted(tags)]))
    return ToolFormat(
        name, functools.partial(ShapeParser, shape), markers, tokens, wrapper, shape, ends_reasoning=ends_reasoning
    )


def _xml(*names: str) -> Callable[[ToolSchemas], ToolParser]:
    return functools.partial(XmlParser, tuple(SHAPES[name] for name in names))


_DSML_PARSER = _xml("deepseek_v32", "deepseek_v4")  # whichever of the two tags a model writes

# The first whose markers a template has is taken: those that say more come first.
_FORMATS = (
    ToolFormat(HARMONY, HarmonyParser, (("<|channel|>", "<|message|>"),), HARMONY_TAGS),
    ToolFormat("deepseek_v4", _DSML_PARSER, (("｜DSML｜tool_calls",), (_DSML, "tool_calls>")), (_DSML,)),
    ToolFormat("deepseek_v32", _DSML_PARSER, ((_DSML,),), (_DSML,)),
    ToolFormat("deepseek_v3", DeepSeekV3Parser, ((_DEEPSEEK[0], "```json"),), _DEEPSEEK),
    ToolFormat("deepseek_r1", DeepSeekV3Parser, (), _DEEPSEEK),
    ToolFormat("deepseek_v31", DeepSeekV31Parser, ((_DEEPSEEK[0],),), _DEEPSEEK),
    ToolFormat(
        "kimi_k2",
        KimiParser,
        (("<|tool_calls_section_begin|>",),),
        (*KimiParser.opening, KimiParser.call_close, *KimiParser.closing, "<|tool_call_argument_begin|>"),
        ends_reasoning=True,
    ),
    ToolFormat(
        "minimax_m3",
        MiniMaxM3Parser,
        (("]<]minimax[>[",),),
        ("]<]minimax[>[", *MiniMaxM3Parser.opening, *MiniMaxM3Parser.closing),
        shape=SHAPES["minimax_m3"],
    ),
    ToolFormat(
        "muse_glimmer",
        MuseGlimmerParser,
        (("<atem:function_calls>",),),
        ("<atem:function_calls>", "<|start|>", "<|message|>", "<|eom|>", "<|eot|>"),
        ("to=user<|message|>", "<|eot|>"),
        SHAPES["muse_glimmer"],
    ),
    ToolFormat("minimax_m2", _xml("minimax_m2"), (("<minimax:tool_call>",),), _MINIMAX),
    ToolFormat(
        "gemma4",
        GemmaParser,
        (("<|tool_call>", "<tool_call|>"),),
        ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"),
    ),
    _shaped("lfm2", ("<|tool_call_start|>",), ("<|tool_list_start|>",)),
    _shaped("seed_oss", ("<seed:tool_call>",)),
    _shaped("hy_v3", ("<tool_call:opensource>",)),
    _shaped("solar_open", ("<|tool_call:begin|>", "<|tool_call:args|>")),
    _shaped(
        "kimi_k3",
        ("<|open|>", "<|sep|>"),
        wrapper=("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
    ),
    _shaped("cohere", ("<|START_ACTION|>",), wrapper=("<|START_RESPONSE|>", "<|END_RESPONSE|>")),
    _shaped("apertus", ("<|tools_prefix|>",), ends_reasoning=True),
    _shaped("nemotron_v2", ("<TOOLCALL>",)),
    _shaped("granite", ("<|tool_call|>", "<|start_of_role|>"), wrapper=("<response>", "</response>")),
    ToolFormat(
        "glm45",
        GlmParser,
        (("<tool_call>", "<arg_key>"),),
        (*_TOOL_CALL, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    ToolFormat("functionary_v32", FunctionaryParser, ((">>>all",),), (">>>",), has_messages=True),
    _shaped("functionary_v31", ("<function=", "</function>", "<|python_tag|>")),
    ToolFormat("qwen3_coder", _xml("qwen3_coder"), (("<tool_call>", "<function="),), _TOOL_CALL),
    ToolFormat("mistral", MistralParser, (("[TOOL_CALLS]",),), ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")),
    ToolFormat(
        "hunyuan",
        HunyuanParser,
        (("<tool_calls>",),),
        ("<tool_calls>", "</tool_calls>", "<answer>", "</answer>"),
        ("<answer>", "</answer>"),
    ),
    _shaped("minimax_m1"),
    ToolFormat(
        "ernie",
        HermesParser,
        (("<tool_call>", "<response>"),),
        (*_TOOL_CALL, "<response>", "</response>"),
        ("<response>", "</response>"),
    ),
    ToolFormat("hermes", HermesParser, (("</tool_call>",), ("<tool_call>",)), _TOOL_CALL),
    ToolFormat(
        "llama4_pythonic",
        LlamaPythonicParser,
        (("<|python_start|>",), ("[func_name1(",)),
        ("<|python_start|>", "<|python_end|>"),
    ),
    ToolFormat(
        "llama3_json",
        LlamaJsonParser,
        (("<|python_tag|>",), ("<|start_header_id|>", '"parameters": dictionary of argument name')),
        ("<|python_tag|>",),
    ),
    ToolFormat(JSON, PlainJsonParser, (), PlainJsonParser.opening, shape=SHAPES[JSON]),
)

TOOL_FORMATS: dict[str, ToolFormat] = {one.name: one for one in _FORMATS}
"""All formats by their names."""


def tool_format_named(name: str) -> ToolFormat | None:
    """Return the format of this name, None for "none".

    Raises ConfigError, with all names, for a name that there is not.
    """
    found = TOOL_FORMATS.get(name)
    if found is None and name != NONE:
        raise ConfigError(f"--tool_format {name[:100]!r} is not one of {', '.join((AUTO, NONE, *TOOL_FORMATS))}")
    return found


def find_tool_format(template: str) -> ToolFormat | None:
    """Return the format whose tags a chat template's source holds, or None when it holds none that are known here."""
    return next(iter(marked_formats(template)), None)


def marked_formats(template: str) -> list[ToolFormat]:
    """Return all formats whose tags a chat template's source holds, the likeliest first."""
    return [one for one in _FORMATS if any(all(marker in template for marker in group) for group in one.markers)]
