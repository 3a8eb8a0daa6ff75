"""The whole of `outrider serve` on the embedded model, as its users meet it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.reference import prompt_ids, questions
from tests.e2e.stack import Stack, serve
from tests.page.browser import Visit, chromium

PROMPT = "Write the numbers from one to thirty in words, one per line."
POOL_TOKENS = 1536
ATTEMPTS = 20  # to have drafts accepted, which may all come too late on a busy machine


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """A server in fp32, so that answers can be compared, with a pool that holds few sessions at once."""
    flags = (f"--max-total-tokens={POOL_TOKENS}", "--context-length=1024", "--max-running-requests=32")
    with serve("--dtype=float32", "--speculative-algorithm=NGRAM", "--disable-speculation-brake", *flags) as running:
        yield running


def _free_pages(stack: Stack) -> tuple[int, int]:
    state = stack.http.get("/get_server_info").json()["internal_states"][0]
    return state["free_pages"], state["total_pages"]


@pytest.mark.slow
def test_chat_through_the_openai_client(stack: Stack) -> None:
    model = stack.openai.models.list().data[0].id
    messages = [{"role": "user", "content": PROMPT}]
    whole = stack.openai.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=60)  # type: ignore[arg-type]
    accepted, chunks = 0, []
    for _ in range(ATTEMPTS):
        chunks = list(
            stack.openai.chat.completions.create(
                model=model, messages=messages, temperature=0, max_tokens=60, stream=True,  # type: ignore[arg-type]
                stream_options={"include_usage": True},
            )
        )  # fmt: skip
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.model_extra is not None
        accepted = chunks[-1].usage.model_extra["speculation"]["accepted_tokens"]
        if accepted:
            break
    assert accepted
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert streamed == whole.choices[0].message.content
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 60
    assert whole.usage.prompt_tokens == len(prompt_ids(PROMPT))
    speculation = chunks[-1].usage.model_extra["speculation"]
    assert speculation["accept_length"] > 1.0
    assert speculation["accepted_tokens"] + speculation["verify_steps"] == 60 - 1  # the first comes from prefill


@pytest.mark.slow
def test_the_playground_compares(stack: Stack) -> None:
    with chromium() as browser:
        visit = Visit(browser, stack.url)
        visit.page.set_default_timeout(120_000)
        visit.page.locator("[name=max_tokens]").fill("60")
        visit.ask(PROMPT, mode="compare")
        visit.page.locator(".note").wait_for()
        assert "Both answers are identical" in visit.page.locator(".note").inner_text()
        assert visit.page.locator(".answer .token.accepted").count() > 0
        assert visit.page.get_by_role("treeitem").count() > 1
        assert visit.problems == []


@pytest.mark.slow
def test_seeded_sampling_does_not_depend_on_speculation(stack: Stack) -> None:
    settings = (
        {"temperature": 0.8},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 1.2, "top_k": 40, "min_p": 0.02},
        {"temperature": 0.7, "frequency_penalty": 0.4, "presence_penalty": 0.2, "repetition_penalty": 1.1},
    )
    for seed, (text, sampling) in enumerate(zip(questions(4), settings, strict=True)):
        body = {**sampling, "max_new_tokens": 48, "sampling_seed": seed}
        plain = stack.generate(prompt_ids(text), speculate=False, **body)
        accepted = 0
        for _ in range(ATTEMPTS):  # once the trie has seen the answer
            drafted = stack.generate(prompt_ids(text), **body)
            assert drafted["output_ids"] == plain["output_ids"]
            accepted = drafted["meta_info"]["spec_accepted_drafts"]
            if accepted > 10:
                break
        assert accepted > 10


@pytest.mark.slow
def test_more_streams_than_the_pool_holds(stack: Stack) -> None:
    prompts = [prompt_ids(text) for text in questions(32)]
    lengths = [16 + 2 * index for index in range(32)]
    assert sum(map(len, prompts)) + sum(lengths) > 3 * POOL_TOKENS

    def ask(index: int, *, speculate: bool) -> list[int]:
        answer = stack.generate(prompts[index], speculate=speculate, temperature=0, max_new_tokens=lengths[index])
        return answer["output_ids"]

    with ThreadPoolExecutor(32) as pool:
        together = list(pool.map(lambda index: ask(index, speculate=True), range(32)))
    alone = [ask(index, speculate=False) for index in range(0, 32, 4)]
    assert together[::4] == alone
    assert all(len(ids) <= length for ids, length in zip(together, lengths, strict=True))
    free, total = _free_pages(stack)
    assert free == total == POOL_TOKENS


@pytest.mark.slow
def test_drafter_killed_mid_answer(stack: Stack) -> None:
    expected = stack.generate(prompt_ids(PROMPT), speculate=False, temperature=0, max_new_tokens=120)["output_ids"]
    body = {
        "input_ids": prompt_ids(PROMPT), "stream": True, "sampling_params": {"temperature": 0, "max_new_tokens": 120},
    }  # fmt: skip
    seen = len(stack.process.lines)
    with stack.http.stream("POST", "/generate", json=body) as response:
        events = (line for line in response.iter_lines() if line.startswith("data: {"))
        last = next(events)
        os.kill(stack.child("draft"), signal.SIGKILL)
        for event in events:
            last = event

    assert json.loads(last.removeprefix("data: "))["output_ids"] == expected
    stack.process.wait_for("draft serves", after=seen)
    accepted = 0
    for _ in range(ATTEMPTS):  # by the restarted drafter
        again = stack.generate(prompt_ids(PROMPT), temperature=0, max_new_tokens=120)
        assert again["output_ids"] == expected
        accepted = again["meta_info"].get("spec_accepted_drafts", 0)
        if accepted:
            break
    assert accepted


@pytest.mark.slow
def test_bad_requests_leave_others_alone(stack: Stack) -> None:
    expected = stack.generate(prompt_ids(PROMPT), speculate=False, temperature=0, max_new_tokens=100)["output_ids"]
    vocab_size = stack.http.get("/get_model_info").json()["vocab_size"]
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    bad: list[tuple[str, dict, int, str | None]] = [
        ("/v1/chat/completions", {"messages": []}, 400, "messages"),
        ("/v1/chat/completions", {**chat, "temperature": 3}, 400, "temperature"),
        ("/v1/chat/completions", {**chat, "temperature": -0.1}, 400, "temperature"),
        ("/v1/chat/completions", {**chat, "top_p": 1.5}, 400, "top_p"),
        ("/v1/chat/completions", {**chat, "max_tokens": 0}, 400, "max_tokens"),
        ("/v1/chat/completions", {**chat, "n": 10_000}, 400, "n"),
        ("/v1/chat/completions", {**chat, "stop": ["a"] * 9}, 400, "stop"),
        ("/v1/chat/completions", {**chat, "model": "nobody"}, 404, None),
        ("/v1/chat/completions", {**chat, "logit_bias": {str(vocab_size): 1}}, 400, "logit_bias"),
        ("/v1/completions", {"prompt": "x " * 5000}, 400, None),
        ("/generate", {"input_ids": [vocab_size]}, 400, None),
        ("/generate", {"input_ids": [-1]}, 400, None),
        ("/generate", {"input_ids": []}, 400, None),
    ]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(stack.generate, prompt_ids(PROMPT), temperature=0, max_new_tokens=100)
        for path, body, status, param in bad:
            response = stack.http.post(path, json=body)
            assert response.status_code == status, (path, body, response.text)
            error = response.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            if param is not None:
                assert error["param"] == param
        assert running.result()["output_ids"] == expected


@pytest.mark.slow
def test_hang_up_frees_pages(stack: Stack) -> None:
    body = {
        "input_ids": prompt_ids(PROMPT), "stream": True, "sampling_params": {"max_new_tokens": 900, "ignore_eos": True},
    }  # fmt: skip
    seen = len(stack.process.lines)
    with stack.http.stream("POST", "/generate", json=body) as response:
        next(response.iter_lines())
    stack.process.wait_for('"end": "cancelled"', after=seen)
    state: dict = {"num_running_reqs": 1}
    while state["num_running_reqs"]:
        state = stack.http.get("/get_server_info").json()["internal_states"][0]
    assert state["free_pages"] == state["total_pages"]
