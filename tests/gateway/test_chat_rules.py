"""Tools' schemas are rewritten where they are looked at, once, and not if no grammar has room for them."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from gateway import tools
from gateway.chat_rules import chat_rules, rewrites
from gateway.schemas import ChatCompletionRequest
from gateway.tool_parsers.formats import NAMES, tool_format
from outrider.errors import InvalidArgument
from outrider.wire import MAX_GRAMMAR_BYTES

NAMED = {"type": "function", "function": {"name": "f0"}}


def asked(choice: Any, *, strict: bool, description: str = "") -> ChatCompletionRequest:
    """A body with three tools."""
    parameters = {"properties": {"a": {"type": "integer", "description": description}}}
    functions = [{"name": f"f{index}", "parameters": parameters, "strict": strict} for index in range(3)]
    body = {
        "messages": [{"role": "user", "content": "Hi!"}], "tool_choice": choice,
        "tools": [{"type": "function", "function": function} for function in functions],
    }  # fmt: skip
    return msgspec.convert(body, ChatCompletionRequest)


def ready(name: str) -> Any:
    """A model that writes calls in a format."""
    template = SimpleNamespace(chosen=lambda tools: SimpleNamespace(takes_tools=True))
    return SimpleNamespace(template=template, tools=tool_format(name, None), reasoning=None)


@pytest.fixture
def rewritten(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every schema that is rewritten from now on."""
    seen: list[Any] = []
    sayable = tools.sayable

    def noting(schema: Any, *, strict: bool) -> Any:
        seen.append(schema)
        return sayable(schema, strict=strict)

    monkeypatch.setattr(tools, "sayable", noting)
    return seen


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(("choice", "num_held"), [("none", 0), ("auto", None), ("required", 3), (NAMED, 1)])
def test_a_schema_is_rewritten_once_and_where_it_is_needed(
    rewritten: list[Any], name: str, strict: bool, choice: Any, num_held: int | None
) -> None:
    form = tool_format(name, None)
    if choice == "auto" and strict and form.strict is None:
        with pytest.raises(InvalidArgument, match="to no schema"):
            chat_rules(asked(choice, strict=strict), ready(name), "", "")
        return
    rules = chat_rules(asked(choice, strict=strict), ready(name), "", "")
    for _ in range(2):
        rules.message.message()
    assert len(rewritten) == (3 * (strict or form.typed) if num_held is None else num_held)


@pytest.mark.parametrize(
    ("choice", "strict"), [("required", False), ("required", True), (NAMED, False), ("auto", True)]
)
def test_schemas_that_are_too_large_are_refused_as_they_came(rewritten: list[Any], choice: Any, strict: bool) -> None:
    body = asked(choice, strict=strict, description="x" * MAX_GRAMMAR_BYTES)
    with pytest.raises(InvalidArgument, match=f"can be held to {MAX_GRAMMAR_BYTES}") as refused:
        chat_rules(body, ready("hermes"), "", "")
    assert (refused.value.field, refused.value.code) == ("tools", "invalid_json_schema")
    assert rewritten == []


def test_schemas_that_are_large_together_may_be_small_in_other_words() -> None:
    body = asked("required", strict=False)
    for tool in body.tools or ():
        rule = {"if": {"required": ["a"]}, "then": {"required": ["b"]}}  # which relaxing leaves out
        tool.function.parameters = {"allOf": [rule] * (MAX_GRAMMAR_BYTES // 100)}
    assert sum(len(msgspec.json.encode(tool.function.parameters)) for tool in body.tools or ()) > MAX_GRAMMAR_BYTES
    grammar = chat_rules(body, ready("hermes"), "", "").grammar
    assert grammar is not None
    assert grammar.ByteSize() < MAX_GRAMMAR_BYTES


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("choice", "strict"), [("none", True), ("auto", False), ("auto", True), ("required", False)])
def test_schemas_are_rewritten_where_it_is_said_that_they_are(
    rewritten: list[Any], name: str, choice: Any, strict: bool
) -> None:
    body = asked(choice, strict=strict)
    with contextlib.suppress(InvalidArgument):
        chat_rules(body, ready(name), "", "").message.message()
    assert bool(rewritten) <= rewrites(body, ready(name))


@pytest.mark.parametrize("name", NAMES)
def test_large_schemas_that_hold_nothing_are_taken(name: str) -> None:
    rules = chat_rules(asked("auto", strict=False, description="x" * MAX_GRAMMAR_BYTES), ready(name), "", "")
    assert rules.grammar is None
    assert rules.message.message().inner is not None
