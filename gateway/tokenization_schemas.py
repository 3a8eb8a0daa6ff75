"""Bodies of /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

from gateway.schemas import Message, TokenId
from gateway.tool_schemas import Tools


class TokenizeRequest(Struct, kw_only=True):
    """One of `prompt` (text, or a list of texts) and `messages`, which go through the chat template."""

    model: str | None = None
    prompt: str | Annotated[list[str], Meta(min_length=1, max_length=1024)] | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=4096)] | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None
    chat_template: Any = None  # refused, as the next
    truncate_prompt_tokens: Any = None


class TokenizeResponse(Struct):
    """Ids; a list of lists for a list of prompts."""

    tokens: list[int | list[int]]
    count: int | list[int]
    max_model_len: int
    token_strs: list[str | list[str]] | UnsetType = UNSET


class DetokenizeRequest(Struct, kw_only=True):
    """Ids, or several lists of them."""

    tokens: list[TokenId | list[TokenId]]
    model: str | None = None
    skip_special_tokens: bool | None = None


class DetokenizeResponse(Struct):
    """The text, under vLLM's name and SGLang's; a list for several."""

    prompt: str | list[str]
    text: str | list[str]
