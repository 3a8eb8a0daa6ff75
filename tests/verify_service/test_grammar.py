"""Grammars along paths: what is allowed is what the language allows, wherever the look-ahead has been before."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import json
import math
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from tokenizers import AddedToken, Tokenizer

from outrider.errors import Internal, InvalidArgument, ResourceExhausted, Unimplemented
from outrider.tree import TokenTree
from outrider.v1 import common_pb2, verify_pb2
from outrider.wire import MAX_GRAMMAR_BYTES, pack_ids
from tests.fakes import toy_config
from tests.verify_service.grammars import EOS, allowed_after, to_the_end, token_id
from verify_service import grammar_trial
from verify_service.grammar import GrammarState, pruned
from verify_service.grammar_compiler import MAX_CACHED, MAX_TRIALS, GrammarCompiler
from verify_service.requests import RequestBounds, SessionFactory
from verify_service.session import Session


def test_regex_is_followed_to_its_end(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    state = compiler.compile(common_pb2.Grammar(regex="(abc|12)x?"))
    texts = {tokenizer.decode([token]) for token in allowed_after(state, [], tokenizer.get_vocab_size())}
    assert texts == {"a", "ab", "abc", "1", "12"}
    assert state.commit(token_id(tokenizer, "abc"))
    assert not state.is_complete
    after = allowed_after(state, [], tokenizer.get_vocab_size())
    assert after == {tokenizer.token_to_id("x"), EOS}
    assert state.commit(token_id(tokenizer, "x"))
    assert state.is_complete


def test_forbidden_nodes_are_pruned_with_what_hangs_below(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    ids = {text: tokenizer.token_to_id(text) for text in ("a", "b", "c", "x", "abc")}
    state = compiler.compile(common_pb2.Grammar(regex="abc+x"))
    tokens = np.array([ids["a"], ids["x"], ids["abc"], ids["b"], ids["a"], ids["x"], ids["c"], EOS], np.int32)
    tree = TokenTree(tokens, np.array([-1, -1, -1, 0, 1, 2, 3, 5], np.int32))
    kept, nodes = pruned(tree, state)
    assert nodes.tolist() == [0, 2, 3, 5, 6, 7]  # the end may follow a complete match
    assert kept.parents.tolist() == [-1, -1, 0, 1, 2, 3]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_look_ahead_leaves_no_trace(compiler: GrammarCompiler, tokenizer: Tokenizer, data: st.DataObject) -> None:
    grammar = common_pb2.Grammar(json_schema=json.dumps({"type": "array", "items": {"enum": ["ab", 12, None]}}))
    vocab_size = tokenizer.get_vocab_size()
    wandering, plain = compiler.compile(grammar), compiler.compile(grammar)
    committed: list[int] = []
    for _ in range(data.draw(st.integers(1, 6))):
        path: list[int] = []
        for _ in range(data.draw(st.integers(0, 4))):
            choices = sorted(allowed_after(wandering, path, vocab_size) - {EOS})
            if not choices:
                break
            path.append(data.draw(st.sampled_from(choices)))
        choices = sorted(allowed_after(wandering, [], vocab_size))
        assert choices == sorted(allowed_after(plain, [], vocab_size))
        token = data.draw(st.sampled_from(choices))
        committed.append(token)
        assert wandering.commit(token)
        assert plain.commit(token)
        assert wandering.is_complete == plain.is_complete
        if plain.is_complete:
            assert re.fullmatch(r"\[.*\]", tokenizer.decode([token for token in committed if token != EOS]))
            return


_STEADY = (
    common_pb2.Grammar(json_schema=json.dumps({"type": "array", "items": {"enum": ["ab", 12, None]}})),
    common_pb2.Grammar(json_schema=json.dumps({"type": "object", "additionalProperties": {"type": "integer"}})),
    common_pb2.Grammar(regex="(abc|12)+x?"),
    common_pb2.Grammar(ebnf='start: "a" start "b" | "c"'),
)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), grammar=st.sampled_from(_STEADY))
def test_looking_ahead_step_after_step_is_as_from_a_new_matcher(
    compiler: GrammarCompiler, tokenizer: Tokenizer, data: st.DataObject, grammar: common_pb2.Grammar
) -> None:
    vocab_size, committed = tokenizer.get_vocab_size(), list[int]()
    wandering = compiler.compile(grammar)

    def drawn(path: list[int]) -> int:
        """A token that may follow as a rule, or any."""
        allowed = sorted(allowed_after(wandering, path, vocab_size))
        any_token = st.sampled_from([EOS, token_id(tokenizer, "a"), token_id(tokenizer, "]")])
        return data.draw(st.sampled_from(allowed) if allowed and data.draw(st.integers(0, 9)) else any_token)

    def anew() -> GrammarState:
        state = compiler.compile(grammar)
        for token in committed:
            state.commit(token)
        return state

    for _ in range(data.draw(st.integers(1, 8))):
        for _ in range(data.draw(st.integers(0, 3))):
            path: list[int] = []
            for _ in range(data.draw(st.integers(0, 4))):
                path.append(drawn(path))
                assert allowed_after(wandering, path, vocab_size) == allowed_after(anew(), path, vocab_size)
        token, plain = drawn([]), anew()
        committed.append(token)
        assert wandering.commit(token) == plain.commit(token)
        assert wandering.is_complete == plain.is_complete
        assert (wandering.dead_end() is None) == (plain.dead_end() is None)


def test_what_looks_ahead_is_copied_once(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    copies: list[LLMatcher] = []

    class Counting:
        """A matcher that keeps the copies that were made of it."""

        def __getattr__(self, name: str) -> Any:
            return getattr(matcher, name)

        def deep_copy(self) -> LLMatcher:
            copies.append(matcher.deep_copy())
            return copies[-1]

    matcher = compiler.compile(common_pb2.Grammar(regex="(abc|12)+x?"))._matcher
    vocab_size = tokenizer.get_vocab_size()
    state = GrammarState(
        cast("LLMatcher", Counting()), "regex", vocab_size, end_ids={EOS}, anew=lambda _: pytest.fail("it is not spent")
    )
    a, abc, twelve = (token_id(tokenizer, text) for text in ("a", "abc", "12"))
    for path, token in (([abc, twelve, abc], abc), ([twelve, twelve], abc), ([abc], twelve), ([], abc)):
        state.mask_words(path)
        assert state.commit(token)
        state.mask_words([abc])
    assert len(copies) == 1
    state.mask_words([abc, a, a])  # in error from now on
    assert state.commit(abc)
    state.mask_words([abc])
    assert len(copies) == 2


@pytest.mark.parametrize("regex", ["abc", "abc+"])
def test_looking_past_the_end_leaves_no_trace(compiler: GrammarCompiler, tokenizer: Tokenizer, regex: str) -> None:
    """A draft may go on where nothing may follow, and it may go wrong."""
    word, vocab_size = token_id(tokenizer, "abc"), tokenizer.get_vocab_size()
    state, plain = compiler.compile(common_pb2.Grammar(regex=regex)), compiler.compile(common_pb2.Grammar(regex=regex))
    tree = TokenTree.chain(np.array([word, EOS, EOS, word], np.int32))
    pruned(tree, state)
    for path in ([word], [word, EOS], [word, EOS, EOS], [word, EOS, word], [EOS], [word], []):
        state.forbid(np.zeros(vocab_size, np.float32), path)
        state.mask_words(path)
        assert state.dead_end() is None
    assert allowed_after(state, [], vocab_size) == allowed_after(plain, [], vocab_size)
    assert state.commit(word)
    assert plain.commit(word)
    assert allowed_after(state, [], vocab_size) == allowed_after(plain, [], vocab_size)
    assert state.is_complete == plain.is_complete == (regex == "abc")
    assert state.dead_end() is None


@pytest.mark.parametrize(
    "grammar",
    [
        common_pb2.Grammar(),
        common_pb2.Grammar(json_schema="{"),
        common_pb2.Grammar(json_schema="[1]"),
        common_pb2.Grammar(json_schema='{"type": "shape"}'),
        common_pb2.Grammar(json_schema='{"enum": []}'),
        common_pb2.Grammar(json_schema='{"$ref": "#"}'),
        common_pb2.Grammar(regex="[^\\s\\S]"),
        common_pb2.Grammar(json_schema='{"$ref": "http://example.com/schema"}'),
        common_pb2.Grammar(json_schema=json.dumps({"description": "x" * MAX_GRAMMAR_BYTES})),
        common_pb2.Grammar(json_schema="[" * 30_000),
        common_pb2.Grammar(json_schema="false"),
        common_pb2.Grammar(regex="("),
        common_pb2.Grammar(ebnf="root ::= missing"),
    ],
    ids=str,
)
def test_bad_grammars_are_refused(compiler: GrammarCompiler, grammar: common_pb2.Grammar) -> None:
    with pytest.raises(InvalidArgument) as refused:
        compiler.compile(grammar)
    assert refused.value.field == "sampling.grammar"


@pytest.mark.parametrize("text", ["<end>", "a<end>", "<end>ab<end>1"])
def test_names_of_control_tokens_are_text(compiler: GrammarCompiler, tokenizer: Tokenizer, text: str) -> None:
    state = compiler.compile(common_pb2.Grammar(json_schema=json.dumps({"enum": [text]})))
    output: list[int] = []
    while not state.is_complete:
        (token, *_) = sorted(allowed_after(state, [], tokenizer.get_vocab_size()))
        assert state.commit(token)
        output.append(token)
    assert EOS not in output
    assert json.loads(tokenizer.decode(output)) == text
    assert state.dead_end() is None


@pytest.mark.parametrize("special", [(), ("<end>",)])
def test_added_tokens_that_are_not_control_tokens_stand_in_text(
    tokenizer: Tokenizer, tmp_path: Path, special: tuple[str, ...]
) -> None:
    made = Tokenizer.from_str(tokenizer.to_str())
    made.add_tokens([AddedToken("<think>", special=False)])
    source = json.loads(made.to_str())
    source["added_tokens"] = [t for t in source["added_tokens"] if t["content"] in ("<think>", *special)]
    (tmp_path / "tokenizer.json").write_text(json.dumps(source))
    eos = (EOS,) if special else ()
    state = GrammarCompiler(tmp_path, vocab_size=made.get_vocab_size(), eos_token_ids=eos).compile(
        common_pb2.Grammar(regex="<think>ab")
    )
    for token in (token_id(made, "<think>"), token_id(made, "ab")):
        assert token in allowed_after(state, [], made.get_vocab_size())
        assert state.commit(token)
    assert allowed_after(state, [], made.get_vocab_size()) <= {EOS}


@pytest.mark.parametrize("source", ['root ::= "zebra"', "start: ALL\nALL: /zebra/ " + "& /z.*/" * 9])
def test_added_tokens_that_the_model_has_no_embedding_of_are_text(
    tokenizer: Tokenizer, tmp_path: Path, source: str
) -> None:
    made, size = Tokenizer.from_str(tokenizer.to_str()), tokenizer.get_vocab_size()
    made.add_tokens([AddedToken("zebra", special=False), AddedToken("<pad>", special=True)])
    made.save(str(tmp_path / "tokenizer.json"))
    compiler = GrammarCompiler(tmp_path, vocab_size=size, eos_token_ids=(EOS,))
    state = compiler.compile(common_pb2.Grammar(ebnf=source))
    for letter in "zebra":
        assert state.commit(token_id(tokenizer, letter))
    assert allowed_after(state, [], size) <= {EOS}
    with pytest.raises(InvalidArgument, match="<pad>"):
        compiler.compile(common_pb2.Grammar(ebnf="start: <pad>"))


def test_a_tokenizer_that_no_grammar_can_have_is_no_fault_of_the_grammar(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    few = GrammarCompiler(tmp_path, vocab_size=tokenizer.get_vocab_size() - 1, eos_token_ids=(EOS,))
    with pytest.raises(Unimplemented, match=r"this model's tokenizer\.json: vocab size too small"):
        few.compile(common_pb2.Grammar(json_object=True))


@pytest.mark.asyncio
async def test_a_failure_that_nobody_waits_for_any_more_is_no_error_of_the_loop(tmp_path: Path) -> None:
    compiler = GrammarCompiler(tmp_path, vocab_size=9, eos_token_ids=(EOS,))  # there is no tokenizer.json
    complaints: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context["message"]))
    tasks = [asyncio.create_task(compiler.settle(common_pb2.Grammar(regex="a+"))) for _ in range(2)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    with pytest.raises(Unimplemented):
        await tasks[1]
    await asyncio.gather(tasks[0], return_exceptions=True)
    gc.collect()
    await asyncio.sleep(0)
    assert complaints == []


def test_a_schema_that_can_only_go_deeper_is_found_out_on_the_way(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    endless = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    state = compiler.compile(common_pb2.Grammar(json_schema=json.dumps(endless)))
    to_the_end(state, tokenizer.get_vocab_size())
    assert state.is_complete
    found = state.dead_end()
    assert found is not None
    assert (found.field, found.code) == ("sampling.grammar", "invalid_json_schema")


def test_what_is_too_large_is_said_to_be(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidArgument, match=r"sampling\.grammar\.ebnf: it is nested too deeply"):
        compiler.compile(common_pb2.Grammar(ebnf="root ::= " + "(" * 3000 + '"a"' + ")" * 3000))
    with pytest.raises(InvalidArgument, match="it has 65537 bytes; at most 65536") as refused:
        compiler.compile(common_pb2.Grammar(regex="a" * 65_537))
    assert refused.value.code == "invalid_grammar"
    state = compiler.compile(common_pb2.Grammar(regex="(a{1000}){1000}"))
    to_the_end(state, tokenizer.get_vocab_size())
    found = state.dead_end()
    assert found is not None
    assert "cannot go on: lexer error: too many expressions" in found.message


def conjunction(count: int) -> str:
    """A schema whose patterns take twice as long for each one more."""
    source = json.dumps({"allOf": [{"type": "string", "pattern": f"^.*a.{{{gap}}}b.*$"} for gap in range(count)]})
    return source.replace('"pattern"', '"\\u0070attern"') if count % 2 else source


@pytest.mark.parametrize(
    "grammar",
    [
        common_pb2.Grammar(json_schema=conjunction(40)),
        common_pb2.Grammar(json_schema=conjunction(41)),
        common_pb2.Grammar(ebnf="start: ALL\nALL: " + " & ".join(f"/.*a.{{{gap}}}b.*/" for gap in range(40))),
        common_pb2.Grammar(ebnf=f"start: %json {conjunction(40)}"),
        common_pb2.Grammar(ebnf="start: ALL | <[5]>\nALL: " + " & ".join(f"/.*a.{{{gap}}}b.*/" for gap in range(40))),
        common_pb2.Grammar(ebnf="start: ALL | <end>\nALL: " + " & ".join(f"/.*a.{{{gap}}}b.*/" for gap in range(40))),
    ],
)
def test_what_would_take_for_ever_is_refused_and_nobody_waits_for_it(
    compiler: GrammarCompiler, grammar: common_pb2.Grammar, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go_on = threading.Event(), threading.Event()
    ends = grammar_trial.ends

    def watched(*asked: Any) -> bool:
        began.set()
        go_on.wait()
        return ends(*asked)

    monkeypatch.setattr(grammar_trial, "ends", watched)
    with ThreadPoolExecutor(1) as pool:
        trial = pool.submit(compiler.compile, grammar)
        began.wait()
        compiler.compile(common_pb2.Grammar(regex="while[a-z]*"))
        go_on.set()
        error = trial.exception()
    assert isinstance(error, InvalidArgument)
    assert "takes too long to work out" in error.message
    monkeypatch.setattr(grammar_trial, "ends", pytest.fail)
    with pytest.raises(InvalidArgument, match="takes too long"):
        compiler.compile(grammar)


@pytest.mark.asyncio
async def test_who_waits_for_the_same_grammar_holds_no_thread(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, go_on, tried = asyncio.get_running_loop(), threading.Event(), list[str]()
    loop.set_default_executor(ThreadPoolExecutor(2))
    monkeypatch.setattr(grammar_trial, "ends", lambda grammar, *_: tried.append(grammar) or go_on.wait())
    shared = common_pb2.Grammar(regex="d" + "&" * 9)
    equals = [asyncio.create_task(compiler.settle(shared)) for _ in range(5)]
    await compiler.settle(common_pb2.Grammar(regex="e+"))
    equals[0].cancel()  # the one that had it compiled
    equals[1].cancel()
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.gather(*equals[2:])
    assert compiler.compile(shared).dead_end() is None
    assert len(tried) == 1


@pytest.mark.asyncio
async def test_what_nobody_waits_for_any_more_is_not_compiled(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, tried = threading.Event(), list[str]()
    monkeypatch.setattr(grammar_trial, "ends", lambda grammar, *_: tried.append(grammar) or go_on.wait())
    fresh = GrammarCompiler(compiler._tokenizer_path.parent, vocab_size=compiler._vocab_size, eos_token_ids=(EOS,))
    sources = [common_pb2.Grammar(regex="i" + "&" * (9 + n)) for n in (0, 1, 1, 2, 2)]
    begun, wanted, left, *forgotten = (asyncio.create_task(fresh.settle(source)) for source in sources)
    await asyncio.sleep(0)
    dropped = fresh._kept["regex", sources[-1].regex]
    for task in (left, *forgotten):
        task.cancel()
    await asyncio.gather(left, *forgotten, return_exceptions=True)
    assert fresh._num_trials() == 2
    assert dropped.source == ("", "")  # whose text may be long
    go_on.set()
    await asyncio.gather(begun, wanted)
    assert (len(tried), len(fresh._kept)) == (2, 2)


@pytest.mark.asyncio
async def test_grammars_have_threads_of_their_own_and_the_queue_ends_with_the_process(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, began, go_on = asyncio.get_running_loop(), threading.Event(), threading.Event()
    loop.set_default_executor(ThreadPoolExecutor(1))
    busy = loop.run_in_executor(None, go_on.wait)
    fresh = GrammarCompiler(compiler._tokenizer_path.parent, vocab_size=compiler._vocab_size, eos_token_ids=(EOS,))
    await fresh.settle(common_pb2.Grammar(regex="j+"))
    monkeypatch.setattr(grammar_trial, "ends", lambda *_: began.set() or go_on.wait())
    sources = [common_pb2.Grammar(regex="j" + "&" * (9 + n)) for n in range(2)]
    begun, queued = (asyncio.create_task(fresh.settle(source)) for source in sources)
    await asyncio.sleep(0)
    began.wait()
    fresh.close()
    with pytest.raises(asyncio.CancelledError):
        await queued
    go_on.set()
    await asyncio.gather(begun, busy)


@pytest.mark.asyncio
async def test_more_grammars_than_are_kept_are_compiled_once_each_by_few_threads(compiler: GrammarCompiler) -> None:
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(2))
    fresh = GrammarCompiler(compiler._tokenizer_path.parent, vocab_size=compiler._vocab_size, eos_token_ids=(EOS,))
    factory = SessionFactory(toy_config(compiler._vocab_size, 20), RequestBounds(20, 1, 1), fresh)

    def ask(regex: str) -> asyncio.Task[list[Session]]:
        sampling = common_pb2.SamplingParams(grammar=common_pb2.Grammar(regex=regex))
        request = verify_pb2.GenerateRequest(prompt_tokens=pack_ids([1]), sampling=sampling)
        return asyncio.create_task(factory.build_with_grammar(request))

    first = asyncio.create_task(fresh.settle(common_pb2.Grammar(regex="g+")))
    regexes = ["g+", "g+", *(f"g{n}+" for n in range(MAX_CACHED + 9))]
    asked = [ask(regex) for regex in regexes]
    await first
    asked.append(ask("g+"))  # behind two that have it, and many that do not
    await asyncio.gather(*asked)
    await loop.shutdown_default_executor()
    assert fresh.totals.compiled == len(set(regexes))
    assert len(fresh._kept) == MAX_CACHED


def test_trials_are_bounded_shared_and_no_matter_to_patterns_that_do_not_meet(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart = {"type": "object", "properties": {f"p{n}": {"type": "string", "pattern": f"^a{n}$"} for n in range(30)}}
    assert compiler.compile(common_pb2.Grammar(json_schema=json.dumps(apart))).dead_end() is None
    go_on, tried = threading.Event(), list[str]()
    monkeypatch.setattr(grammar_trial, "ends", lambda grammar, *_: tried.append(grammar) or go_on.wait())
    sources = [common_pb2.Grammar(regex="a" + "&" * (9 + n)) for n in range(MAX_TRIALS)]
    with ThreadPoolExecutor(3 * MAX_TRIALS) as pool:
        trials = [pool.submit(compiler.compile, source) for source in 3 * sources]
        while compiler._num_trials() < MAX_TRIALS:
            time.sleep(0)
        with pytest.raises(ResourceExhausted, match="try again later"):
            compiler.compile(common_pb2.Grammar(regex="b" + "&" * 9))
        go_on.set()
        assert all(trial.exception() is None for trial in trials)
    assert len(tried) == MAX_TRIALS
    assert compiler.compile(common_pb2.Grammar(regex="b" + "&" * 9)).dead_end() is None


def test_a_trial_that_cannot_be_made_is_no_fault_of_the_grammar(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = common_pb2.Grammar(regex="c" + "&" * 9)
    with monkeypatch.context() as patched:
        patched.setattr("sys.executable", "/bin/false")
        with pytest.raises(Internal, match="cannot be tried"):
            compiler.compile(many)
    with monkeypatch.context() as patched:
        patched.setattr("subprocess.run", Mock(side_effect=BlockingIOError(errno.EAGAIN, "too many processes")))
        with pytest.raises(ResourceExhausted, match=r"no process can be started .*: too many processes"):
            compiler.compile(many)
    assert compiler.compile(many).dead_end() is None


def test_a_schema_may_be_true(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    state = compiler.compile(common_pb2.Grammar(json_schema="true"))
    texts = {tokenizer.decode([token])[:1] for token in allowed_after(state, [], tokenizer.get_vocab_size())}
    assert {"{", "[", '"', "t", "1"} <= texts


def test_ebnf(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    state = compiler.compile(common_pb2.Grammar(ebnf='root ::= "a" rest\nrest ::= "b" | "c"'))
    texts = {tokenizer.decode([token]) for token in allowed_after(state, [], tokenizer.get_vocab_size())}
    assert texts == {"a", "ab"}


def test_rows_beyond_the_tokenizer_are_forbidden(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    state = compiler.compile(common_pb2.Grammar(regex="a"))
    row = np.zeros(tokenizer.get_vocab_size() + 64, np.float32)
    state.forbid(row, [])
    assert (row[tokenizer.get_vocab_size() :] == -math.inf).all()


@pytest.mark.asyncio
async def test_grammars_are_counted(compiler: GrammarCompiler) -> None:
    fresh = GrammarCompiler(compiler._tokenizer_path.parent, vocab_size=compiler._vocab_size, eos_token_ids=(EOS,))
    for source in ("ab+", "ab+", "a(", "ab*"):
        await fresh.settle(common_pb2.Grammar(regex=source))
        with contextlib.suppress(InvalidArgument):
            fresh.compile(common_pb2.Grammar(regex=source))
    counted = fresh.totals
    assert (counted.compiled, counted.cache_hits, counted.refused) == (2, 1, 1)
    assert sum(counted.compile_s.counts) == 3


def test_where_only_what_a_request_forbids_may_follow_is_no_fault_of_the_model(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    state = compiler.compile(common_pb2.Grammar(regex="ab?"))
    assert state.leaves_only({EOS}) is None
    assert state.commit(token_id(tokenizer, "a"))
    assert state.leaves_only({EOS}) is None
    found = state.leaves_only({EOS, token_id(tokenizer, "b")})
    assert found is not None
    assert (found.field, found.code) == ("sampling.grammar", "invalid_grammar")
    assert "min_tokens forbids" in found.message
    assert state.commit(token_id(tokenizer, "b"))
    assert state.leaves_only({EOS}) is not None


def test_false_is_no_kind_of_json_object(compiler: GrammarCompiler) -> None:
    with pytest.raises(InvalidArgument, match="json_object is false"):
        compiler.compile(common_pb2.Grammar(json_object=False))


@pytest.mark.parametrize(
    "grammar",
    [
        common_pb2.Grammar(json_schema='{"type": "integer", "multipleOf": 123456789}'),
        common_pb2.Grammar(json_schema='{"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}'),
        common_pb2.Grammar(ebnf='start: %json {"type": "number", "multipleOf": 2147483648}'),
    ],
)
def test_multiples_that_would_take_minutes_are_refused(compiler: GrammarCompiler, grammar: common_pb2.Grammar) -> None:
    with pytest.raises(InvalidArgument, match="multipleOf have more than 10000 for a common multiple"):
        compiler.compile(grammar)


@pytest.mark.parametrize(
    "source",
    [
        {"const": -(2**63)},
        {"enum": [1, -(2**63) + 1]},
        {"type": "integer", "minimum": -1e300, "maximum": -1e19},
        {"allOf": [{"type": "integer", "minimum": -(2**64)}, {"maximum": -(2**63)}]},
    ],
)
@pytest.mark.parametrize("kind", ["json_schema", "ebnf"])
def test_numbers_that_would_end_the_process_are_refused(
    compiler: GrammarCompiler, source: dict[str, Any], kind: str
) -> None:
    text = json.dumps(source)
    asked = common_pb2.Grammar(json_schema=text)
    if kind == "ebnf":
        asked = common_pb2.Grammar(ebnf=f"start: %json {text}")
    with pytest.raises(InvalidArgument, match="a number is too far below 0"):
        compiler.compile(asked)


def test_numbers_far_below_0_may_do(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    state = compiler.compile(common_pb2.Grammar(json_schema='{"minimum": -1e17, "enum": [-1000000000000000001, 2]}'))
    assert token_id(tokenizer, "2") in allowed_after(state, [], tokenizer.get_vocab_size())


def test_small_numbers_below_0_need_no_trial() -> None:
    for small in ("-1e-6", "-0.5E-300", "-12"):
        assert not grammar_trial.is_needed(f'{{"minimum": {small}}}')
    for far in ("-1e19", "-1.5E+30", "-9223372036854775808"):
        assert grammar_trial.is_needed(f'{{"minimum": {far}}}')
