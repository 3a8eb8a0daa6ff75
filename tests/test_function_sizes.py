"""A function fits a screen: at most 40 lines of body; docstring, comments and empty lines are not counted."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tests.test_imports import ALLOWED, ROOT, sources

MOST_LINES = 40
# What was longer when this was first counted. It may be shortened, and then counts as it is or leaves the table.
LONGER = {
    "kernels/attention/triton_kernels.py attend": 48,
    "kernels/tree_growth_triton.py _grow_on": 53,
}
_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip


def body_lens(path: Path) -> Iterator[tuple[str, int]]:
    """The name of each of a file's functions, and the lines of code in its body."""
    text = path.read_text(encoding="utf-8")
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text, str(path))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[ast.get_docstring(node) is not None :]
            first, last = (body[0].lineno, body[-1].end_lineno or 0) if body else (1, 0)
            yield node.name, sum(line in code for line in range(first, last + 1))


def test_a_function_fits_a_screen() -> None:
    longer = {
        f"{path.relative_to(ROOT)} {name}": num_lines
        for package in ALLOWED
        for path in sources(package)
        if ROOT / "outrider" / "v1" not in path.parents  # generated
        for name, num_lines in body_lens(path)
        if num_lines > MOST_LINES
    }
    assert longer == LONGER
