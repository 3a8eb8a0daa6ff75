"""Reads the files of --speculative-ngram-external-corpus-path, in the target's tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from outrider.errors import StartupError
from outrider.text_files import load_tokenizer, stated_vocab_size
from outrider.wire import Ids


def read_corpora(paths: tuple[str, ...], model_folder: Path) -> Iterator[Ids]:
    """Texts of the files, in order, as token ids int32 that the model has. StartupError for what cannot be read."""
    file = model_folder / "tokenizer.json"
    if not file.is_file():
        raise StartupError(f"--speculative-ngram-external-corpus-path needs a tokenizer, and {file} does not exist")
    tokenizer = load_tokenizer(file, stated_vocab_size(model_folder))
    for path in paths:
        for text in _texts(Path(path).expanduser()):
            tokens = tokenizer.encode(text, add_special_tokens=False).ids
            if tokens:
                yield np.array(tokens, np.int32)


def _texts(path: Path) -> Iterator[str]:
    """The whole of a text file; of a .jsonl file a text for each line."""
    try:
        with path.open(encoding="utf-8") as file:
            if path.suffix != ".jsonl":
                yield file.read()
                return
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _text_of(line, f"{path}, line {number}")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"--speculative-ngram-external-corpus-path: cannot read {path}: {error}") from error


def _text_of(line: str, place: str) -> str:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise StartupError(f"{place}: no JSON: {error}") from error
    text = value.get("text") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise StartupError(f"{place}: a string, or an object with a string `text`, is needed")
    return text
