"""The text files of a model folder, as all who make tokens of text read them."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from outrider.errors import StartupError, reason_of
from outrider.model_file import check_file
from outrider.telemetry import get_logger

log = get_logger(__name__)

_MOST_NAMED = 8

DEFAULT, TOOL_USE = "default", "tool_use"


def load_tokenizer(path: Path, vocab_size: int | None = None) -> Tokenizer:
    """tokenizer.json for whole texts: the truncation and padding that some have kept are of whoever trained with it.

    With vocab_size it is `fitted` to a model of so many ids. StartupError when it cannot be read.
    """
    check_file(path)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for damaged files
        raise StartupError(f"{path} cannot be read: {reason_of(error)}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer if vocab_size is None else fitted(tokenizer, vocab_size, path)


def vocab_fingerprint(folder: Path) -> str:
    """See fingerprint_of; empty for a folder without tokenizer.json."""
    path = folder / "tokenizer.json"
    return fingerprint_of(load_tokenizer(path)) if path.is_file() else ""


def fingerprint_of(tokenizer: Tokenizer) -> str:
    """SHA-256 (hex) of the tokenizer's id -> token table.

    Equal iff ids mean the same tokens: merges and pre-tokenisation, which only decide how text is split, are left out.
    """
    table = sorted((index, token) for token, index in tokenizer.get_vocab(with_added_tokens=True).items())
    return hashlib.sha256(json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()).hexdigest()


def fitted(tokenizer: Tokenizer, vocab_size: int, path: Path) -> Tokenizer:
    """The tokenizer for a model of `vocab_size` ids as `embedded` has it, with a warning that names its file."""
    added = tokenizer.get_added_tokens_decoder()
    beyond = [added[token].content for token in sorted(added) if token >= vocab_size]
    if not beyond:
        return tokenizer
    log.warning(
        "the model has no embedding of some of its tokenizer's added tokens: they are text", path=str(path),
        vocab_size=vocab_size, tokenizer_size=max(added) + 1, tokens=beyond[:_MOST_NAMED], num_tokens=len(beyond),
    )  # fmt: skip
    return Tokenizer.from_str(embedded(tokenizer.to_str(), vocab_size))


def stated_vocab_size(folder: Path) -> int | None:
    """The vocabulary size of the model in a folder, as config.json has it; None where it does not say."""
    config = read_json(folder / "config.json", missing_ok=True)
    inner = config.get("text_config")
    size = config.get("vocab_size") or (inner.get("vocab_size") if isinstance(inner, dict) else None)
    return size if isinstance(size, int) else None


def embedded(source: str, vocab_size: int) -> str:
    """A tokenizer.json without the added tokens that a model of so many ids has no embedding of: to it they are text,
    as they were before somebody added them."""
    said = json.loads(source)
    added = said.get("added_tokens") or []
    kept = [token for token in added if token["id"] < vocab_size]
    return source if len(kept) == len(added) else json.dumps(said | {"added_tokens": kept})


def find_templates(folder: Path, given: Path | None = None) -> dict[str, str]:
    """Sources by name, as transformers finds them: DEFAULT is the given file's, chat_template.jinja's or
    tokenizer_config.json's; TOOL_USE, where there is one, takes its place for who offers tools."""
    if given is not None:
        return {DEFAULT: _read_text(given)}
    beside, more = folder / "chat_template.jinja", folder / "additional_chat_templates" / f"{TOOL_USE}.jinja"
    for path in (beside, more):
        if os.path.lexists(path):
            check_file(path)
    if beside.exists():
        found: dict[str, Any] = {DEFAULT: _read_text(beside)}
    else:
        found = _by_name(read_json(folder / "tokenizer_config.json", missing_ok=True).get("chat_template"))
    if more.exists():
        found[TOOL_USE] = _read_text(more)
    return {name: found[name] for name in (DEFAULT, TOOL_USE) if isinstance(found.get(name), str)}


def _by_name(template: Any) -> dict[str, Any]:
    if not isinstance(template, list):
        return {DEFAULT: template}
    return {str(entry.get("name")): entry.get("template") for entry in template if isinstance(entry, dict)}


def token_variables(folder: Path) -> dict[str, str]:
    """`bos_token` and the like, as templates may name them; tokenizer_config.json comes before the other file."""
    found: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        for name, value in read_json(folder / file, missing_ok=True).items():
            text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str):
                found[name] = text
    return found


def read_json(path: Path, *, missing_ok: bool = False) -> dict[str, Any]:
    """A JSON object from a file of a model folder. StartupError when damaged, or absent where it may not be."""
    if missing_ok and not os.path.lexists(path):
        return {}
    check_file(path)
    try:
        value = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise StartupError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise StartupError(f"{path} must hold a JSON object")
    return value


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise StartupError(f"{path} cannot be read: {reason_of(error)}") from error
