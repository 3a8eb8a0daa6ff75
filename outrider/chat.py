"""`outrider chat`: a terminal client. Tokens are coloured by origin: drafted and accepted, or the target's own."""

from __future__ import annotations

import contextlib
import ssl
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TextIO

import openai
from openai.types.chat import ChatCompletionChunk, ChatCompletionMessageParam

from outrider import env
from outrider.args import ChatArgs
from outrider.errors import StartupError
from outrider.flags import is_text
from outrider.no_proxy import is_local, proxy_of
from outrider.terminal import shown_line, shown_text
from outrider.tls import TlsFiles, client_context

Write = Callable[[str, bool], None]  # text, and whether it was drafted and accepted

# Raised on an answer of another form, by us or by the client library, which takes JSON of any shape as it is.
_NOT_UNDERSTOOD = (AttributeError, LookupError, TypeError, ValueError)

_ACCEPTED, _FAINT, _RESET = "\x1b[32m", "\x1b[2m", "\x1b[0m"


@dataclass(frozen=True)
class Answer:
    """An answer and what it took. `num_tokens` is None where the server does not tell; `tokens_per_s` is the speed
    after the first token, None for fewer than two."""

    text: str
    num_tokens: int | None
    accept_length: float | None
    tokens_per_s: float | None

    def summary(self) -> str:
        """What the answer took, in one line."""
        if self.num_tokens is None:
            return "the server tells no number of tokens"
        parts = [f"{self.num_tokens} token{'' if self.num_tokens == 1 else 's'}"]
        if self.tokens_per_s is not None:
            parts.append(f"{self.tokens_per_s:.1f} tokens/s")
        if self.accept_length is not None:
            parts.append(f"accept length {self.accept_length:.2f}")
        return ", ".join(parts)


class Painter:
    """Writes an answer's tokens; accepted drafts are green on a terminal, which is shown and not sent what it would
    obey, and all is as it came elsewhere."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._is_terminal = out.isatty()
        self.coloured = self._is_terminal and not env.no_color()

    def write(self, text: str, accepted: bool) -> None:
        """One token's text, shown at once."""
        if self._is_terminal:
            text = shown_text(text)
        self._out.write(f"{_ACCEPTED}{text}{_RESET}" if accepted and self.coloured else text)
        self._out.flush()

    def faint(self, text: str) -> str:
        """Text that stands back."""
        return f"{_FAINT}{text}{_RESET}" if self.coloured else text

    def legend(self) -> str:
        """What the colours mean; empty without colours."""
        return f"{_ACCEPTED}drafted and accepted{_RESET}, the target's own" if self.coloured else ""


def connect(url: str, api_key: str | None, ca_certs: str | None = None) -> openai.OpenAI:
    """A client of the gateway at `url`, which may end in /v1. ca_certs: a file of the authorities to believe.

    StartupError for a file that cannot be used.
    """
    believed = True if ca_certs is None else client_context(TlsFiles(None, None, ca_certs))
    own = openai.DefaultHttpxClient(trust_env=not is_local(url), verify=believed)
    base_url = f"{url.rstrip('/').removesuffix('/v1')}/v1"
    return openai.OpenAI(base_url=base_url, api_key=api_key or "none", http_client=own)


def first_model(client: openai.OpenAI, url: str) -> str:
    """The first model that the server names. StartupError when there is no server."""
    try:
        return client.models.list().data[0].id
    except openai.APIConnectionError as error:
        if tls := _tls_failure(error):
            raise StartupError(f"{url}: {tls}") from error
        proxy = proxy_of(url)
        way = "" if proxy is None else f" by way of the proxy {proxy} (no_proxy names hosts that need none)"
        raise StartupError(f"no server answers at {url}{way}; `outrider serve` starts one") from error
    except openai.APIStatusError as error:
        raise StartupError(f"{url} answers: {error.message}") from error
    except _NOT_UNDERSTOOD as error:
        raise StartupError(f"what answers at {url} is no server of models, or has none") from error


def _tls_failure(error: BaseException | None) -> str | None:
    """Why no TLS was agreed on, where that is what a connection failed of."""
    while error is not None and not isinstance(error, ssl.SSLError):
        error = error.__cause__ or error.__context__
    return None if error is None else f"TLS failed: {error}; --ssl-ca-certs names whom to believe"


def ask(
    client: openai.OpenAI,
    model: str,
    messages: list[ChatCompletionMessageParam],
    write: Write,
    *,
    speculate: bool = True,
    temperature: float = 0.0,
    max_tokens: int | None = None,
) -> Answer:
    """Streams one answer to `write`. Raises openai.APIError; KeyboardInterrupt ends the request."""
    stream = client.chat.completions.create(
        model=model,
        messages=messages,
        stream=True,
        stream_options={"include_usage": True},
        temperature=temperature,
        max_completion_tokens=max_tokens,
        extra_body={"speculative": {"enabled": speculate, "include_origins": True}},
    )
    text, first_s, last_s, usage = "", 0.0, 0.0, None
    with stream:
        for chunk in stream:
            usage = chunk.usage or usage
            for content, accepted in _pieces(chunk):
                last_s = time.perf_counter()
                first_s = first_s or last_s
                text += content
                write(content, accepted)
            if text and chunk.choices and chunk.choices[0].finish_reason:  # which the token that ends it comes with
                last_s = time.perf_counter()
    num_tokens = usage.completion_tokens if usage else None
    speculation: dict[str, Any] = (usage.model_extra or {}).get("speculation") or {} if usage else {}
    decode_s = last_s - first_s
    return Answer(
        text=text,
        num_tokens=num_tokens,
        accept_length=speculation.get("accept_length"),
        tokens_per_s=(num_tokens - 1) / decode_s if decode_s and num_tokens and num_tokens > 1 else None,
    )


def _pieces(chunk: ChatCompletionChunk) -> list[tuple[str, bool]]:
    """A chunk's text by token with its origin; as one piece from a server that tells no origins."""
    origins = (chunk.model_extra or {}).get("outrider")
    if origins:
        return [(token["text"], token["origin"] == "accepted") for token in origins["tokens"]]
    content = chunk.choices[0].delta.content if chunk.choices else None
    return [(content, False)] if content else []


def main(args: ChatArgs) -> int:
    """Asks once, or talks until the input ends. Returns the exit code."""
    if sys.stdout is None:
        raise StartupError("stdout is closed")
    client = connect(args.url, args.api_key, args.ssl_ca_certs)
    model = args.model or first_model(client, args.url)
    painter = Painter(sys.stdout)
    messages: list[ChatCompletionMessageParam] = []
    if args.system is not None:
        messages.append({"role": "system", "content": args.system})
    if args.prompt is not None:
        return _turn(client, model, args, messages, args.prompt, painter)
    _say(f"{shown_line(model)} at {args.url}. Ctrl-C stops an answer, Ctrl-D ends.", painter)
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  line editing for input()
    while sys.stdin is not None:
        try:
            prompt = _read_line()
        except (EOFError, KeyboardInterrupt):
            _say("", painter)
            return 0
        if not is_text(prompt):
            print("outrider chat: that is not valid UTF-8", file=sys.stderr)
        elif prompt.strip():
            _turn(client, model, args, messages, prompt, painter)
    return 0


def _read_line() -> str:
    """A line of the user's, asked for where somebody types it: a pipe gets the answers alone, and needs no asking."""
    if not sys.stdin.isatty():
        return input()
    if sys.stdout.isatty():
        return input("\n> ")  # which is where line editing has it
    print("\n> ", end="", file=sys.stderr, flush=True)
    return input()


def _turn(
    client: openai.OpenAI,
    model: str,
    args: ChatArgs,
    messages: list[ChatCompletionMessageParam],
    prompt: str,
    painter: Painter,
) -> int:
    """One question and its answer, both added to `messages`; neither is when it fails. Returns the exit code."""
    asked: list[ChatCompletionMessageParam] = [*messages, {"role": "user", "content": prompt}]
    if painter.coloured:
        _say(f"[{painter.legend()}]", painter)
    try:
        answer = ask(
            client, model, asked, painter.write,
            speculate=not args.no_speculation, temperature=args.temperature, max_tokens=args.max_tokens,
        )  # fmt: skip
    except KeyboardInterrupt:
        _say("\nstopped", painter)
        return 130
    except openai.APIError as error:
        print(f"outrider chat: {shown_text(_tls_failure(error) or error.message)}", file=sys.stderr)
        return 1
    except _NOT_UNDERSTOOD as error:
        print(f"outrider chat: {args.url} answers what no chat server does: {error!r}", file=sys.stderr)
        return 1
    painter.write("\n", False)
    _say(answer.summary(), painter)
    messages[:] = [*asked, {"role": "assistant", "content": answer.text}]
    return 0


def _say(line: str, painter: Painter) -> None:
    """Says a line beside the conversation; on stderr, so that a pipe gets the answers alone."""
    print(painter.faint(line), file=sys.stderr, flush=True)
