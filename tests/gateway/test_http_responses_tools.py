"""/v1/responses with tools of other kinds than functions, and items that tell of them."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tokenizers import Tokenizer

from tests.gateway.fakes import RunningGateway
from tests.gateway.test_http_tools import prompt_of, say, started

WEATHER: Any = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}
LIST: Any = {"type": "function", "name": "list", "description": "Lists them."}
AGENTS: Any = {"type": "namespace", "name": "agents", "description": "About agents.",
               "tools": [LIST, {"type": "function", "name": "stop", "description": "Stops one."}]}  # fmt: skip
FILES: Any = {"type": "namespace", "name": "files__", "description": "", "tools": [LIST]}
SEARCH: Any = {"type": "web_search", "external_web_access": False}
BUILT_IN: Any = [
    SEARCH, {"type": "file_search", "vector_store_ids": ["a"]}, {"type": "computer_use_preview"},
    {"type": "code_interpreter", "container": {"type": "auto"}}, {"type": "image_generation"},
    {"type": "mcp", "server_label": "a", "server_url": "https://a.test"}, {"type": "local_shell"},
    {"type": "tool_search", "execution": "client", "parameters": {"type": "object"}}, {"type": "apply_patch"},
]  # fmt: skip


@pytest.fixture(scope="module")
def shared(folder: Path, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Generator[RunningGateway]:
    """A gateway that leaves out what it does not know."""
    with started(folder, tokenizer, tmp_path_factory.mktemp("tools")) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def strict(folder: Path, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Generator[RunningGateway]:
    """A gateway that refuses it."""
    with started(folder, tokenizer, tmp_path_factory.mktemp("strict"), strict_fields=True) as gateway:
        yield gateway


def ask(gateway: RunningGateway, **fields: Any) -> httpx.Response:
    return httpx.post(f"{gateway.url}/v1/responses", json={"input": "Hi!", **fields})


def num_left_out(gateway: RunningGateway) -> int:
    """How many parts of bodies were left out so far."""
    lines = httpx.get(f"{gateway.url}/metrics").text.splitlines()
    return next(int(float(line.split()[1])) for line in lines if line.startswith("outrider_unknown_fields_total "))


def check_refused(reply: httpx.Response, code: str, param: str) -> None:
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert (error["code"], error["param"]) == (code, param)


# ---- Tools that cannot be run here


def test_tools_that_cannot_be_run_are_left_out_and_counted(gateway: RunningGateway, tokenizer: Tokenizer) -> None:
    before = num_left_out(gateway)
    reply = ask(gateway, tools=[*BUILT_IN, WEATHER], tool_choice="required")
    assert reply.status_code == 200, reply.text
    assert [tool["name"] for tool in reply.json()["tools"]] == ["weather"]
    assert num_left_out(gateway) == before + len(BUILT_IN)
    assert "web_search" not in prompt_of(gateway, tokenizer)


def test_without_them_there_may_be_none(gateway: RunningGateway) -> None:
    reply = ask(gateway, tools=[SEARCH], tool_choice="auto")
    assert (reply.status_code, reply.json()["tools"]) == (200, [])


def test_strict_names_the_one_that_is_in_the_way(strict: RunningGateway) -> None:
    check_refused(ask(strict, tools=[WEATHER, SEARCH]), "unsupported_value", "tools[1].type")


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        ([SEARCH], "required", "tool_choice"),
        ([WEATHER, SEARCH], {"type": "web_search"}, "tool_choice.type"),
        ([WEATHER], {"type": "mcp", "server_label": "a"}, "tool_choice.type"),
        ([WEATHER, SEARCH], {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]},
         "tool_choice.tools[0].type"),
        ([{"type": "custom", "name": "patch"}], "auto", "tools[0].type"),
        ([{**AGENTS, "tools": [LIST, {"type": "custom", "name": "patch"}]}], "auto", "tools[0].tools[1].type"),
        ([{"type": "magic"}], "auto", "tools[0].type"),
    ],
)  # fmt: skip
def test_tools_that_are_asked_for_are_not_left_out(
    gateway: RunningGateway, tools: list[Any], choice: Any, param: str
) -> None:
    check_refused(ask(gateway, tools=tools, tool_choice=choice), "unsupported_value", param)


def test_allowed_tools_without_those_that_are_left_out(gateway: RunningGateway) -> None:
    allowed = [{"type": "web_search"}, {"type": "function", "name": "weather"}]
    choice = {"type": "allowed_tools", "mode": "required", "tools": allowed}
    reply = ask(gateway, tools=[WEATHER, SEARCH, AGENTS], tool_choice=choice)
    assert (reply.status_code, reply.json()["tool_choice"]) == (200, choice)
    schema = str(gateway.verify[0].requests[-1].sampling.grammar)
    assert ("weather" in schema, "agents__" in schema) == (True, False)


# ---- Namespaces


def test_calls_of_a_namespaces_functions(client: openai.OpenAI, gateway: RunningGateway, tokenizer: Tokenizer) -> None:
    say(gateway, tokenizer, '<tool_call>\n{"name": "agents__list", "arguments": {}}\n</tool_call>'
                            '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>')  # fmt: skip
    asked: Any = {"model": "small", "input": "Hi!", "tools": [AGENTS, WEATHER]}
    made: Any = client.responses.create(**asked)
    assert [(item.name, item.namespace) for item in made.output] == [("list", "agents"), ("weather", None)]
    assert "namespace" not in made.output[1].to_dict()
    assert [tool.type for tool in made.tools] == ["namespace", "function"]
    prompt = prompt_of(gateway, tokenizer)
    assert ('"agents__list"' in prompt, '"agents__stop"' in prompt) == (True, True)
    assert (prompt.count("About agents.\\nLists them."), prompt.count("About agents.")) == (1, 1)
    events: Any = list(client.responses.create(**asked, stream=True))
    for kind in ("response.output_item.added", "response.output_item.done"):
        items = [event.item for event in events if event.type == kind]
        assert [(item.name, item.namespace) for item in items] == [("list", "agents"), ("weather", None)]
    outputs = [{"type": "function_call_output", "call_id": item.call_id, "output": "x"} for item in made.output]
    client.responses.create(**{**asked, "input": [{"role": "user", "content": "Hi!"}, *made.output, *outputs]})
    assert '{"name": "agents__list", "arguments": {}}' in prompt_of(gateway, tokenizer)


def test_a_call_that_is_forced_into_a_namespace(gateway: RunningGateway, tokenizer: Tokenizer) -> None:
    say(gateway, tokenizer, "{}")
    for name, tools in (("stop", [AGENTS]), ("agents__list", [AGENTS, FILES]), ("files__list", [AGENTS, FILES])):
        reply = ask(gateway, tools=tools, tool_choice={"type": "function", "name": name})
        assert reply.status_code == 200, reply.text
        (call,) = reply.json()["output"]
        assert f"{call['namespace'].removesuffix('__')}__{call['name']}".endswith(name)
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "namespace", "name": "agents"}]}
    assert ask(gateway, tools=[AGENTS, FILES], tool_choice=choice).status_code == 200
    schema = str(gateway.verify[0].requests[-1].sampling.grammar)
    assert ("agents__stop" in schema, "files__" in schema) == (True, False)


DEEP: dict[str, Any] = {}
for _ in range(40):
    DEEP = {"items": DEEP}


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"tools": [AGENTS, AGENTS]}, "invalid_value", "tools[1].tools[0].name"),
        ({"tools": [AGENTS, {**LIST, "name": "agents__list"}]}, "invalid_value", "tools[1].name"),
        ({"tools": [WEATHER, {**AGENTS, "tools": [LIST, {**LIST, "name": "f", "parameters": DEEP}]}]},
         "invalid_json_schema", "tools[1].tools[1].parameters"),
        ({"tools": [SEARCH, {**WEATHER, "parameters": DEEP}]}, "invalid_json_schema", "tools[1].parameters"),
        ({"tools": [{"type": "namespace", "tools": [LIST]}]}, "missing_required_parameter", "tools[0].name"),
        ({"tools": [{"type": "namespace", "name": "a"}]}, "missing_required_parameter", "tools[0].tools"),
        ({"tools": [{**AGENTS, "tools": [{"type": "function"}]}]}, "missing_required_parameter",
         "tools[0].tools[0].name"),
        ({"tools": [{**AGENTS, "tools": [{**LIST, "name": f"f{n}"} for n in range(100)]},
                    {**FILES, "tools": [{**LIST, "name": f"f{n}"} for n in range(100)]}]},
         "array_above_max_length", "tools"),
        ({"tools": [AGENTS, FILES], "tool_choice": {"type": "function", "name": "list"}}, "invalid_value",
         "tool_choice.name"),
        ({"tools": [SEARCH], "tool_choice": {"type": "function", "name": "list"}}, "invalid_value",
         "tool_choice.name"),
        ({"tools": [AGENTS], "tool_choice": {"type": "allowed_tools", "tools": [{"type": "namespace", "name": "b"}]}},
         "invalid_value", "tool_choice.tools[0].name"),
        ({"tools": [AGENTS], "tool_choice": {"type": "allowed_tools", "tools": [{"type": "namespace"}]}},
         "missing_required_parameter", "tool_choice.tools[0].name"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_tools_has_its_place(
    gateway: RunningGateway, fields: dict[str, Any], code: str, param: str
) -> None:
    check_refused(ask(gateway, **fields), code, param)


# ---- Items

USER: Any = {"role": "user", "content": "Hi!"}


def said(name: str, arguments: dict[str, Any], result: str) -> str:
    """A call and its result as the template writes them."""
    call = f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
    return f"{call}<|im_end|>\n<|im_start|>user\n<tool_response>\n{result}\n</tool_response><|im_end|>"


@pytest.mark.parametrize(
    ("items", "told"),
    [
        ([{"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "+1"},
          {"type": "custom_tool_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "Done."}]}],
         said("patch", {"input": "+1"}, "Done.")),
        ([{"type": "function_call", "call_id": "c", "namespace": "agents", "name": "list", "arguments": "{}"},
          {"type": "function_call_output", "call_id": "c", "output": "None."}], said("agents__list", {}, "None.")),
        ([{"type": "local_shell_call", "id": "i", "call_id": "c", "action": {"type": "exec", "command": ["ls"]}},
          {"type": "local_shell_call_output", "id": "c", "output": "a.txt"}],
         said("local_shell", {"type": "exec", "command": ["ls"]}, "a.txt")),
        ([{"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}},
          {"type": "shell_call_output", "call_id": "c",
           "output": [{"stdout": "a", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]}],
         said("shell", {"commands": ["ls"]},
              '[{"stdout":"a","stderr":"","outcome":{"type":"exit","exit_code":0}}]')),
        ([{"type": "apply_patch_call", "call_id": "c", "operation": {"type": "delete_file", "path": "a"}},
          {"type": "apply_patch_call_output", "call_id": "c", "status": "completed"}],
         said("apply_patch", {"type": "delete_file", "path": "a"}, "completed")),
        ([{"type": "mcp_call", "id": "m", "server_label": "s", "name": "f", "arguments": '{"a": 1}', "output": "2"}],
         said("f", {"a": 1}, "2")),
        ([{"type": "mcp_call", "id": "m", "name": "f", "arguments": "{}", "error": {"code": 3}}],
         said("f", {}, '{"code":3}')),
        ([{"type": "code_interpreter_call", "id": "m", "code": "1+1", "outputs": [{"type": "logs", "logs": "2"}]}],
         said("code_interpreter", {"code": "1+1"}, '[{"type":"logs","logs":"2"}]')),
        ([{"type": "code_interpreter_call", "id": "m", "code": None, "outputs": []}],
         said("code_interpreter", {"code": None}, "[]")),
        ([{"type": "file_search_call", "id": "m", "queries": ["q"], "results": [{"text": "t"}]}],
         said("file_search", {"queries": ["q"]}, '[{"text":"t"}]')),
    ],
)  # fmt: skip
def test_calls_of_other_tools_are_told(
    strict: RunningGateway, tokenizer: Tokenizer, items: list[Any], told: str
) -> None:
    reply = ask(strict, input=[USER, *items])
    assert reply.status_code == 200, reply.text
    assert told in prompt_of(strict, tokenizer)


UNREAD: Any = [
    {"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search", "query": "q"}},
    {"type": "file_search_call", "id": "f", "status": "completed", "queries": ["q"]},
    {"type": "tool_search_call", "arguments": {"query": "q"}, "call_id": "c"},
    {"type": "tool_search_output", "call_id": "c", "tools": [AGENTS]},
    {"type": "mcp_list_tools", "id": "m", "server_label": "s", "tools": []},
    {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "abc"},
]


@pytest.mark.parametrize("place", [0, 1])
def test_items_that_hold_nothing_are_left_out_and_counted(
    gateway: RunningGateway, tokenizer: Tokenizer, place: int
) -> None:
    assert ask(gateway, input=[USER]).status_code == 200
    prompt, before = prompt_of(gateway, tokenizer), num_left_out(gateway)
    items = [USER]
    items[place:place] = UNREAD
    reply = ask(gateway, input=items)
    assert reply.status_code == 200, reply.text
    assert (prompt_of(gateway, tokenizer), num_left_out(gateway)) == (prompt, before + len(UNREAD))


@pytest.mark.parametrize("item", UNREAD)
def test_strict_names_the_item(strict: RunningGateway, item: dict[str, Any]) -> None:
    part = "encrypted_content" if item["type"] == "reasoning" else "type"
    check_refused(ask(strict, input=[USER, item]), "unsupported_value", f"input[1].{part}")


def test_reasoning_that_can_be_read_is_no_loss(strict: RunningGateway) -> None:
    empty = {"type": "reasoning", "id": "r", "summary": []}
    read = {**empty, "summary": [{"type": "summary_text", "text": "Hm."}], "encrypted_content": "abc"}
    assert ask(strict, input=[USER, empty, read]).status_code == 200


@pytest.mark.parametrize(
    ("item", "code", "param"),
    [
        ({"id": "x"}, "unsupported_value", "input[1].type"),
        ({"type": "item_reference", "id": "x"}, "unsupported_value", "input[1].type"),
        ({"type": "compaction", "encrypted_content": "x"}, "unsupported_value", "input[1].type"),
        ({"type": "computer_call", "id": "x", "action": {}}, "unsupported_value", "input[1].type"),
        ({"type": "image_generation_call", "id": "x", "result": "x"}, "unsupported_value", "input[1].type"),
        ({"type": "custom_tool_call", "call_id": "c", "name": "f"}, "missing_required_parameter", "input[1].input"),
        ({"type": "custom_tool_call", "name": "f", "input": "x"}, "missing_required_parameter", "input[1].call_id"),
        ({"type": "local_shell_call", "call_id": "c", "action": DEEP}, "invalid_value", "input[1].action"),
        ({"type": "mcp_call", "name": "f", "arguments": "{}"}, "missing_required_parameter", "input[1].id"),
        ({"type": "apply_patch_call_output", "call_id": "c"}, "missing_required_parameter", "input[1].status"),
        ({"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}, "invalid_type",
         "input[1].arguments"),
        ({"type": "function_call_output", "call_id": "c", "output": [{"text": "x"}]}, "missing_required_parameter",
         "input[1].output[0].type"),
    ],
)  # fmt: skip
def test_items_that_are_refused(gateway: RunningGateway, item: dict[str, Any], code: str, param: str) -> None:
    check_refused(ask(gateway, input=[USER, item]), code, param)


# ---- Settings of OpenAI's


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions"])
def test_settings_of_a_cache_that_change_nothing(strict: RunningGateway, path: str) -> None:
    body: Any = {"input": "Hi!"} if path.endswith("responses") else {"messages": [USER]}
    options = {"mode": "explicit", "ttl": "30m"}
    known = {**body, "prompt_cache_retention": "24h", "prompt_cache_options": options, "moderation": None}
    assert httpx.post(strict.url + path, json=known).status_code == 200
    for asked in ({"prompt_cache_options": {"prewarm": True}}, {"moderation": {"model": "m"}}):
        check_refused(httpx.post(strict.url + path, json={**body, **asked}), "unsupported_value", next(iter(asked)))


def test_a_context_is_not_compacted(gateway: RunningGateway) -> None:
    assert ask(gateway, context_management=[]).status_code == 200
    check_refused(ask(gateway, context_management=[{"type": "compaction"}]), "unsupported_value", "context_management")
