from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import serve
from outrider.errors import StartupError
from tests.bench.openai_stand_in import StandIn, running
from tests.certificates import Authority


def measured(stand_in: StandIn, tmp_path: Path, *flags: str) -> dict:
    """The figures that `bench serve` writes about a stand-in."""
    output = tmp_path / "serve.json"
    with running(stand_in) as url:
        assert serve.main(["--url", url, "--output", str(output), *flags]) == 0
    return json.loads(output.read_text())


def test_counts_are_the_servers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stand_in = StandIn(chunks=(1, 3, 2), usage={"speculation": {"verify_steps": 2}})
    document = measured(stand_in, tmp_path, "--concurrency", "1,3", "--num-prompts", "4", "--max-tokens", "9")
    assert (document["schema"], document["model"], document["prompts"]) == (
        "outrider.bench.serve/1", "stand-in", "mt_bench",
    )  # fmt: skip
    one, three = document["loads"]
    assert (one["concurrency"], three["concurrency"]) == (1, 3)
    assert (one["num_requests"], one["prompt_tokens"], one["completion_tokens"]) == (4, 40, 24)
    assert one["accept_length"] == 2.5
    assert one["requests"][0]["num_chunks"] == 3
    assert one["inter_token_ms"]["p50"] == 0.0  # of five gaps three lie within an event
    assert "| 3 at once | 4 |" in capsys.readouterr().out


def test_text_may_hold_what_else_ends_lines(tmp_path: Path) -> None:
    (load,) = measured(StandIn(chunks=(1, 2), token="a\u2028\x85b"), tmp_path, "--num-prompts", "2")["loads"]
    assert (load["num_requests"], load["completion_tokens"]) == (2, 6)
    assert load["requests"][0]["num_chunks"] == 2


def test_no_proxy_stands_before_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert len(measured(StandIn(), tmp_path, "--num-prompts", "2")["loads"]) == 1


def test_certificates_are_checked_by_an_authority_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = Authority(tmp_path)
    with running(StandIn(), authority.issue("server", "127.0.0.1")) as url:
        words = ["--url", url, "--num-prompts", "1"]
        with pytest.raises(StartupError, match=f"^no server answers at {url}: .*certificate verify failed"):
            serve.main(words)
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.path))
        monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
        assert serve.main(words) == 0
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none"))
        with pytest.raises(StartupError, match="SSL_CERT_FILE"):
            serve.main(words)


@pytest.mark.parametrize("said_as", ["content", "reasoning", "reasoning_content"])
def test_reasoning_is_text(said_as: str, tmp_path: Path) -> None:
    (load,) = measured(StandIn(chunks=(1, 2), said_as=said_as), tmp_path, "--num-prompts", "1")["loads"]
    assert load["requests"][0]["num_chunks"] == 2


def test_what_is_asked(tmp_path: Path) -> None:
    stand_in = StandIn()
    flags = ["--num-prompts", "8", "--warm-up", "1", "--max-tokens", "7", "--ignore-eos"]
    document = measured(stand_in, tmp_path, *flags, "--extra-body", '{"speculative": {"enabled": false}}')
    warm_up, *asked = stand_in.bodies
    assert warm_up["max_tokens"] == 16
    assert len({json.dumps(body["messages"]) for body in asked}) == 8
    first = asked[0]
    assert {**first, "messages": None} == {
        "model": "stand-in", "messages": None, "max_tokens": 7, "temperature": 0.0, "stream": True,
        "stream_options": {"include_usage": True}, "ignore_eos": True, "speculative": {"enabled": False},
    }  # fmt: skip
    categories = {request["category"] for request in document["loads"][0]["requests"]}
    assert len(categories) == 8


def test_random_prompts_are_bare_tokens(tmp_path: Path) -> None:
    stand_in = StandIn(chunks=(1,))
    flags = ["--random-prompt-tokens", "50", "--num-prompts", "3", "--max-tokens", "1", "--warm-up", "0"]
    document = measured(stand_in, tmp_path, *flags)
    assert document["prompts"] == "random, 50 tokens"
    assert [len(body["prompt"]) for body in stand_in.bodies] == [50] * 3
    assert len({tuple(body["prompt"][:4]) for body in stand_in.bodies}) == 3


@pytest.mark.parametrize(("flags", "asks"), [([], "messages"), (["--random-prompt-tokens", "50"], "prompt")])
def test_a_server_is_warmed_up_by_what_is_asked_then(flags: list[str], asks: str, tmp_path: Path) -> None:
    stand_in = StandIn()
    measured(stand_in, tmp_path, "--num-prompts", "1", "--warm-up", "2", *flags)
    assert [(asks in body, body["max_tokens"]) for body in stand_in.bodies] == [(True, 16), (True, 16), (True, 128)]


def test_there_is_a_request_for_each_stream(tmp_path: Path) -> None:
    document = measured(StandIn(), tmp_path, "--concurrency", "2,8", "--num-prompts", "3")
    assert [load["num_requests"] for load in document["loads"]] == [3, 8]


def test_a_rate_and_a_file_of_prompts(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "one"}, {"turns": ["two", "more"]}, {"messages": [{"role": "user", "content": "three"}]}]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    stand_in = StandIn()
    flags = ["--prompts", str(prompts), "--request-rate", "1000", "--num-prompts", "4", "--warm-up", "0"]
    document = measured(stand_in, tmp_path, *flags)
    assert document["loads"][0]["request_rate"] == 1000
    assert sorted(body["messages"][0]["content"] for body in stand_in.bodies) == ["one", "one", "three", "two"]


def test_accept_length_from_llama_cpps_timings(tmp_path: Path) -> None:
    last = {"timings": {"predicted_n": 9, "draft_n": 10, "draft_n_accepted": 4}}
    document = measured(StandIn(chunks=(1, 4, 4), last=last), tmp_path, "--num-prompts", "1")
    assert document["loads"][0]["accept_length"] == 2.0


def test_accept_length_from_vllms_counters(tmp_path: Path) -> None:
    def text(drafts: int, accepted: int) -> str:
        return (
            f'vllm:spec_decode_num_drafts_total{{engine="0"}} {drafts}.0\n'
            f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {accepted}.0\n'
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} {accepted}.0\n'
        )

    document = measured(StandIn(metrics=[text(10, 10), text(20, 15)]), tmp_path, "--num-prompts", "1")
    assert document["loads"][0]["accept_length"] == 1.5


def test_accept_length_from_sglangs_info(tmp_path: Path) -> None:
    info = {"internal_states": [{"avg_spec_accept_length": 2.25}]}
    document = measured(StandIn(info=info), tmp_path, "--num-prompts", "1")
    assert document["loads"][0]["accept_length"] == 2.25


@pytest.mark.parametrize(
    "stand_in",
    [
        StandIn(info="<html>nothing here</html>"),
        StandIn(info={"internal_states": [{"avg_spec_accept_length": 10**400}]}),
        StandIn(metrics=["vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_drafts_total many"]),
        StandIn(usage={"speculation": {}}),
        StandIn(usage={"speculation": "much"}),
        StandIn(usage={"speculation": {"verify_steps": None}}),
        StandIn(last={"timings": {"draft_n_accepted": 3}}),
        StandIn(last={"timings": [3]}),
        StandIn(events=({"choices": [], "error": None, "usage": None},)),
    ],
)
def test_an_accept_length_of_no_known_shape_is_none(stand_in: StandIn, tmp_path: Path) -> None:
    (load,) = measured(stand_in, tmp_path, "--num-prompts", "1", "--warm-up", "0")["loads"]
    assert (load["accept_length"], load["completion_tokens"]) == (None, 4)


@pytest.mark.parametrize(
    ("stand_in", "says"),
    [
        (StandIn(status=429), "429"),
        (StandIn(events=({"choices": [None]},)), "choices are no objects"),
        (StandIn(events=({"choices": [{"delta": "a"}]},)), "delta is no object"),
        (StandIn(events=({"usage": [1]},)), "usage is no object"),
        (StandIn(events=({"error": {"message": "no room"}},)), "no room"),
        (StandIn(cut=True), "the stream broke off after 4 events with text$"),
        (StandIn(page=""), "the stream broke off after 0 events with text$"),
        (StandIn(page=": still there\n\n"), "the stream broke off after 0 events with text$"),
        (StandIn(page="<html>Sign\nin</html>"), "what came is no stream of events: <html>Sign in</html>$"),
        (StandIn(usage=None), "the stream ended without its usage$"),
        (StandIn(finish_reason="abort"), "gave an answer up, with finish_reason abort$"),
        (StandIn(finish_reason="error"), "gave an answer up, with finish_reason error$"),
        (StandIn(usage={"completion_tokens": None}), "completion_tokens None, which is no count"),
    ],
)
def test_a_failed_request_fails_the_run(stand_in: StandIn, says: str, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=says):
        measured(stand_in, tmp_path, "--concurrency", "2", "--warm-up", "0")


def test_loads_that_are_done_are_kept_when_it_is_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []

    def report(*given: Any) -> None:
        told(*given)
        written = json.loads((tmp_path / "serve.json").read_text())
        seen.append((len(written["loads"]), capsys.readouterr().out.count(" at once |")))
        if len(seen) == 2:
            raise KeyboardInterrupt

    told = serve.report
    monkeypatch.setattr(serve, "report", report)
    with pytest.raises(KeyboardInterrupt):
        measured(StandIn(), tmp_path, "--concurrency", "1,2,3", "--num-prompts", "3")
    assert seen == [(1, 1), (2, 1)]


@pytest.mark.parametrize("flags", [[], ["--model", "stand-in"]])
def test_a_key_that_is_missing_is_told_in_a_line(flags: list[str], tmp_path: Path) -> None:
    says = r"^http://\S+: /v1/\S+: HTTP 401: the server wants a key that it knows; --api-key gives one$"
    with pytest.raises(StartupError, match=says):
        measured(StandIn(status=401), tmp_path, *flags)


def test_no_server(tmp_path: Path) -> None:
    with running(StandIn()) as url:
        pass
    with pytest.raises(StartupError, match=f"^no server answers at {url}: Connection refused$"):
        serve.main(["--url", url])


def test_a_name_that_no_host_has() -> None:
    with pytest.raises(StartupError, match="is no URL"):
        serve.main(["--url", "http://\udcff"])


def test_a_picture(tmp_path: Path) -> None:
    measured(StandIn(), tmp_path, "--num-prompts", "1", "--plot", str(tmp_path / "serve.svg"))
    assert "<svg" in (tmp_path / "serve.svg").read_text()
    with pytest.raises(StartupError, match=r"\.png"):
        serve.main(["--plot", "picture.txt"])


@pytest.mark.parametrize(
    ("text", "says"),
    [("", "holds no prompt"), ('{"question": 1}', ":1: a prompt is"), ("\n{", ":2 is no JSON")],
)
def test_bad_prompts_are_refused(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text(text)
    with running(StandIn()) as url, pytest.raises(StartupError, match=says):
        serve.main(["--url", url, "--prompts", str(tmp_path / "prompts.jsonl")])


@pytest.mark.parametrize(
    "flags",
    [
        ["--concurrency", "0"],
        ["--request-rate", "-1"],
        ["--extra-body", "[]"],
        ["--extra-body", '{"n": 2}'],
        ["--extra-body", '{"stream": false}'],
        ["--extra-body", '{"max_tokens": 1}'],
        ["--url", "htp:/x"],
        ["--url", "http://[x]:80"],
        ["--url", "127.0.0.1:8000"],
        ["--api-key", "schlüssel"],
        ["--api-key", "a\nb"],
        ["--extra-body", '{"x": NaN}'],
        ["--extra-body", '{"x": "\\ud800"}'],
        ["--model", "\udcff"],
        ["--output", "figures.svg", "--plot", "./figures.svg"],
    ],
)
def test_bad_flags_are_refused(flags: list[str]) -> None:
    with pytest.raises((SystemExit, StartupError)):
        serve.parse(flags)
