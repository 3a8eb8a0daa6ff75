from __future__ import annotations

import io
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider import chat
from outrider.args import ChatArgs
from outrider.errors import StartupError
from outrider.no_proxy import proxy_of
from tests.certificates import Authority
from tests.outrider.conftest import FakeGateway


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_tokens_come_with_their_origins(fake_gateway: FakeGateway) -> None:
    written: list[tuple[str, bool]] = []
    client = chat.connect(fake_gateway.url + "/", None)
    answer = chat.ask(
        client, "a-model", [{"role": "user", "content": "hi"}], lambda text, accepted: written.append((text, accepted)),
        max_tokens=7,
    )  # fmt: skip
    client.close()
    assert written == [("Hel", False), ("lo", True), (" you", True)]
    assert (answer.text, answer.num_tokens, answer.accept_length) == ("Hello you", 3, 3.0)
    (request,) = fake_gateway.requests
    assert request["speculative"] == {"enabled": True, "include_origins": True}
    assert (request["temperature"], request["max_completion_tokens"]) == (0.0, 7)


def test_a_server_that_tells_no_origins(fake_gateway: FakeGateway) -> None:
    fake_gateway.origins = False
    written: list[tuple[str, bool]] = []
    with chat.connect(fake_gateway.url, None) as client:
        answer = chat.ask(client, "m", [{"role": "user", "content": "hi"}], lambda *piece: written.append(piece))
    assert written == [("Hel", False), ("lo", False), (" you", False)]
    assert answer.accept_length is None


def test_summary_says_only_what_is_known() -> None:
    assert chat.Answer("x", 1, None, None).summary() == "1 token"
    assert chat.Answer("x", 9, 2.5, 100.25).summary() == "9 tokens, 100.2 tokens/s, accept length 2.50"


def test_colours_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def painted(out: io.StringIO) -> str:
        painter = chat.Painter(out)
        painter.write("a", True)
        painter.write("b", False)
        return out.getvalue()

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert painted(Terminal()) == "\x1b[32ma\x1b[0mb"
    assert painted(io.StringIO()) == "ab"
    monkeypatch.setenv("NO_COLOR", "1")
    assert painted(Terminal()) == "ab"


def test_a_terminal_is_shown_what_it_would_obey(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    for out, shown in (
        (Terminal(), "a\n\tb \\x1b]0;title\\x07\\x9b\\x7f\\x0d"),
        (io.StringIO(), "a\n\tb \x1b]0;title\x07\x9b\x7f\r"),
    ):
        chat.Painter(out).write("a\n\tb \x1b]0;title\x07\x9b\x7f\r", True)
        assert out.getvalue() == shown


def test_a_server_that_tells_no_usage(fake_gateway: FakeGateway) -> None:
    pieces = "".join(f'data: {{"choices": [{{"index": 0, "delta": {{"content": "{text}"}}}}]}}\n\n' for text in "ab")
    fake_gateway.stream = pieces + "data: [DONE]\n\n"
    with chat.connect(fake_gateway.url, None) as client:
        answer = chat.ask(client, "m", [{"role": "user", "content": "hi"}], lambda *piece: None)
    assert (answer.text, answer.num_tokens, answer.tokens_per_s) == ("ab", None, None)
    assert answer.summary() == "the server tells no number of tokens"


def test_an_authority_of_ones_own(fake_gateway: FakeGateway, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate = authority.issue("127.0.0.1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    fake_gateway.server.socket = context.wrap_socket(fake_gateway.server.socket, server_side=True)
    url = fake_gateway.url.replace("http", "https")
    with chat.connect(url, None, str(authority.path)) as client:
        assert chat.first_model(client, url) == "a-model"
    with (
        chat.connect(url, None).with_options(max_retries=0) as client,
        pytest.raises(StartupError, match=r"TLS failed: .*CERTIFICATE_VERIFY_FAILED.*--ssl-ca-certs"),
    ):
        chat.first_model(client, url)
    with pytest.raises(StartupError, match=r"--ssl-ca-certs .* has no certificate"):
        chat.connect(url, None, certificate[1])


def test_one_prompt_leaves_the_answer_alone_on_stdout(
    fake_gateway: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"--url={fake_gateway.url}", "--prompt", "hi", "--system", "Be brief.", "--no-speculation"]
    assert chat.main(ChatArgs.parse(words)) == 0
    out, err = capsys.readouterr()
    assert out == "Hello you\n"
    assert "3 tokens" in err
    assert "accept length 1.00" in err
    (request,) = fake_gateway.requests
    assert request["model"] == "a-model"
    assert request["speculative"]["enabled"] is False
    assert request["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]


def test_a_conversation_remembers_its_turns(fake_gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    typed: Iterator[str] = iter(["hi", "   ", "and then?"])

    def read(prompt: str = "") -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    assert chat.main(ChatArgs(url=fake_gateway.url)) == 0
    first, second = fake_gateway.requests
    assert first["messages"] == [{"role": "user", "content": "hi"}]
    assert second["messages"] == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Hello you"},
        {"role": "user", "content": "and then?"},
    ]


def test_a_refused_request_says_why(fake_gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    fake_gateway.status = 400
    assert chat.main(ChatArgs(url=fake_gateway.url, model="m", prompt="hi")) == 1
    assert "too long" in capsys.readouterr().err


def test_an_openai_base_url_will_do() -> None:
    for url in ("http://127.0.0.1:8000", "http://127.0.0.1:8000/v1", "http://127.0.0.1:8000/v1/"):
        assert str(chat.connect(url, None).base_url) == "http://127.0.0.1:8000/v1/"


def test_no_proxy_is_asked_for_this_machine(fake_gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert chat.first_model(chat.connect(fake_gateway.url, None), fake_gateway.url)


def test_a_proxy_that_stands_between_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://user:secret@127.0.0.1:9")
    url = "http://machine.example:8000"
    with pytest.raises(StartupError, match=f"no server answers at {url} by way of the proxy 127.0.0.1:9 "):
        chat.first_model(chat.connect(url, None), url)
    monkeypatch.setenv("no_proxy", "machine.example")
    assert proxy_of(url) is None


def test_no_server() -> None:
    with pytest.raises(StartupError, match="no server answers"):
        chat.main(ChatArgs(url="http://127.0.0.1:1", prompt="hi"))


@pytest.mark.parametrize(
    "reply", ['{"object": "list", "data": []}', "null", "[1]", '"text"', '{"a', "<html></html>", '{"data": 1}', ""]
)
def test_a_server_of_something_else(fake_gateway: FakeGateway, reply: str) -> None:
    fake_gateway.models = reply
    with pytest.raises(StartupError, match="no server of models"):
        chat.main(ChatArgs(url=fake_gateway.url, prompt="hi"))


@pytest.mark.parametrize(
    "event",
    [
        "{nonsense",
        '{"choices": [{"index": 0, "delta": null}]}',
        '{"choices": 1}',
        '{"choices": [], "outrider": {"x": 1}}',
        '{"choices": [], "outrider": {"tokens": [{"text": "x"}]}}',
        "[1]",
    ],
)
def test_an_answer_of_another_form(fake_gateway: FakeGateway, capsys: pytest.CaptureFixture[str], event: str) -> None:
    fake_gateway.stream = f"data: {event}\n\n"
    assert chat.main(ChatArgs(url=fake_gateway.url, prompt="hi")) == 1
    assert "answers what no chat server does" in capsys.readouterr().err


def test_an_answer_that_breaks_off(fake_gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    fake_gateway.stream = 'data: {"choices": [{"index": 0, "delta": {"content": "Hel"}}]}\n\n'
    fake_gateway.stream += 'data: {"error": {"message": "the server is gone"}}\n\n'
    assert chat.main(ChatArgs(url=fake_gateway.url, prompt="hi")) == 1
    out, err = capsys.readouterr()
    assert out == "Hel"
    assert "the server is gone" in err


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--url", "http://[::1"], "--url is"),
        (["--url", "nonsense"], "--url is"),
        (["--ssl-ca-certs", "ca.pem"], "--ssl-ca-certs is for https"),
        (["--url", "http://127.0.0.1:99999"], "--url is"),
        (["--prompt", "a\udcff"], "--prompt is not valid UTF-8"),
        (["--system", "a\udcff"], "--system is not valid UTF-8"),
        (["--api-key", "schl\u00fcssel"], "--api-key must be printable"),
        (["--api-key", "a\nb"], "--api-key must be printable"),
    ],
)
def test_words_that_no_server_could_be_sent(words: list[str], match: str) -> None:
    with pytest.raises(StartupError, match=match):
        ChatArgs.parse(words)


def test_typed_bytes_that_are_no_text_are_refused(
    fake_gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\xff\nhi\n"), "utf-8", "surrogateescape"))
    assert chat.main(ChatArgs(url=fake_gateway.url)) == 0
    assert "not valid UTF-8" in capsys.readouterr().err
    assert [request["messages"][0]["content"] for request in fake_gateway.requests] == ["hi"]


@pytest.mark.parametrize(
    ("types", "shows", "out", "err"),
    [
        (False, False, 0, 0),
        (True, False, 0, 2),
        (False, True, 0, 0),
        (True, True, 2, 0),
    ],
)
def test_who_types_is_asked_and_a_pipe_gets_the_answers_alone(
    types: bool, shows: bool, out: int, err: int, fake_gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    outputs = [Terminal() if shows else io.StringIO(), io.StringIO()]
    monkeypatch.setattr("sys.stdin", (Terminal if types else io.StringIO)("hi\n"))
    monkeypatch.setattr("sys.stdout", outputs[0])
    monkeypatch.setattr("sys.stderr", outputs[1])
    assert chat.main(ChatArgs(url=fake_gateway.url)) == 0
    assert [each.getvalue().count("\n> ") for each in outputs] == [out, err]
    assert outputs[0].getvalue().replace("\n> ", "") == "Hello you\n"


def test_a_closed_stdin_ends_a_conversation_and_a_closed_stdout_begins_none(
    fake_gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert chat.main(ChatArgs(url=fake_gateway.url)) == 0
    monkeypatch.setattr("sys.stdout", None)
    with pytest.raises(StartupError, match="stdout is closed"):
        chat.main(ChatArgs(url=fake_gateway.url))
