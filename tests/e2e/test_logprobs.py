"""Log-probabilities with speculation are those of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.v1 import common_pb2, verify_pb2
from outrider.wire import pack_ids
from tests.e2e.pair import drafter_of, running
from tests.engine.tiny import save_model

PROMPT = [5, 9, 33, 2, 60, 61, 7]
NUM_TOKENS, TOP = 24, 5
TREE = {"speculative_num_steps": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["llama", "qwen3"])
async def test_they_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    """They agree for generated tokens, their likeliest alternatives, and the prompt."""
    model = save_model(name, tmp_path)
    drafter = drafter_of(tmp_path, "STANDALONE", speculative_draft_model_path=str(tmp_path), **TREE)
    request = verify_pb2.GenerateRequest(
        prompt_tokens=pack_ids(PROMPT),
        sampling=common_pb2.SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True),
        logprobs=True, top_logprobs=TOP, prompt_logprobs=True,
    )  # fmt: skip
    responses: list[verify_pb2.GenerateResponse] = []
    async with running(tmp_path) as pair, pair.drafting(drafter):
        for _ in range(20):  # on a busy machine all drafts of an answer may come too late
            responses = [response async for response in pair.stub.Generate(request)]
            if pair.loop.stats.accepted_tokens:
                break
        assert pair.loop.stats.accepted_tokens > 0
    tokens = [token for response in responses for token in response.tokens]
    found = [given for response in responses for given in response.logprobs]
    prompt = [given for response in responses for given in response.prompt_logprobs]
    text = PROMPT + tokens
    with torch.inference_mode():
        logprobs = model(torch.tensor([text])).logits[0].log_softmax(-1)
    assert len(tokens) == len(found) == NUM_TOKENS
    assert len(prompt) == len(PROMPT)
    assert not prompt[0].HasField("logprob")
    for pos, given in enumerate([*prompt[1:], *found], start=1):
        assert given.logprob == pytest.approx(float(logprobs[pos - 1, text[pos]]), abs=2e-4)
        best = logprobs[pos - 1].topk(TOP)
        assert [top.logprob for top in given.top] == pytest.approx(best.values.tolist(), abs=2e-4)
        assert [top.token for top in given.top] == best.indices.tolist()
