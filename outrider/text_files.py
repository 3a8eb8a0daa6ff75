"""The text files of a model folder, as all who make tokens of text read them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from outrider.errors import StartupError, reason_of
from outrider.telemetry import get_logger

log = get_logger(__name__)

_MOST_NAMED = 8


def load_tokenizer(path: Path, vocab_size: int | None = None) -> Tokenizer:
    """tokenizer.json for whole texts: the truncation and padding that some have kept are of whoever trained with it.

    For a model of `vocab_size` ids as `embedded` has it, with a warning. StartupError when it cannot be read.
    """
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for damaged files
        raise StartupError(f"{path} cannot be read: {reason_of(error)}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    added = tokenizer.get_added_tokens_decoder()
    beyond = [] if vocab_size is None else [added[token].content for token in sorted(added) if token >= vocab_size]
    if vocab_size is None or not beyond:
        return tokenizer
    log.warning(
        "the model has no embedding of some of its tokenizer's added tokens: they are text", path=str(path),
        vocab_size=vocab_size, tokenizer_size=max(added) + 1, tokens=beyond[:_MOST_NAMED], num_tokens=len(beyond),
    )  # fmt: skip
    return Tokenizer.from_str(embedded(tokenizer.to_str(), vocab_size))


def embedded(source: str, vocab_size: int) -> str:
    """A tokenizer.json without the added tokens that a model of so many ids has no embedding of: to it they are text,
    as they were before somebody added them."""
    said = json.loads(source)
    added = said.get("added_tokens") or []
    kept = [token for token in added if token["id"] < vocab_size]
    return source if len(kept) == len(added) else json.dumps(said | {"added_tokens": kept})


def token_variables(special_tokens_map: Mapping[str, Any], tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and the like, as templates may name them; what the second file says comes before the first's."""
    found: dict[str, str] = {}
    for name, value in {**special_tokens_map, **tokenizer_config}.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found
