"""The text files of a model folder, as all who make tokens of text read them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from outrider.errors import StartupError, reason_of
from outrider.model_file import check_file


def load_tokenizer(path: Path) -> Tokenizer:
    """tokenizer.json for whole texts: the truncation and padding that some have kept are of whoever trained with it.

    StartupError when it cannot be read.
    """
    check_file(path)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for damaged files
        raise StartupError(f"{path} cannot be read: {reason_of(error)}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def token_variables(special_tokens_map: Mapping[str, Any], tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and the like, as templates may name them; what the second file says comes before the first's."""
    found: dict[str, str] = {}
    for name, value in {**special_tokens_map, **tokenizer_config}.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found
