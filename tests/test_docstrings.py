"""A docstring can be read without the name above it: it does not begin with Of, That or As."""

from __future__ import annotations

import ast

from tests.test_imports import ALLOWED, ROOT, sources

_KINDS = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def test_docstrings_do_not_go_on_from_the_name() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {said.splitlines()[0]}"
        for package in [*ALLOWED, "tests"]
        for path in sources(package)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path)))
        if isinstance(node, _KINDS) and (said := ast.get_docstring(node)) and said.split()[0] in {"Of", "That", "As"}
    ]
    assert wrong == []
