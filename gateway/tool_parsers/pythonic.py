"""Calls as a list in Python's syntax: `[f(a=1, b="x"), g()]`, as Llama 3.2 and 4 write them.

Read by Python's parser and never run: names, keyword arguments and literals are all that is taken.
"""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Iterator
from typing import Any

from gateway.message_parts import CallArguments, CallBegin, Content, Part, taken
from gateway.tool_parsers.json_text import encodable

_MAX_CHARS = 64 * 1024
_WORDS = {"true": True, "false": False, "null": None}


class PythonicCalls:
    """One choice's text: held whole when it begins with a bracket, and told as calls or as text at the end."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._held: list[str] = []
        self._num_held = 0  # characters
        self._first = ""  # that is no white space
        self._plain = False

    def push(self, text: str) -> Iterator[Part]:
        """The text, but nothing while it may be calls."""
        self._held.append(text)
        self._num_held += len(text)
        self._first = self._first or text.lstrip()[:1]
        if self._plain or self._first not in ("", "[") or self._num_held > _MAX_CHARS:
            self._plain = True
            yield Content(taken(self._held))

    def finish(self) -> Iterator[Part]:
        """The calls, or the text."""
        held = taken(self._held)
        calls = self._calls(held.strip())
        if calls is None:
            if held:
                yield Content(held)
            return
        for index, (name, arguments) in enumerate(calls):
            yield CallBegin(index, name)
            yield CallArguments(index, arguments)

    def _calls(self, text: str) -> list[tuple[str, str]] | None:
        try:
            with warnings.catch_warnings(action="ignore"):  # of odd literals, which are text to us
                tree = ast.parse(text, mode="eval").body
            if not isinstance(tree, ast.List) or not tree.elts:
                return None
            return [self._call(node) for node in tree.elts]
        except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
            return None

    def _call(self, node: ast.expr) -> tuple[str, str]:
        if not isinstance(node, ast.Call) or node.args or not isinstance(node.func, ast.Name):
            raise ValueError("no call by keywords")
        if node.func.id not in self._names:
            raise ValueError("not offered")
        arguments: dict[str, Any] = {}
        for keyword in node.keywords:
            if keyword.arg is None:
                raise ValueError("unpacks")
            arguments[keyword.arg] = _literal(keyword.value)
        return node.func.id, encodable(json.dumps(arguments, ensure_ascii=False, allow_nan=False))


def _literal(node: ast.expr) -> Any:
    """A JSON value; JSON's own words are taken for Python's."""
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        return {_key(key): _literal(value) for key, value in zip(node.keys, node.values, strict=True)}
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | bool | None):
        raise ValueError("no JSON value")
    return value


def _key(node: ast.expr | None) -> str:
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        raise ValueError("no JSON key")
    return node.value
