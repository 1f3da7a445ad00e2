"""Parsers of tool calls, one module for each family; they tell what they find while it is being written.

events.py      what is told          cursor.py      reading text that is still being written
json_text.py   JSON and its kin      base.py        what all parsers share
xml_text.py parameters.py sections.py values.py    what several families share
formats.py     the formats by name, and which one a chat template writes
"""

from ktransformers.tokenizer.tools.events import (
    ArgumentsPiece,
    CallEnded,
    CallStarted,
    ParsedEvent,
    ReasoningPiece,
    TextPiece,
    ToolSchemas,
)
from ktransformers.tokenizer.tools.formats import AUTO, TOOL_FORMATS, ToolFormat, find_tool_format, tool_format_named

__all__ = [
    "AUTO",
    "TOOL_FORMATS",
    "ArgumentsPiece",
    "CallEnded",
    "CallStarted",
    "ParsedEvent",
    "ReasoningPiece",
    "TextPiece",
    "ToolFormat",
    "ToolSchemas",
    "find_tool_format",
    "tool_format_named",
]
