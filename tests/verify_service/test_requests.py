"""Each thing that can be wrong with a request is refused by name, with the value and the limit, before any work."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from outrider.errors import InvalidArgument, OutriderError, Unimplemented
from outrider.tree import TokenTree
from outrider.v1 import common_pb2, verify_pb2
from outrider.wire import MAX_MESSAGE_BYTES, pack_ids
from tests.fakes import toy_config
from tests.verify_service.rig import MAX_CHOICES, MAX_NODES, build_factory
from verify_service.requests import SessionFactory

VOCAB, CONTEXT = 32, 20
EOS = 31


def factory() -> SessionFactory:
    return build_factory(toy_config(VOCAB, CONTEXT, (EOS,)))


def make(**fields: Any) -> verify_pb2.GenerateRequest:
    return verify_pb2.GenerateRequest(**{"prompt_tokens": pack_ids([1, 2, 3]), **fields})


def sampling(**fields: Any) -> verify_pb2.GenerateRequest:
    return make(sampling=common_pb2.SamplingParams(**fields))


def speculative(**fields: Any) -> verify_pb2.GenerateRequest:
    return make(speculative=common_pb2.SpeculativeParams(**fields))


BAD: list[tuple[verify_pb2.GenerateRequest, str, str]] = [
    (make(prompt_tokens=b""), "prompt_tokens", "prompt_tokens is empty"),
    (make(prompt_tokens=b"abc"), "prompt_tokens", "3 bytes are no whole number of int32"),
    (make(prompt_tokens=pack_ids([1, 32])), "prompt_tokens", r"prompt_tokens\[1\] is 32; token ids are from 0 to 31"),
    (make(prompt_tokens=pack_ids([-1])), "prompt_tokens", r"prompt_tokens\[0\] is -1"),
    (make(prompt_tokens=struct.pack("<i", 2**31 - 1)), "prompt_tokens", "2147483647"),
    (make(prompt_tokens=pack_ids([1] * 20)), "prompt_tokens", "the prompt has 20 tokens; the context holds 20"),
    (make(prompt_tokens=pack_ids([1] * 21)), "prompt_tokens", "prompt_tokens has 21 tokens; the context holds 20"),
    (make(resumed_tokens=b"ab"), "resumed_tokens", "2 bytes"),
    (make(resumed_tokens=pack_ids([99])), "resumed_tokens", r"resumed_tokens\[0\] is 99"),
    (make(resumed_tokens=pack_ids([1] * 18)), "resumed_tokens", "resumed_tokens has 18 tokens.* leave 17"),
    (make(resumed_tokens=pack_ids([1]), num_choices=2), "resumed_tokens", "needs num_choices = 1"),
    (make(prediction_tokens=b"a"), "prediction_tokens", "1 bytes"),
    (make(prediction_tokens=pack_ids([40])), "prediction_tokens", "is 40"),
    (make(num_choices=0), "num_choices", f"num_choices is 0; it must be from 1 to {MAX_CHOICES}"),
    (make(num_choices=MAX_CHOICES + 1), "num_choices", f"num_choices is {MAX_CHOICES + 1}"),
    (make(num_choices=2**32 - 1), "num_choices", "num_choices is 4294967295"),
    (make(first_choice_index=2**32 - 1), "first_choice_index", "4294967295"),
    (
        make(first_choice_index=2**31 - 1, num_choices=3),
        "first_choice_index",
        "num_choices 3 it must be at most 2147483644",
    ),
    (make(request_id="x" * 257), "request_id", "request_id has 257 characters; it must have at most 256"),
    (make(corpus_scope="x" * 257), "corpus_scope", "corpus_scope has 257 characters; it must have at most 256"),
    (make(cache_salt="x" * 257), "cache_salt", "cache_salt has 257 characters; it must have at most 256"),
    (make(logprobs=True, top_logprobs=21), "top_logprobs", "top_logprobs is 21; it must be from 0 to 20"),
    (make(top_logprobs=3), "top_logprobs", "needs logprobs"),
    (sampling(temperature=math.nan), "temperature", "nan"),
    (sampling(temperature=math.inf), "temperature", "inf"),
    (sampling(temperature=-0.5), "temperature", "-0.5; it must be from 0.0"),
    (sampling(top_k=2**31), "top_k", "2147483648"),
    (sampling(top_p=0.0), "top_p", "above 0.0 to 1.0"),
    (sampling(top_p=1.5), "top_p", "1.5"),
    (sampling(min_p=-0.1), "min_p", "from 0.0 to 1.0"),
    (sampling(max_tokens=0), "max_tokens", "max_tokens is 0; it must be from 1"),
    (sampling(min_tokens=2**32 - 1), "min_tokens", "4294967295"),
    (sampling(min_tokens=2**31), "min_tokens", "2147483648"),
    (sampling(stop_token_ids=[32]), "stop_token_ids", "token id 32 is not from 0 to 31"),
    (sampling(stop_token_ids=range(65)), "stop_token_ids", "65"),
    (sampling(presence_penalty=2.5), "presence_penalty", "2.5"),
    (sampling(frequency_penalty=-math.inf), "frequency_penalty", "-inf"),
    (sampling(repetition_penalty=0.0), "repetition_penalty", "0.0; it must be from 1e-30 to 2.0"),
    (sampling(repetition_penalty=1e-40), "repetition_penalty", "from 1e-30 to 2.0"),
    (sampling(logit_bias={32: 1.0}), "logit_bias", "token id 32"),
    (sampling(logit_bias={1: 101.0}), r"logit_bias[1]", "101.0; it must be from -100.0 to 100.0"),
    (sampling(logit_bias={1: math.nan}), r"logit_bias[1]", "nan"),
    (sampling(grammar=common_pb2.Grammar()), "sampling.grammar", "no kind"),
    (sampling(grammar=common_pb2.Grammar(regex="a" * 70_000)), "sampling.grammar", "at most 65536"),
    (speculative(algorithm=99), "speculative.algorithm", "algorithm is 99; known are .*NGRAM"),
    (speculative(num_steps=0), "speculative.num_steps", "num_steps is 0; it must be from 1 to 4096"),
    (speculative(topk=0), "speculative.topk", "topk is 0"),
    (speculative(num_draft_tokens=1), "speculative.num_draft_tokens", "1; it must be from 2 to"),
    (speculative(num_draft_tokens=4097), "speculative.num_draft_tokens", "4097; it must be from 2 to 4096"),
    (speculative(accept_threshold_single=1.1), "speculative.accept_threshold_single", "from 0 to 1"),
    (speculative(accept_threshold_acc=0.0), "speculative.accept_threshold_acc", "0.0; it must be above 0"),
    (speculative(accept_threshold_acc=math.nan), "speculative.accept_threshold_acc", "nan"),
]


@pytest.mark.parametrize(
    ("request_", "field", "message"), BAD, ids=[f"{field}-{i}" for i, (_, field, _) in enumerate(BAD)]
)
def test_a_bad_field_is_named_with_its_value_and_its_limit(
    request_: verify_pb2.GenerateRequest, field: str, message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message) as caught:
        factory().build(request_)
    assert caught.value.field == field


@pytest.mark.parametrize("length", [20, 21, 500])
def test_a_prompt_over_the_context_has_a_code_of_its_own(length: int) -> None:
    with pytest.raises(InvalidArgument) as caught:
        factory().build(make(prompt_tokens=pack_ids([1] * length)))
    assert caught.value.code == "context_length_exceeded"
    assert str(length) in caught.value.message
    assert str(CONTEXT) in caught.value.message


@pytest.mark.parametrize("length", [19, 20, 21, 500])
def test_a_prediction_is_cut_at_the_context(length: int) -> None:
    (session,) = factory().build(make(prediction_tokens=pack_ids([1] * length)))
    assert session.prediction == pack_ids([1] * min(length, CONTEXT))


def test_a_grammar_without_a_tokenizer_is_not_offered() -> None:
    with pytest.raises(Unimplemented, match=r"tokenizer\.json") as caught:
        factory().build(sampling(grammar=common_pb2.Grammar(json_object=True)))
    assert isinstance(caught.value, OutriderError)


def test_drafters_are_told_what_is_asked_of_speculation_and_nothing_else() -> None:
    asked = common_pb2.SpeculativeParams(topk=2)
    asked.MergeFromString(b"\xba\x3e\x03abc")  # a field of a later version, or of somebody who wants it carried around
    (session,) = factory().build(make(speculative=asked))
    assert session.speculation.wire.SerializeToString() == common_pb2.SpeculativeParams(topk=2).SerializeToString()


def test_a_tree_larger_than_is_verified_here_is_wished_for_as_large_as_is() -> None:
    (session,) = factory().build(speculative(num_steps=4096, topk=3, num_draft_tokens=MAX_NODES + 2))
    assert session.speculation.num_draft_tokens == MAX_NODES + 1
    wire = session.speculation.wire
    assert (wire.num_steps, wire.topk, wire.num_draft_tokens) == (MAX_NODES + 1, 3, MAX_NODES + 1)


def test_a_prompt_may_be_too_long_for_its_logprobs() -> None:
    endless = build_factory(toy_config(VOCAB, 2**23, (EOS,)))
    long = make(prompt_tokens=pack_ids([1] * 2**22), prompt_logprobs=True)
    with pytest.raises(InvalidArgument, match=r"prompt_logprobs of \d+ tokens are more than an answer holds") as e:
        endless.build(long)
    assert e.value.field == "prompt_logprobs"


def test_logprobs_of_a_prompt_fit_one_message() -> None:
    roomy = build_factory(toy_config(VOCAB, 60_000, (EOS,)))
    asked = {"prompt_tokens": pack_ids([1] * 50_000), "prompt_logprobs": True}
    with pytest.raises(
        InvalidArgument, match="top_logprobs is 20; with prompt_logprobs of 50000 tokens it must be"
    ) as e:
        roomy.build(make(**asked, top_logprobs=20))
    assert e.value.field == "top_logprobs"
    most = int(e.value.message.split()[-1])
    roomy.build(make(**asked, top_logprobs=most))
    alternatives = [verify_pb2.TopLogprob(token=2**28 - 1, logprob=-1.0)] * most
    one = verify_pb2.TokenLogprob(token=2**28 - 1, logprob=-1.0, top=alternatives)
    answer = verify_pb2.GenerateResponse(prompt_logprobs=[one] * 50_000)
    assert answer.ByteSize() <= MAX_MESSAGE_BYTES - 2**20
    roomy.build(make(prompt_tokens=pack_ids([1] * 50_000), logprobs=True, top_logprobs=20))


def test_choices_differ_in_index_and_session_and_share_seed_and_prompt() -> None:
    sessions = factory().build(make(num_choices=3, first_choice_index=5))
    assert [session.choice_index for session in sessions] == [5, 6, 7]
    assert len({session.session_id for session in sessions}) == 3
    assert len({session.seed for session in sessions}) == 1
    assert [session.shares_prefix_with for session in sessions] == [None, *[sessions[0].session_id] * 2]
    sessions[0].commit([7])
    assert [session.committed.tolist() for session in sessions] == [[1, 2, 3, 7], [1, 2, 3], [1, 2, 3]]


@pytest.mark.parametrize("penalty", ["presence_penalty", "repetition_penalty", "min_tokens"])
def test_choices_have_histories_and_draws_of_their_own(penalty: str) -> None:
    params = common_pb2.SamplingParams(**{penalty: 2, "seed": 5, "temperature": 1.0, "stop_token_ids": [4]})
    for choice, session in enumerate(factory().build(make(sampling=params, num_choices=3))):
        (alone,) = factory().build(make(sampling=params, first_choice_index=choice))
        for _ in range(4):
            bonuses = [
                one.sampler.accept(np.zeros((1, VOCAB), np.float32), TokenTree.empty(), one.output_len).bonus
                for one in (session, alone)
            ]
            assert bonuses[0] == bonuses[1]
            for one in (session, alone):
                one.sampler.commit(one.commit(bonuses[:1]))


def test_without_a_seed_one_is_drawn_and_no_two_requests_share_it() -> None:
    maker = factory()
    seeds = {maker.build(make())[0].seed for _ in range(20)}
    assert len(seeds) == 20
    assert maker.build(sampling(seed=2**64 - 1))[0].seed == 2**64 - 1


def test_the_context_bounds_the_output_however_much_is_asked_for() -> None:
    (session,) = factory().build(sampling(max_tokens=2**32 - 1))
    assert session.max_len == CONTEXT
    assert len(session.tokens) == CONTEXT
    assert factory().build(sampling(max_tokens=4))[0].max_len == 7
    assert factory().build(make())[0].max_len == CONTEXT


def test_stop_ids_are_the_requests_and_the_models_unless_these_are_ignored() -> None:
    assert factory().build(sampling(stop_token_ids=[3]))[0].stop_ids == {3, EOS}
    assert factory().build(sampling(stop_token_ids=[3], ignore_eos=True))[0].stop_ids == {3}


def test_resumed_tokens_count_as_output() -> None:
    (session,) = factory().build(
        make(resumed_tokens=pack_ids([9, 8]), sampling=common_pb2.SamplingParams(max_tokens=2))
    )
    assert (session.output_len, session.resumed_len, session.remaining) == (2, 2, 0)
    assert session.committed.tolist() == [1, 2, 3, 9, 8]


def test_thresholds_of_requests_that_name_none_are_the_flags() -> None:
    made = factory()
    made._bounds = replace(made._bounds, accept_thresholds=(0.5, 0.0))
    requests = make(), speculative(accept_threshold_acc=0.75)
    told = [session.speculation for each in requests for session in made.build(each)]
    assert [(one.accept_threshold_single, one.accept_threshold_acc) for one in told] == [(0.5, 0.0), (0.5, 0.75)]
