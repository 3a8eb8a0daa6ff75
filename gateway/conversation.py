"""A conversation as ids: messages, tools and switches through the chat template, control tokens from it alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.error_values import shown
from gateway.messages import to_template
from gateway.offload import offload
from gateway.schemas import ChatCompletionRequest
from gateway.service import Ready
from gateway.shield import Cover
from gateway.template import ChatTemplate, RenderTooLong
from gateway.tokenizer import TextCodec
from gateway.tool_prompt import described
from gateway.tool_schemas import Tools
from gateway.tools import check_schemas
from outrider.errors import InvalidArgument

_MAX_TEMPLATE_KWARGS = 16
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"})
_TAIL_CHARS = 256
_SPACE = "\x1f"  # white space that templates trim and do not write


@dataclass(frozen=True, slots=True)
class Encoded:
    """The prompt, and how its text ends."""

    ids: list[int]
    tail: str


async def encode_conversation(body: ChatCompletionRequest, ready: Ready, body_bytes: int) -> Encoded:
    """The prompt of a chat. InvalidArgument for messages that the rules or the template refuse."""
    template = ready.template
    if template is None:
        raise InvalidArgument(
            "This model has no chat template; --chat-template gives one.", field="messages", code="template_error"
        )
    template = template.chosen(tools=bool(_offered(body)))
    context, cover = await offload(body_bytes, _context, body, ready.codec, template)
    try:
        rendered = await template.render(context, ready.codec.max_chars)
    except RenderTooLong as error:
        raise ready.codec.over_max_chars(ready.codec.max_chars + 1, "messages") from error
    except InvalidArgument as error:  # the template may have put a message's text into its reason
        raise InvalidArgument(cover.uncover(error.message), field=error.field, code=error.code) from error
    if body.continue_final_message:
        rendered, marked, rest = rendered.partition(cover.end)
        if not marked:
            raise InvalidArgument(
                "The chat template does not let the last message be continued.",
                field="continue_final_message", code="template_error",
            )  # fmt: skip
        said = context["messages"][-1]["content"].removesuffix(cover.end + _SPACE)
        if said.strip() and not rest.startswith(_SPACE):  # the template trims what an assistant said
            rendered = rendered.rstrip()
    return Encoded(await ready.codec.encode_chat(rendered, cover), cover.uncover(rendered[-_TAIL_CHARS:]))


def _offered(body: ChatCompletionRequest) -> Tools:
    """The tools that may be called."""
    return (body.tools or []) if body.tool_choice != "none" else []


def _context(body: ChatCompletionRequest, codec: TextCodec, template: ChatTemplate) -> tuple[dict[str, Any], Cover]:
    """What the template is given, with every string of the user's covered; and the cover.

    A template that knows no tools gets them as text: in the system message, or in the user's first where it takes none,
    and calls in the messages that made them.
    """
    check_schemas(body.tools)  # before anything goes through them
    messages = to_template(body.messages)
    tools = [_for_template(msgspec.to_builtins(tool)) for tool in _offered(body)]
    if not template.takes_tools:  # nor calls that were made before, whether or not any may be made now
        messages, tools = described(messages, tools, takes_system=template.takes_system), []
    kwargs = _template_kwargs(body)
    codec.check_length("".join(message["content"] for message in messages), "messages")
    cover = codec.covering(messages, kwargs, tools)
    covered: list[dict[str, Any]] = [
        {**cover.cover(message), "role": message["role"]}
        for message in messages  # a role is no text of the user's
    ]
    if body.continue_final_message:
        _mark_end(covered, cover)
    context = {
        **cover.cover(kwargs), "messages": covered, "add_generation_prompt": not body.continue_final_message,
    }  # fmt: skip
    if tools:
        context["tools"] = cover.cover(tools)
    return context, cover


def _for_template(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as templates read it: every key is there, but `strict`, which is none of the model's business."""
    given = tool["function"]
    function = {
        "name": given["name"], "description": given["description"] or "",
        "parameters": given["parameters"] or {"type": "object", "properties": {}},
    }  # fmt: skip
    return {"type": tool["type"], "function": function}


def _mark_end(messages: list[dict[str, Any]], cover: Cover) -> None:
    """Puts a mark where the assistant's last message ends: what the template writes after it is cut off. White space
    behind the mark tells whether the template keeps the message's own."""
    last = messages[-1]
    if last["role"] != "assistant":
        raise InvalidArgument(
            "Only an assistant's message can be continued.", field="continue_final_message", code="invalid_value"
        )
    messages[-1] = {**last, "content": last["content"] + cover.end + _SPACE}


def _template_kwargs(body: ChatCompletionRequest) -> dict[str, Any]:
    """Switches for the template: plain values under names that mean nothing else."""
    kwargs = dict(body.chat_template_kwargs or {})
    if len(kwargs) > _MAX_TEMPLATE_KWARGS or not all(
        isinstance(v, str | bool | int | float | None) for v in kwargs.values()
    ):
        raise InvalidArgument(
            f"chat_template_kwargs takes at most {_MAX_TEMPLATE_KWARGS} strings, numbers and booleans.",
            field="chat_template_kwargs", code="invalid_value",
        )  # fmt: skip
    for name in kwargs:
        if name in _RESERVED or name.endswith("_token") or not name.isidentifier():
            raise InvalidArgument(
                f"chat_template_kwargs has a name that is not allowed, {shown(name)}.",
                field="chat_template_kwargs", code="invalid_value",
            )  # fmt: skip
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    return kwargs
