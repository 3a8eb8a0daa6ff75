"""Grammars of the gateway's, compiled by the verify service's own compiler."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from outrider.v1 import common_pb2
from verify_service.grammar_compiler import GrammarCompiler


class Grammars:
    """Compiles for the embedded model."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._compiler = GrammarCompiler(folder, vocab_size=self._tokenizer.get_vocab_size(), eos_token_ids=(2,))

    def takes(self, grammar: common_pb2.Grammar | None, text: str) -> bool:
        """Whether `text` may begin an output."""
        assert grammar is not None
        state = self._compiler.compile(grammar)
        return all(state.commit(token) for token in self._tokenizer.encode(text, add_special_tokens=False).ids)
