"""Conversations as ids, in the target's own chat template, and the marks between turns.

The template is the user's own model's and is rendered in a sandbox; templates that need more than messages are refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from engine.config import ModelConfig
from outrider.errors import StartupError

_MARK = "\u2402turn\u2403"
Message = dict[str, str]


class ChatFormat:
    """A model's tokenizer and template. `stops`: ids that end an answer or a user's turn."""

    def __init__(self, tokenizer: Tokenizer, source: str, variables: dict[str, str], stops: frozenset[int]) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _refuse
        self.tokenizer = tokenizer
        self.stops = stops
        self._template = environment.from_string(source)
        self._variables = variables
        before, _, after = self._render([{"role": "user", "content": _MARK}], add_generation_prompt=False).partition(
            _MARK
        )
        # What stands after a user's words ends them: its first id is what the model says when the user is done.
        closing = self.encode(after)
        self.user_stops = frozenset({*stops, *closing[:1]})
        self.opening = self.encode(before)

    @classmethod
    def of_model(cls, folder: Path) -> ChatFormat:
        """From a model folder. StartupError when it has no tokenizer or no chat template."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise StartupError(f"no tokenizer at {path}; training data is made of text")
        config = _json(folder / "tokenizer_config.json")
        beside = folder / "chat_template.jinja"
        source: Any = beside.read_text(encoding="utf-8") if beside.is_file() else config.get("chat_template")
        if isinstance(source, list):
            source = {entry["name"]: entry["template"] for entry in source}.get("default")
        if not isinstance(source, str):
            raise StartupError(f"{folder} has no chat template; heads are trained on conversations")
        stops = frozenset(ModelConfig.from_folder(folder).eos_token_ids)
        return cls(Tokenizer.from_file(str(path)), source, _token_variables(config), stops)

    def encode(self, text: str) -> list[int]:
        """Ids of a text as it stands."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of ids, control tokens left out."""
        return self.tokenizer.decode(list(tokens), skip_special_tokens=True)

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Ids up to where the assistant answers."""
        return self.encode(self._render(messages, add_generation_prompt=True))

    def user_turn(self, messages: Sequence[Message], opener: str) -> list[int]:
        """Ids up to where the user goes on from `opener`, after `messages`."""
        text = self._render([*messages, {"role": "user", "content": _MARK}], add_generation_prompt=False)
        return self.encode(text.partition(_MARK)[0] + opener)

    def _render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=add_generation_prompt, **self._variables
            )
        except TemplateError as error:
            raise StartupError(f"the chat template cannot be rendered: {error}") from error


def _token_variables(config: dict[str, Any]) -> dict[str, str]:
    found = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StartupError(f"{path} cannot be read: {error}") from error


def _refuse(message: str) -> None:
    raise TemplateError(message)
