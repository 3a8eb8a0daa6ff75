"""Reasoning and answer apart, however the text is cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.message_parts import Content, Part, Reasoning
from gateway.reasoning import NAMES, ReasoningParser, reasoning_format
from outrider.args.gateway import REASONING_PARSERS
from outrider.errors import StartupError


def parse(name: str, text: str, cuts: list[int], *, inside: bool = False) -> tuple[str, str]:
    """Reasoning and content of text that comes cut at these places."""
    form = reasoning_format(name)
    assert form is not None
    parser = ReasoningParser(form, None, inside=inside)
    parts: list[Part] = []
    for start, end in pairwise(sorted({0, *(cut % (len(text) + 1) for cut in cuts), len(text)})):
        parts += parser.push(text[start:end])
    parts += parser.finish()
    return (
        "".join(part.text for part in parts if isinstance(part, Reasoning)),
        "".join(part.text for part in parts if isinstance(part, Content)),
    )


CASES = [
    ("<think>\nWhy?  \n\nSo.\n</think>\n\nIt is. ", False, ("Why?  \n\nSo.", "It is. ")),
    (" \n<think>a</think>b", False, ("a", "b")),
    ("Why?</think>It is.", True, ("Why?", "It is.")),
    ("\n\n</think>\n\nIt is.", True, ("", "It is.")),
    ("no marks <think>here</think>", False, ("", "no marks <think>here</think>")),
    ("<think>never ends </thi", False, ("never ends </thi", "")),
    ("<thin", False, ("", "<thin")),
    ("", False, ("", "")),
    ("", True, ("", "")),
    ("<think>\nWhy?</think>So", True, ("Why?", "So")),
    (" <think></think>So", True, ("", "So")),
    ("<thin ice</think>So", True, ("<thin ice", "So")),
    ("Why <think>?</think>So", True, ("Why <think>?", "So")),
    ("<thi", True, ("<thi", "")),
    (" \n", True, ("", "")),
]


@pytest.mark.parametrize(("text", "inside", "expected"), CASES)
@settings(max_examples=25)
@given(cuts=st.lists(st.integers(0, 60), max_size=6) | st.just(list(range(60))))
def test_however_it_is_cut(text: str, inside: bool, expected: tuple[str, str], cuts: list[int]) -> None:
    assert parse("qwen3", text, cuts, inside=inside) == expected


MIXED = st.sampled_from(["<think>", "</think>", "<thi", "</", " ", "\n\n", "Why?", "<"])


@settings(max_examples=200)
@given(texts=st.lists(MIXED, max_size=12), inside=st.booleans(), cuts=st.lists(st.integers(0, 60), max_size=6))
def test_what_is_found_does_not_depend_on_the_pieces(texts: list[str], inside: bool, cuts: list[int]) -> None:
    text = "".join(texts)
    found = parse("qwen3", text, [], inside=inside)
    assert found == parse("qwen3", text, cuts, inside=inside)
    assert found == parse("qwen3", text, list(range(100)), inside=inside)


def test_the_prompt_tells_whether_thinking_has_begun() -> None:
    qwen, deepseek = reasoning_format("qwen3"), reasoning_format("deepseek_r1")
    assert qwen is not None
    assert deepseek is not None
    assert not qwen.starts_inside("<|im_start|>assistant\n")
    assert qwen.starts_inside("<|im_start|>assistant\n<think>\n")
    assert not qwen.starts_inside("<think>\n\n</think>\n\n")
    assert deepseek.starts_inside("<|Assistant|>")
    assert not deepseek.starts_inside("<think>\n\n</think>\n\n")


def test_an_answer_that_is_continued_tells_by_its_last_mark() -> None:
    qwen, deepseek = reasoning_format("qwen3"), reasoning_format("deepseek_r1")
    assert qwen is not None
    assert deepseek is not None
    done, half = "<think>a</think>The answer is", "<think>half a thought"
    assert not deepseek.starts_inside(f"<|Assistant|>{done}", done)
    assert qwen.starts_inside(f"<|im_start|>assistant\n{half}", half)
    assert not qwen.starts_inside("<|im_start|>assistant\nSo", "So")


def test_names() -> None:
    assert reasoning_format(None) is None
    assert all(reasoning_format(name) for name in NAMES)
    assert NAMES == REASONING_PARSERS
    with pytest.raises(StartupError, match="--reasoning-parser is 'magic'; it must be one of deepseek-r1"):
        reasoning_format("magic")
