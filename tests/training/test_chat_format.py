"""A chat template is code: one that runs for ever, eats memory or is broken ends in one line, not in the machine."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from outrider.cli import main as outrider
from outrider.errors import StartupError
from tests.gateway.models import byte_level
from tests.training.rig import make_chat
from training import template_process
from training.chat_format import ChatFormat
from training.template_process import TemplateProcess

MESSAGES = [{"role": "user", "content": "Hi"}]


def with_template(target: Path, folder: Path, source: str) -> Path:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((target / name).read_bytes())
    (folder / "chat_template.jinja").write_text(source)
    return folder


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}", "more than .* seconds"),
        ("{% set ns = namespace(x='a' * 1000) %}{% for i in range(30) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
         "MemoryError|too much memory"),
        ("{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}", "writes more than 8388608 characters"),
        ("{% for %}", "TemplateSyntaxError"),
        ("{{ 'a' * 10 ** 30 }}", "OverflowError"),
        ("{{ nothing.at_all.here }}", "UndefinedError"),
        ("{{ raise_exception('Not\\nthis.') }}", "refuses a conversation: Not this."),
    ],
)  # fmt: skip
def test_a_template_that_does_not_work_is_told_in_one_line(
    source: str, message: str, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_process, "TIME_LIMIT_S", 1.0 if "seconds" in message else 30.0)
    folder = with_template(target, tmp_path, source)
    with pytest.raises(StartupError, match=message) as caught:
        ChatFormat.of_model(folder)
    assert f"the chat template of {folder} " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_command_says_it(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.app.configure_logging", lambda service: None)  # it would outlast this test's stderr
    folder = with_template(target, tmp_path, "{% for %}")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Hi"}\n')
    words = ["train", "eval", f"--model-path={folder}", f"--head={target}", f"--prompts={prompts}"]
    assert outrider(words) == 2
    assert "cannot be rendered: TemplateSyntaxError" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("template", "message"),
    [([{"name": "other", "template": "x"}, 5], "no chat template"), (7, "no chat template"), ("\ud800", "not Unicode")],
)
def test_templates_in_the_tokenizers_settings(
    template: object, message: str, target: Path, tmp_path: Path
) -> None:  # fmt: skip
    folder = with_template(target, tmp_path, "")
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(StartupError, match=message):
        ChatFormat.of_model(folder)
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(StartupError, match=r"tokenizer_config\.json must hold a JSON object"):
        ChatFormat.of_model(folder)


def test_text_is_read_as_the_gateway_reads_it(target: Path, tmp_path: Path) -> None:
    """Special tokens of both files, and no truncation or padding that a tokenizer has kept."""
    folder = with_template(target, tmp_path, "{{ bos_token }}{{ messages[0].content }}")
    (folder / "tokenizer_config.json").unlink()
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<|im_start|>"}))
    tokenizer = byte_level()
    expected = tokenizer.encode("<|im_start|>Hi, who is there?").ids
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(folder / "tokenizer.json"))
    assert ChatFormat.of_model(folder).prompt([{"role": "user", "content": "Hi, who is there?"}]) == expected


def test_a_template_that_works_only_at_first_is_told_too(target: Path, tmp_path: Path) -> None:
    source = "{{ messages[0].content }}{% if messages|length > 1 %}{{ raise_exception('only one') }}{% endif %}"
    chat = ChatFormat.of_model(with_template(target, tmp_path, source))
    first = chat.prompt(MESSAGES)
    with pytest.raises(StartupError, match="refuses a conversation: only one"):
        chat.prompt(MESSAGES * 2)
    assert chat.prompt(MESSAGES) == first


def test_a_template_that_needs_a_system_message_gets_one(target: Path, tmp_path: Path) -> None:
    source = (
        "{% if messages[0].role != 'system' %}{{ raise_exception('no system message') }}{% endif %}"
        "{% for message in messages %}<{{ message.content }}>{% endfor %}"
    )
    chat = ChatFormat.of_model(with_template(target, tmp_path, source))
    plain = "<You are a helpful assistant.>"
    assert chat.takes_system
    assert chat.opening == chat.encode(f"{plain}<")
    assert chat.prompt(MESSAGES) == chat.encode(f"{plain}<Hi>")
    assert chat.user_turn([], "So") == chat.encode(f"{plain}<So")
    assert chat.prompt([{"role": "system", "content": "Be brief."}, *MESSAGES]) == chat.encode("<Be brief.><Hi>")


def test_a_process_that_was_ended_is_started_again(target: Path) -> None:
    chat = make_chat(target)
    first = chat.prompt(MESSAGES)
    worker = chat._template._worker
    assert worker is not None
    os.kill(worker._process.pid, signal.SIGKILL)
    worker._process.wait()
    assert chat.prompt(MESSAGES) == first
    chat._template.close()
    assert chat.prompt(MESSAGES) == first


def test_a_process_ends_with_its_template() -> None:
    template = TemplateProcess("of a test", "{{ x }}", {})
    worker = template._worker
    assert worker is not None
    process: subprocess.Popen[bytes] = worker._process
    assert template.render({"x": "é" * 100_000}) == "é" * 100_000
    del template, worker
    gc.collect()
    assert process.returncode == -signal.SIGKILL
