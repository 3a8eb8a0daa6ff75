"""Conversations as ids, in the target's own chat template, and the marks between turns.

The template is code from a model folder: a process of its own renders it; templates that need more than messages are
refused. One that refuses a user's message alone gets a plain system message before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from engine.config import ModelConfig
from outrider.errors import StartupError
from outrider.text_files import DEFAULT, find_templates, load_tokenizer, token_variables
from training.template_process import Refused, TemplateProcess

_MARK = "\u2402turn\u2403"
Message = dict[str, str]
_SYSTEM: Message = {"role": "system", "content": "You are a helpful assistant."}


class ChatFormat:
    """A model's tokenizer and template. `stops`: ids that end an answer or a user's turn.

    `takes_system`: whether the template has a place for a system message; some refuse it.
    """

    def __init__(self, tokenizer: Tokenizer, template: TemplateProcess, stops: frozenset[int]) -> None:
        self.tokenizer = tokenizer
        self.stops = stops
        self._template = template
        self._needs_system = False
        before, _, after = self._of_lone_user().partition(_MARK)
        # What stands after a user's words ends them: its first id is what the model says when the user is done.
        closing = self.encode(after)
        self.user_stops = frozenset({*stops, *closing[:1]})
        self.opening = self.encode(before)
        self.takes_system = self._takes_system()

    @classmethod
    def of_model(cls, folder: Path) -> ChatFormat:
        """Reads a model folder. StartupError where tokenizer or chat template are missing or do not work."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise StartupError(f"no tokenizer at {path}; training data is made of text")
        source = find_templates(folder).get(DEFAULT)
        if source is None:
            raise StartupError(f"{folder} has no chat template; heads are trained on conversations")
        config = ModelConfig.from_folder(folder)
        template = TemplateProcess(f"of {folder}", source, token_variables(folder))
        return cls(load_tokenizer(path, config.vocab_size), template, frozenset(config.eos_token_ids))

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

    def _of_lone_user(self) -> str:
        lone = [{"role": "user", "content": _MARK}]
        try:
            return self._render(lone, add_generation_prompt=False)
        except Refused:
            self._needs_system = True
            return self._render(lone, add_generation_prompt=False)

    def _takes_system(self) -> bool:
        messages = [{"role": "system", "content": _MARK}, {"role": "user", "content": "Hello."}]
        try:
            return _MARK in self._render(messages, add_generation_prompt=True)
        except StartupError:
            return False

    def _render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        if self._needs_system and messages[0]["role"] != "system":
            messages = [_SYSTEM, *messages]
        return self._template.render({"messages": list(messages), "add_generation_prompt": add_generation_prompt})
