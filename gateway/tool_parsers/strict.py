"""Grammars for text that may hold calls of strict functions: free text is free, a call keeps to its schema.

Lark, as llguidance takes it. The JSON is in the style that verify gives all structured output.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gateway.json_schema import moved
from outrider.wire import JSON_STYLE

Schemas = Mapping[str, Mapping[str, Any]]


def tagged(schemas: Schemas) -> str:
    """`<tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call>`, any number of times within text."""
    either, rules = _calls(schemas, "arguments")
    return (
        '%llguidance {}\nstart: call* TEXT\nTEXT: /(.|\\n)*/\nbegin[lazy]: TEXT "<tool_call>"\n'
        f'call: begin "\\n" ({either}) "\\n</tool_call>"\n{rules}\n'
    )


def bare(schemas: Schemas) -> str:
    """`{"name": ..., "parameters": ...}; {...}` as the whole output, or text that does not begin with a brace."""
    either, rules = _calls(schemas, "parameters")
    return (
        "%llguidance {}\nstart: TEXT | calls\nTEXT: /([^{\\s](.|\\n)*)?/\n"
        f'calls: ({either}) ("; " ({either}))*\n{rules}\n'
    )


def _calls(schemas: Schemas, key: str) -> tuple[str, str]:
    """The rules' names as alternatives, and the rules: a call each."""
    rules = {
        f"call_{index}": f"%json {json.dumps(_call(name, key, schema), ensure_ascii=False)}"
        for index, (name, schema) in enumerate(schemas.items())
    }
    return " | ".join(rules), "\n".join(f"{rule}: {body}" for rule, body in rules.items())


def _call(name: str, key: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "object", "properties": {"name": {"const": name}, key: moved(schema, f"#/properties/{key}")},
        "required": ["name", key], "additionalProperties": False, "x-guidance": JSON_STYLE,
    }  # fmt: skip
