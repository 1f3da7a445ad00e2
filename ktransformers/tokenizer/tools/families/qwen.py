"""Qwen3-Coder and Qwen3.5: `<tool_call><function=name><parameter=key>` ... `</parameter></function></tool_call>`.

Source: the chat templates of Qwen/Qwen3-Coder and Qwen/Qwen3.5. Models forget `<tool_call>` now and then.
"""

from __future__ import annotations

from ktransformers.tokenizer.tools.xml_text import XmlForm, XmlParser

__all__ = ["QwenXmlParser"]


class QwenXmlParser(XmlParser):
    """A parser of Qwen3-Coder's calls, whose values have a line of their own, or several."""

    forms = (
        XmlForm(
            opening=("<tool_call>", "<function="),
            closing=("</tool_call>",),
            call=("<function=", "</function>"),
            parameter=("<parameter=", "</parameter>"),
            trims=True,
        ),
    )
