"""Outputs that run into a limit of their grammar: where, whatever was drafted, and nobody else with them."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence

import numpy as np
import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer

from outrider.errors import InvalidArgument
from outrider.sampling import SamplingParams
from outrider.tree import TokenTree
from outrider.v1 import common_pb2, verify_pb2
from outrider.wire import pack_ids
from tests.fake_drafters import Truth, perfect
from tests.fakes import ToyModel
from tests.verify_service.grammars import EOS, allowed_after, renewed, to_the_end, token_id
from tests.verify_service.rig import MAX_CHOICES, MAX_NODES, Rig, build_rig, request
from verify_service.grammar import pruned
from verify_service.grammar_compiler import MAX_ANEW, GrammarCompiler, Source
from verify_service.requests import RequestBounds, SessionFactory

_DEEPER = {"type": "object", "properties": {"a": {"$ref": "#/$defs/deeper"}}, "required": ["a"]}
_ENDLESS = {
    "type": "object", "properties": {"p": {"type": "string", "maxLength": 9}, "a": {"$ref": "#/$defs/deeper"}},
    "required": ["p", "a"], "additionalProperties": False, "$defs": {"deeper": _DEEPER},
}  # fmt: skip
LEXERS = common_pb2.Grammar(regex="[a-z]{3,90}Z(a{1000}){1000}")
"""Its lexer's limit is reached behind the Z."""
PARSERS = common_pb2.Grammar(json_schema=json.dumps(_ENDLESS))
"""The parser's limit is reached in what is forced behind the string."""


def test_a_limit_that_one_output_reaches_is_not_reached_by_others(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    word = [token_id(tokenizer, letter) for letter in "wordy"]
    first, beside, behind = (compiler.compile(LEXERS) for _ in range(3))
    for state in (beside, behind):
        assert all(state.commit(token) for token in word[:4])
    behind.mask_words(word)
    output = to_the_end(first, tokenizer.get_vocab_size())
    error = first.dead_end()
    assert error is not None
    assert "lexer error" in error.message
    assert not behind.commit(word[4])
    assert not allowed_after(beside, [], tokenizer.get_vocab_size())
    assert renewed(beside)
    assert renewed(behind)
    allowed = allowed_after(beside, [], tokenizer.get_vocab_size())
    assert {token_id(tokenizer, "a"), token_id(tokenizer, "Z")} <= allowed
    assert behind.commit(word[4])
    assert allowed_after(behind, [], tokenizer.get_vocab_size()) == allowed
    assert beside.dead_end() is None
    later = compiler.compile(LEXERS)
    assert later.looks_ahead
    assert to_the_end(later, tokenizer.get_vocab_size()) == output


@pytest.mark.parametrize("grammar", [LEXERS, PARSERS], ids=["lexer", "parser"])
def test_a_draft_that_reaches_a_limit_changes_nothing(
    compiler: GrammarCompiler, tokenizer: Tokenizer, grammar: common_pb2.Grammar
) -> None:
    output = to_the_end(compiler.compile(grammar), tokenizer.get_vocab_size())
    for ahead in (1, 3, 50):
        state, committed = compiler.compile(grammar), list[int]()
        while True:
            allowed = allowed_after(state, [], tokenizer.get_vocab_size())
            draft = [*output[len(committed) :], *[token_id(tokenizer, "a")] * 9][:ahead]
            pruned(TokenTree.chain(np.array(draft, np.int32)), state)
            for depth in range(1, len(draft) + 1):
                state.mask_words(draft[:depth])
            assert allowed_after(state, [], tokenizer.get_vocab_size()) == allowed  # as long as the step lasts
            if allowed and state.commit(min(allowed)):
                committed.append(min(allowed))
            elif not renewed(state):
                break
        assert committed == output
        assert state.dead_end() is not None


def _rig(compiler: GrammarCompiler, tokenizer: Tokenizer) -> Rig:
    rig = build_rig(ToyModel(vocab_size=tokenizer.get_vocab_size()), context=120)
    bounds = RequestBounds(rig.runner.config.max_position, MAX_CHOICES, MAX_NODES)
    rig.factory = SessionFactory(rig.runner.config, bounds, compiler)
    return rig


def _asked(prompt: list[int], grammar: common_pb2.Grammar, **params: object) -> verify_pb2.GenerateRequest:
    asked = request(prompt, SamplingParams(temperature=0.0, max_tokens=60, **params))  # type: ignore[arg-type]
    asked.sampling.grammar.CopyFrom(grammar)
    return asked


@pytest.mark.parametrize("grammar", [LEXERS, PARSERS], ids=["lexer", "parser"])
def test_a_dead_end_comes_behind_the_same_tokens_with_drafts_and_without(
    compiler: GrammarCompiler, tokenizer: Tokenizer, grammar: common_pb2.Grammar
) -> None:
    prompt = [7, 8]
    plain = _rig(compiler, tokenizer)
    (session,) = plain.submit(_asked(prompt, grammar))
    plain.run()
    output, error = plain.output(session), str(plain.errors[session.session_id])
    assert "cannot go on" in error
    assert len(output) > 5
    goes_on = [*prompt, *output, *[token_id(tokenizer, "a")] * 9]
    for depth in range(1, MAX_NODES):
        rig = _rig(compiler, tokenizer)
        rig.join(perfect(Truth([goes_on]), depth))
        (session,) = rig.submit(_asked(prompt, grammar))
        rig.run()
        assert rig.output(session) == output
        assert str(rig.errors[session.session_id]) == error
        assert session.stats.accepted_tokens
        assert rig.loop.counters.output_tokens == len(output)
        rig.check_whole()


def test_an_answer_whose_grammar_another_exhausts_goes_on_without_drafts(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    never = {EOS: -100.0, token_id(tokenizer, "Z"): -100.0}
    asked = _asked([3], LEXERS, logit_bias=never)
    asked.sampling.max_tokens = 80
    alone = _rig(compiler, tokenizer)
    (session,) = alone.submit(asked)
    alone.run()
    output = alone.output(session)
    assert len(output) == 80
    rig = _rig(compiler, tokenizer)
    sim = rig.join(perfect(Truth([[3, *output]]), 2))
    (session,) = rig.submit(asked)
    (other,) = rig.submit(_asked([7, 8], LEXERS, logit_bias={token_id(tokenizer, "Z"): 100.0}))
    rig.run()
    assert "lexer error" in str(rig.errors[other.session_id])
    assert rig.output(session) == output
    assert session.stats.accepted_tokens
    assert verify_pb2.CLOSE_REASON_REASSIGNED in sim.view.closed.values()
    rig.check_whole()


def test_many_outputs_of_a_spent_grammar_go_on_or_end_and_the_step_waits_for_none(
    compiler: GrammarCompiler, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One more than may wait: it ends with the error of the lexer, as if the limit were its own."""
    never = {EOS: -100.0, token_id(tokenizer, "Z"): -100.0}
    rig = _rig(compiler, tokenizer)
    (plain,) = rig.submit(request([9], SamplingParams(temperature=0.0, max_tokens=60)))
    sessions = [rig.submit(_asked([3], LEXERS, logit_bias=never))[0] for _ in range(3)]
    rig.submit(_asked([7, 8], LEXERS, logit_bias={token_id(tokenizer, "Z"): 100.0}))
    all_asked, led_anew = threading.Event(), compiler._led_anew

    def held(source: Source, output: Sequence[int]) -> LLMatcher:
        assert all_asked.wait(60)
        return led_anew(source, output)

    monkeypatch.setattr(compiler, "_led_anew", held)
    compiler._num_anew += MAX_ANEW - 2
    try:
        while not rig.errors:
            rig.step()
        all_asked.set()
        rig.run()
    finally:
        all_asked.set()
        compiler._num_anew -= MAX_ANEW - 2
    assert plain.session_id in rig.finishes
    ended = [str(rig.errors[session.session_id]) for session in sessions if session.session_id in rig.errors]
    assert len(ended) >= 1
    assert all("lexer error" in error for error in ended)
    outputs = [rig.output(session) for session in sessions if session.session_id not in rig.errors]
    assert len({tuple(output) for output in outputs}) == 1
    rig.check_whole()


def test_a_parked_output_may_be_given_up(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    rig = _rig(compiler, tokenizer)
    (session,) = rig.submit(_asked([7, 8], LEXERS, logit_bias={token_id(tokenizer, "Z"): 100.0}))
    while session not in rig.loop.scheduler.parked:
        rig.step()
    rig.cancel(session)
    rig.run()
    assert session.session_id not in rig.errors
    rig.check_whole()


def test_an_output_is_resumed_though_another_spends_its_grammar_meanwhile(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    rig = _rig(compiler, tokenizer)
    compiled = asyncio.run(compiler.settle(LEXERS))  # before the other comes to the limit, as a request may
    other = compiler.compile(LEXERS)
    while allowed := allowed_after(other, [], tokenizer.get_vocab_size()):
        other.commit(min(allowed))
    assert other.is_spent
    asked = _asked([3], LEXERS)
    asked.resumed_tokens = pack_ids([token_id(tokenizer, letter) for letter in "words"])
    (session,) = rig.factory.build(asked, compiled)
    assert session.grammar is not None
    assert {token_id(tokenizer, letter) for letter in "aZ"} <= allowed_after(
        session.grammar, [], tokenizer.get_vocab_size()
    )
    asked.resumed_tokens = pack_ids([token_id(tokenizer, letter) for letter in "wor0s"])
    with pytest.raises(InvalidArgument, match=r"resumed_tokens\[3\] is .* forbids"):
        rig.factory.build(asked, compiled)


def test_logprobs_of_drafts_before_a_limit_are_those_of_plain_decoding(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    prompt, asked = [7, 8], _asked([7, 8], LEXERS)
    asked.logprobs = True

    def logprobs(rig: Rig) -> list[float]:
        (session,) = rig.submit(asked)
        rig.run()
        return [each.logprob for response in rig.responses[session.session_id] for each in response.logprobs]

    plain = _rig(compiler, tokenizer)
    expected = logprobs(plain)
    (output,) = plain.tokens.values()
    for depth in range(1, MAX_NODES):
        rig = _rig(compiler, tokenizer)
        rig.join(perfect(Truth([[*prompt, *output, *[token_id(tokenizer, "a")] * 9]]), depth))
        assert logprobs(rig) == pytest.approx(expected)
