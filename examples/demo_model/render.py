"""The chat format in plain Python: the same text as `chat_template.jinja`, cut into prompt and answer pieces.

Training needs to know which characters the assistant says, which a rendered template does not tell; the tests
hold this file and the template equal. It knows nothing of tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

TOOLS_HEAD = "# Tools\n\nYou may call these functions:\n<tools>"
TOOLS_TAIL = (
    "\n</tools>\n\nTo call one, answer with a JSON object inside <tool_call></tool_call>:\n"
    '<tool_call>\n{"name": <function-name>, "arguments": <arguments>}\n</tool_call>'
)


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def call_text(tool_calls: list[dict]) -> str:
    """The assistant text of tool calls, one block per call."""
    blocks = []
    for tool_call in tool_calls:
        function = tool_call.get("function", tool_call)
        arguments = function["arguments"]
        arguments = arguments if isinstance(arguments, str) else _dumps(arguments)
        blocks.append(f'<tool_call>\n{{"name": "{function["name"]}", "arguments": {arguments}}}\n</tool_call>')
    return "\n".join(blocks)


def answer_text(message: dict) -> str:
    """What the assistant says in `message`, without its reasoning."""
    content = message.get("content") or ""
    calls = message.get("tool_calls")
    if not calls:
        return content
    return content + ("\n" if content else "") + call_text(calls)


def _system_text(messages: list[dict], tools: Sequence[dict]) -> str:
    content = messages[0]["content"] if messages and messages[0]["role"] == "system" else ""
    if not tools:
        return content
    listing = TOOLS_HEAD + "".join("\n" + _dumps(t) for t in tools) + TOOLS_TAIL
    return f"{content}\n\n{listing}" if content else listing


def pieces(messages: list[dict], tools: Sequence[dict] = ()) -> list[tuple[str, bool]]:
    """The conversation as `(text, said by the assistant)` pieces; joined they are the rendered template.

    An opened `<think>` belongs to the prompt (the program opens it), what follows to the assistant.
    """
    out: list[tuple[str, bool]] = []
    system = _system_text(messages, tools)
    if system:
        out.append((f"<|im_start|>system\n{system}<|im_end|>\n", False))
    rest = messages[1:] if messages and messages[0]["role"] == "system" else messages
    for index, message in enumerate(rest):
        if message["role"] == "assistant":
            reasoning = message.get("reasoning_content")
            out.append(("<|im_start|>assistant\n" + ("<think>\n" if reasoning else ""), False))
            thought = f"{reasoning}\n</think>\n\n" if reasoning else ""
            out.append((f"{thought}{answer_text(message)}<|im_end|>", True))
            out.append(("\n", False))
        elif message["role"] == "tool":
            head = "" if index and rest[index - 1]["role"] == "tool" else "<|im_start|>user\n"
            last = index + 1 == len(rest) or rest[index + 1]["role"] != "tool"
            body = f"<tool_response>\n{message['content']}\n</tool_response>"
            out.append((head + body + ("<|im_end|>\n" if last else "\n"), False))
        else:
            out.append((f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n", False))
    return out


def prompt(messages: list[dict], tools: Sequence[dict] = (), think: bool = False) -> str:
    """The rendered conversation with the assistant's turn opened."""
    opened = "<|im_start|>assistant\n" + ("<think>\n" if think else "")
    return "".join(text for text, _ in pieces(messages, tools)) + opened
