"""A model's tokenizer as grammars take it: what a caller writes never becomes a control token."""

from __future__ import annotations

import json
import re
from typing import Any

from llguidance import LLTokenizer, TokenizerWrapper


def plain_tokenizer(source: str, vocab_size: int, eos_token_ids: list[int]) -> LLTokenizer:
    """The tokenizer of a tokenizer.json, so that a control token stands only where the output ends."""
    eos = eos_token_ids or None
    base = LLTokenizer(source, n_vocab=vocab_size, eos_token=eos)
    added = json.loads(source).get("added_tokens") or []
    if not added:
        return base
    plain = _PlainTokenizer(base, added, eos_token_ids)
    return LLTokenizer(TokenizerWrapper(plain), n_vocab=vocab_size, eos_token=eos)


class _PlainTokenizer:
    """Tokenises text in which the names of control tokens are text; the library's own makes control tokens of them."""

    def __init__(self, base: LLTokenizer, added: list[dict[str, Any]], eos_token_ids: list[int]) -> None:
        self.bos_token_id = None
        self.eos_token_id = base.eos_token
        self.tokens = [base.decode_bytes([token]) for token in range(base.vocab_size)]
        # The library holds whatever was added in angle brackets for a control token; many models think in such.
        text = {token["id"] for token in added if not token.get("special")}.difference(eos_token_ids)
        self.special_token_ids = [t for t in range(base.vocab_size) if base.is_special_token(t) and t not in text]
        self._base = base
        longest_first = sorted((token["content"] for token in added if token.get("special")), key=len, reverse=True)
        names = b"|".join(re.escape(name.encode()) for name in longest_first)
        self._controls = re.compile(b"(" + (names or b"(?!)") + b")")

    def __call__(self, text: bytes) -> list[int]:
        """Token ids; every second piece is such a name, made of ordinary tokens."""
        tokens: list[int] = []
        for place, piece in enumerate(self._controls.split(text)):
            tokens += self._base.greedy_tokenize(piece.decode()) if place % 2 else self._base.tokenize_bytes(piece)
        return tokens
