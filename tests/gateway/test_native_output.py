"""SGLang's lists of log-probabilities, which its streams repeat: they grow, and are not made anew for every event."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from gateway.detokenizer import ByteDetokenizer
from gateway.native_output import Output, Scores
from gateway.text_stream import ChoiceText, OutputRules
from outrider.v1 import verify_pb2
from tests.gateway.allocations import bytes_per_step

PIECES: list[bytes | str] = [chr(ord("A") + index % 26) for index in range(1000)]
RULES = OutputRules(lambda: ByteDetokenizer(PIECES), (), pieces=True)


def scored(token: int) -> verify_pb2.TokenLogprob:
    """A token with one alternative."""
    top = [verify_pb2.TopLogprob(token=token + 1, logprob=-2)]
    return verify_pb2.TokenLogprob(token=token, logprob=-token / 8, top=top)


def output_of(scores: Scores, prompt: list[int], asked: Counter[int]) -> tuple[ChoiceText, Output]:
    """A choice, and its account in SGLang's words; `asked` counts how often each token's text is."""
    choice = ChoiceText(0, RULES)
    start = verify_pb2.GenerateStart()
    choice.feed(verify_pb2.GenerateResponse(start=start, prompt_logprobs=map(scored, prompt)))

    def piece_of(token: int) -> bytes:
        asked[token] += 1
        return b"%d" % token

    answer: Any = SimpleNamespace(choices=[choice], prompt_len=len(prompt))
    return choice, Output(answer, "id", scores, piece_of, 0.0, empty=False)


@pytest.mark.parametrize("num_top", [0, 1])
def test_each_token_is_written_once_however_often_it_is_sent(num_top: int) -> None:
    asked: Counter[int] = Counter()
    scores = Scores(wanted=True, prompt_from=1, num_top=num_top, with_text=True)
    choice, output = output_of(scores, [500, 510, 520], asked)
    for index in range(0, 40, 2):
        response = verify_pb2.GenerateResponse(tokens=[index], logprobs=[scored(index)])
        output.choices[0].add(choice.feed(response))
        meta = msgspec.json.decode(msgspec.json.encode(output.entry(0, running=True)))["meta_info"]
        tokens = range(0, index + 1, 2)
        assert meta["output_token_logprobs"] == [[-token / 8, token, str(token)] for token in tokens]
        assert meta["input_token_logprobs"] == [[-token / 8, token, str(token)] for token in (510, 520)]
        if num_top:
            assert meta["output_top_logprobs"] == [[[-2, token + 1, str(token + 1)]] for token in tokens]
            assert meta["input_top_logprobs"] == [[[-2, token + 1, str(token + 1)]] for token in (510, 520)]
        assert len(meta) == 8 + 2 * num_top
    assert len(asked) == 22 * (1 + num_top)
    assert set(asked.values()) == {1}


def test_an_event_does_not_write_the_prompt_again() -> None:
    scores = Scores(wanted=True, prompt_from=0, num_top=1, with_text=True)
    choice, output = output_of(scores, [5] * 20_000, Counter())
    output.choices[0].add(choice.feed(verify_pb2.GenerateResponse(tokens=[5], logprobs=[scored(5)])))
    output.entry(0)
    assert bytes_per_step([lambda: output.entry(0, running=True)] * 5) < 10_000
