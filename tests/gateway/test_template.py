"""Chat templates as what they are: code from a folder, which may be hostile."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import subprocess
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from structlog.testing import capture_logs

from gateway.template import ChatTemplate, TemplateFailed, WorkerLost, _Worker
from outrider import isolated, template_worker
from outrider.errors import InvalidArgument, StartupError, Unavailable
from tests.gateway.models import CHATML

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello."}], "add_generation_prompt": True}
ON_DEMAND = "{% if messages[0].content == 'GO' %}BODY{% endif %}"


async def render(source: str, context: dict[str, Any] = HELLO, *, max_chars: int = 10_000, limit_s: float = 5.0) -> str:
    """One render by a template that is started and closed around it."""
    template = ChatTemplate(source, {"bos_token": "<s>"}, limit_s)
    await template.start()
    try:
        return await template.render(context, max_chars)
    finally:
        await template.close()


def asking(content: str) -> dict[str, Any]:
    """A conversation of one message."""
    return {"messages": [{"role": "user", "content": content}]}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("source", "text"),
    [
        (CHATML, "<|im_start|>user\nHello.<|im_end|>\n<|im_start|>assistant\n"),
        ("{{ bos_token }}{{ messages | tojson }}", '<s>[{"role": "user", "content": "Hello."}]'),
        ("{% if tools is none and documents is none %}x{% endif %}{{ nothing }}", "x"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{% for m in messages %}{% break %}{% endfor %}z", "z"),
        ("a{% generation %}b{{ messages[0].role }}{% endgeneration %}c", "abuserc"),
        ("{{ strftime_now('%Y')[:2] }}", "20"),
        ("{{ '<é>' | tojson }}", '"<é>"'),
        ("{{ '\ue000é' | tojson(ensure_ascii=true) }}", '"\ue000\\u00e9"'),
    ],
)
async def test_what_templates_may_use(source: str, text: str) -> None:
    assert await render(source) == text


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "source",
    [
        "{% for %}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ messages.append(1) }}",
        "{{ nothing.at.all }}",
        "{{ 'x' * 10**10 }}",
        "{{ cycler.__init__.__globals__.os }}",
    ],
)
async def test_a_bad_template_is_found_at_start(source: str) -> None:
    with pytest.raises(StartupError) as failed:
        await render(source)
    assert failed.value.code == "template_error"


@pytest.mark.asyncio
async def test_half_a_surrogate_pair_is_told_at_start_as_it_is() -> None:
    with pytest.raises(StartupError, match="the chat template does not work: UnicodeEncodeError"):
        await render("{% if '\\ud800' in messages[0].content %}x{% endif %}")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("refuses", "warnings"),
    [("messages[0].role != 'system'", 0), ("messages | length < 3", 1), ("true", 1)],
)
async def test_a_template_that_refuses_what_it_is_tried_with_may_take_other_conversations(
    refuses: str, warnings: int
) -> None:
    source = f"{{% if {refuses} %}}{{{{ raise_exception('not so') }}}}{{% endif %}}" + CHATML
    with capture_logs() as logs, pytest.raises(InvalidArgument, match="refuses these messages: not so"):
        await render(source)
    assert [line["reason"] for line in logs if line["log_level"] == "warning"] == ["not so"] * warnings
    if refuses != "true":
        talk = [{"role": role, "content": "Hi."} for role in ("system", "user", "assistant")]
        assert "Hi." in await render(source, {"messages": talk})


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "loop",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ (3 ** (99999999 + messages | length)) is odd }}",
    ],
)
async def test_an_endless_render_is_ended_and_others_go_on(loop: str) -> None:
    template = ChatTemplate(ON_DEMAND.replace("BODY", loop) + "ok", {}, 3.0)  # seconds, for its start too
    await template.start()
    try:
        slow = asyncio.create_task(template.render(asking("GO"), 10_000))
        assert await template.render(asking("stay"), 10_000) == "ok"
        with pytest.raises(TemplateFailed) as failed:
            await slow
        assert failed.value.http_status == 500
        assert await template.render(asking("again"), 10_000) == "ok"
    finally:
        await template.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("body", ["{{ 'x' * 10**9 * 9 }}", "{{ messages[0].nothing.more }}", "{{ '%c' % 55296 }}"])
async def test_a_render_that_breaks_is_the_requests_error(body: str) -> None:
    with pytest.raises(InvalidArgument) as failed:
        await render(ON_DEMAND.replace("BODY", body), asking("GO"))
    assert (failed.value.code, failed.value.field) == ("template_error", "messages")


@pytest.mark.asyncio
async def test_a_refusal_gives_the_templates_reason() -> None:
    source = ON_DEMAND.replace("BODY", "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidArgument, match="roles must alternate"):
        await render(source, asking("GO"))


@pytest.mark.asyncio
async def test_output_is_cut_off_while_it_grows() -> None:
    with pytest.raises(InvalidArgument) as failed:
        await render(
            ON_DEMAND.replace("BODY", "{% for i in range(99999) %}xxxx{% endfor %}"), asking("GO"), max_chars=100
        )
    assert failed.value.code == "context_length_exceeded"


@pytest.mark.asyncio
async def test_a_cancelled_render_leaves_no_worker_in_the_middle() -> None:
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    template = ChatTemplate(ON_DEMAND.replace("BODY", loop) + "{{ messages[0].content }}", {}, 5.0)
    await template.start()
    try:
        slow = asyncio.create_task(template.render(asking("GO"), 10_000))
        assert await template.render(asking("1"), 10_000) == "1"
        slow.cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow
        for text in ("2", "3", "4"):
            assert await template.render(asking(text), 10_000) == text
    finally:
        await template.close()


@contextlib.asynccontextmanager
async def with_an_idle_worker() -> AsyncGenerator[tuple[ChatTemplate, subprocess.Popen[bytes]]]:
    template = ChatTemplate("{{ messages[0].content }}", {})
    await template.start()
    try:
        (worker,) = template._idle
        yield template, worker.process
    finally:
        await template.close()


@pytest.mark.asyncio
async def test_a_worker_that_was_killed_is_replaced() -> None:
    async with with_an_idle_worker() as (template, process):
        os.kill(process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222
        assert await template.render(asking("1"), 100) == "1"


def kill_workers(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """The next `count` workers that are to render are killed first."""
    left, ask = count, _Worker.ask

    async def ask_the_dead(worker: _Worker, request: template_worker.Request) -> template_worker.Reply:
        nonlocal left
        if left and isinstance(request, template_worker.Render):
            left -= 1
            worker.process.kill()
        return await ask(worker, request)

    monkeypatch.setattr(_Worker, "ask", ask_the_dead)


@pytest.mark.asyncio
async def test_a_render_whose_worker_is_killed_is_begun_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    async with with_an_idle_worker() as (template, _):
        kill_workers(monkeypatch, 1)
        assert await template.render(asking("1"), 100) == "1"
        kill_workers(monkeypatch, 2)
        with pytest.raises(WorkerLost, match="try again") as failed:
            await template.render(asking("1"), 100)
        assert failed.value.http_status == 503


@pytest.mark.asyncio
async def test_a_start_whose_worker_is_killed_is_begun_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    kill_workers(monkeypatch, 1)
    async with with_an_idle_worker() as (template, _):
        assert await template.render(asking("1"), 100) == "1"


@pytest.mark.asyncio
async def test_a_worker_does_not_end_before_its_service() -> None:
    async with with_an_idle_worker() as (template, process):
        process.terminate()
        assert await template.render(asking("1"), 100) == "1"
        assert [worker.process for worker in template._idle] == [process]


@pytest.mark.asyncio
@pytest.mark.parametrize("starts", [True, False])
async def test_no_process_for_a_worker_is_said_in_words(monkeypatch: pytest.MonkeyPatch, starts: bool) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, "no more processes")

    template = ChatTemplate("{{ messages[0].content }}", {})
    if starts:
        await template.start()
    await template.close()
    monkeypatch.setattr(subprocess, "Popen", fail)
    with pytest.raises(Unavailable if starts else StartupError, match="no more processes"):
        await (template.render(asking("1"), 100) if starts else template.start())


@pytest.mark.asyncio
async def test_literals_are_told() -> None:
    template = ChatTemplate("{% if '</think>' in messages[0].content %}text{% endif %}", {})
    await template.start()
    await template.close()
    assert "</think>" in template.strings
    assert "text" not in template.strings


def test_a_worker_whose_gateway_was_killed_goes_in_silence() -> None:
    """An answer that nobody read is what a killed process leaves behind: the worker's next read is a reset."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        worker = subprocess.Popen(
            isolated.command(template_worker, packages=template_worker.PACKAGES),
            stdin=theirs.fileno(),
            stdout=theirs.fileno(),
            stderr=subprocess.PIPE,
        )
        theirs.close()
        ours.sendall(template_worker.frame(template_worker.Load("ok", {}, 60.0)))
        ours.recv(1, socket.MSG_PEEK)  # the template is loaded
    _, said = worker.communicate(timeout=60)
    assert (worker.returncode, said) == (0, b"")
