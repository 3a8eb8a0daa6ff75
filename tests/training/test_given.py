"""Prompts that users bring: every form of them is read, and what is wrong is told with file, line and reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import StartupError
from training.data.given import read_conversations, read_first_turns
from training.data.overlap import read_prompts


@pytest.mark.parametrize(
    "line",
    [
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
        {"turns": ["Hi"]},
        {"prompt": "Hi"},
        "Hi",
    ],
)
def test_a_users_own_prompts(line: Any, tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps(line) + "\n\n")
    ((first, *_),) = read_conversations(path)
    assert first == {"role": "user", "content": "Hi"}


def test_answers_and_what_tools_said_are_passed_over(tmp_path: Path) -> None:
    """Also where they have no text, as beside calls of tools; and Windows' editors begin a file with a mark."""
    path = tmp_path / "own.jsonl"
    talk = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
        {"role": "tool", "tool_call_id": "1", "content": ""},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "And now?"},
    ]
    path.write_text(json.dumps({"messages": talk}), encoding="utf-8-sig")
    (read,) = read_conversations(path)
    assert [(message["role"], message["content"]) for message in read] == [
        ("system", "Be brief."), ("user", "Weather?"), ("user", "And now?"),
    ]  # fmt: skip


def test_texts_may_come_in_parts_and_hold_any_line_break(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    parts = [{"type": "text", "text": "Do whales"}, {"type": "text", "text": " sing?"}]
    row = {"messages": [{"role": "user", "content": parts}], "turns": 5}
    path.write_text(json.dumps(row) + '\r\n\n"One\u2028line\x85of\\ntext"\n', encoding="utf-8")
    found = [message["content"] for (message,) in read_conversations(path)]
    assert found == ["Do whales sing?", "One\u2028line\x85of\ntext"]
    path.write_text('{"question": "One\u2028line", "turns": [["Two"]]}\n"Three"\n', encoding="utf-8")
    assert read_prompts(path) == ["Two", "One\u2028line", "Three"]


@pytest.mark.parametrize(
    "line", ["5", "null", "[]", '""', '{"turns": []}', '{"prompt": " "}', '{"instruction": "Name a whale."}']
)
def test_a_prompt_that_cannot_be_kept_out_is_told(line: str, tmp_path: Path) -> None:
    path = tmp_path / "benchmark.jsonl"
    path.write_text(f'"Hi"\n{line}\n')
    with pytest.raises(StartupError, match=f"{path}, line 2: it holds no text; it must be a string, or have one of tu"):
        read_prompts(path)
    path.write_text("\n")
    with pytest.raises(StartupError, match=f"{path} holds no prompts"):
        read_prompts(path)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "it is not JSON: Expecting property name enclosed in double quotes at column 2$"),
        ('{"messages": [{"role": "system", "content": "Be brief."}]}', "messages has no message of a user; it must"),
        ('{"conversations": [{"from": "gpt"}]}', "conversations has no message of a user; it must have one"),
        ("[" * 100_000, "its brackets are nested too deeply"),
        ("5", "it is a number; it must be a string, or an object with one of messages"),
        ('{"text": 1}', "it has none of messages, conversations, turns, prompt"),
        ('{"prompt": null}', "prompt is null; it must be a string"),
        ('{"prompt": ["Hi"]}', "prompt is a list; it must be a string"),
        ('{"prompt": " "}', "prompt is empty"),
        ('""', "the prompt is empty"),
        ('"\\ud800"', "the prompt is not Unicode text"),
        ('{"turns": "Hi"}', "turns is a string; it must be a list"),
        ('{"turns": []}', "turns is empty; it must be a list"),
        ('{"turns": ["Hi", 5]}', r"turns\[1\] is a number; it must be a string"),
        ('{"messages": {}}', "messages is an object; it must be a list"),
        ('{"messages": ["Hi"]}', r"messages\[0\] is a string; it must be an object"),
        ('{"messages": [{"role": "critic", "content": "Hi"}]}', r"messages\[0\] has the role 'critic'; it must be one"),
        ('{"messages": [{"content": "Hi"}]}', r"messages\[0\] has the role null"),
        ('{"messages": [{"role": "user", "content": true}]}', r"content is true or false; it must be a string"),
        ('{"messages": [{"role": "user", "content": []}]}', r"content is empty"),
        ('{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "content has a part that is no text"),
        ('{"messages": [{"role": "user"}]}', r"messages\[0\] has no content"),
        ('{"conversations": [{"from": "human"}]}', r"conversations\[0\] has no value"),
        ('{"conversations": [{"from": "human", "value": 7}]}', r"conversations\[0\].value is a number"),
    ],
)
def test_a_line_that_is_no_conversation_is_told_with_the_reason(line: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text(f'"Hi"\n{line}\n')
    with pytest.raises(StartupError, match=f"{path}, line 2: .*{reason}"):
        read_conversations(path)


def test_a_line_that_is_not_utf_8_is_told(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_bytes('"Hi"\n"Où?"\n'.encode() + b'"\xe9"\n')
    with pytest.raises(StartupError, match=f"{path}, line 3: it is not UTF-8: .* at byte 2$"):
        read_conversations(path)


@pytest.mark.parametrize("text", ["", "\n"])
def test_a_file_that_asks_nothing_is_told(text: str, tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text(text)
    with pytest.raises(StartupError, match=f"{path} holds no prompts"):
        read_conversations(path)


def test_an_evaluation_asks_how_each_conversation_begins(tmp_path: Path) -> None:
    path, hello = tmp_path / "own.jsonl", {"role": "user", "content": "Hello"}
    brief = {"role": "system", "content": "Be brief."}
    lines = [
        "Hello", {"prompt": "Hello", "category": "greeting"}, {"turns": ["Hello", "And now?"]},
        {"messages": [brief, hello, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "And now?"}]},
        {"messages": [{"role": "assistant", "content": "Hi"}, hello, brief]},
        {"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}]},
    ]  # fmt: skip
    path.write_text("\n".join(map(json.dumps, lines)))
    assert read_first_turns(path) == [
        ("all", [hello]), ("greeting", [hello]), ("all", [hello]), ("all", [brief, hello]), ("all", [hello]),
        ("all", [hello]),
    ]  # fmt: skip


def test_prompts_of_an_evaluation_and_of_a_benchmark_are_read_as_strictly(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    for line, reason in (
        ("[]", "it is a list; it must be a string, or an object"), ('{"turns": 5}', "turns is a number"),
        ('{"turns": [null]}', r"turns\[0\] is null"), ("[" * 100_000, "nested too deeply"),
    ):  # fmt: skip
        path.write_text(f"\n{line}\n")
        with pytest.raises(StartupError, match=f"{path}, line 2: .*{reason}"):
            read_first_turns(path)
    with pytest.raises(StartupError, match=f"{path}, line 2: .*nested too deeply"):
        read_prompts(path)
    path.write_text("[" * 5000 + "]" * 5000)
    with pytest.raises(StartupError, match="nested too deeply"):
        read_prompts(path)
