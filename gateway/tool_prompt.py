"""Tools in words, for models whose chat template knows none: the hermes format, which most small models have seen."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

_INTRODUCTION = """You can call functions. These are their signatures, one a line:
<tools>
{tools}
</tools>
To call one, write a JSON object with its name and its arguments between tags, and nothing after it:
<tool_call>
{{"name": "function_name", "arguments": {{"argument": "value"}}}}
</tool_call>"""


def described(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], *, takes_system: bool
) -> list[dict[str, Any]]:
    """The conversation with the tools, if there are any, in its system message, and calls and results as text.

    Where the template takes no system message the tools are put before the user's first words.
    """
    made = [_in_words(message) for message in messages]
    if not tools:
        return made
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    introduction = _INTRODUCTION.format(tools=lines)
    first = next((index for index, message in enumerate(made) if message["role"] == "user"), None)
    if not takes_system and first is not None:
        asked = {**made[first], "content": f"{introduction}\n\n{made[first]['content']}"}
        return [*made[:first], asked, *made[first + 1 :]]
    if made and made[0]["role"] == "system":
        return [{**made[0], "content": f"{made[0]['content']}\n\n{introduction}".lstrip()}, *made[1:]]
    return [{"role": "system", "content": introduction}, *made]


def _in_words(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = [f"<tool_call>\n{_call(call['function'])}\n</tool_call>" for call in calls]
    return {"role": message["role"], "content": "\n".join([*filter(None, [message["content"]]), *written])}


def _call(function: dict[str, Any]) -> str:
    return json.dumps({"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False)
