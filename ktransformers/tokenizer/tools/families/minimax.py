"""MiniMax-M2: `<minimax:tool_call><invoke name="f"><parameter name="key">` ... in a section.

Source: the chat template of MiniMaxAI/MiniMax-M2 and its guide to tool calls.
"""

from __future__ import annotations

from ktransformers.tokenizer.tools.xml_text import XmlForm, XmlParser

__all__ = ["MiniMaxParser"]


class MiniMaxParser(XmlParser):
    """A parser of MiniMax-M2's calls, whose values stand right between their tags."""

    forms = (
        XmlForm(
            opening=("<minimax:tool_call>",),
            closing=("</minimax:tool_call>",),
            call=("<invoke", "</invoke>"),
            parameter=("<parameter", "</parameter>"),
        ),
    )
