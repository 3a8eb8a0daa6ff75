"""What tests of grammars share: a small tokenizer, and how states are asked and led."""

from __future__ import annotations

import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from verify_service.grammar import GrammarState

EOS = 0


def make_tokenizer() -> Tokenizer:
    """A tokenizer of bytes and a few longer tokens."""
    merges = [("a", "b"), ("ab", "c"), ('"', ":"), ("1", "2")]
    vocab = {"<end>": EOS}
    for symbol in [*sorted(ByteLevel.alphabet()), *(left + right for left, right in merges)]:
        vocab[symbol] = len(vocab)
    made = Tokenizer(BPE(vocab=vocab, merges=merges))
    made.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = ByteLevelDecoder()
    made.add_special_tokens(["<end>"])
    return made


def token_id(tokenizer: Tokenizer, text: str) -> int:
    """The token of a text that is one."""
    found = tokenizer.token_to_id(text)
    assert found is not None
    return found


def allowed_after(state: GrammarState, path: list[int], vocab_size: int) -> set[int]:
    """The tokens that may follow `path`, which both ways to ask must say."""
    row = np.zeros(vocab_size, np.float32)
    state.forbid(row, path)
    allowed = set(np.flatnonzero(row == 0.0).tolist())
    words = state.mask_words(path)
    assert words.shape == (-(-vocab_size // 32),)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab_size]
    assert set(np.flatnonzero(bits).tolist()) == allowed
    return allowed


def to_the_end(state: GrammarState, vocab_size: int) -> list[int]:
    """Commits the first token that may follow until none can, as plain decoding does; returns them."""
    output: list[int] = []
    while True:
        allowed = set() if state.is_complete else allowed_after(state, [], vocab_size)
        if allowed and state.commit(min(allowed)):
            output.append(min(allowed))
        elif not renewed(state):
            return output


def renewed(state: GrammarState) -> bool:
    """Whether its lexer was spent; it has one of its own then."""
    if not state.is_spent:
        return False
    matcher = state.renew()
    assert matcher is not None
    state.take(matcher.result())
    return True
