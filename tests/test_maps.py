"""Each package has a map, which names all of its modules and packages, each once: its docstring, as a rule."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.test_imports import ALLOWED, ROOT

ELSEWHERE = {"kernels": ROOT / "docs" / "kernels.md"}  # whose __init__.py is empty
GENERATED = {"outrider/v1"}
PACKAGES = sorted(
    str(path.parent.relative_to(ROOT)) for package in ALLOWED for path in (ROOT / package).rglob("__init__.py")
)
MOST_LINES = 100
_ROW = re.compile(r"^    (\w+(?:, \w+)*) {2,}\S", re.MULTILINE)


def modules(folder: Path) -> list[str]:
    """Names of the modules and packages right below a package."""
    found = [path.stem for path in folder.glob("*.py") if path.name != "__init__.py"]
    return sorted([*found, *(path.parent.name for path in folder.glob("*/__init__.py"))])


def map_of(package: str) -> str:
    """A package's map, as text."""
    if package in ELSEWHERE:
        (found,) = re.findall(r"```text\n(.*?)```", ELSEWHERE[package].read_text(encoding="utf-8"), re.DOTALL)
        return found
    return ast.get_docstring(ast.parse((ROOT / package / "__init__.py").read_text(encoding="utf-8"))) or ""


@pytest.mark.parametrize("package", [package for package in PACKAGES if package not in GENERATED])
def test_a_map_names_each_module_of_its_package(package: str) -> None:
    text = map_of(package)
    assert sorted(name for row in _ROW.findall(text) for name in row.split(", ")) == modules(ROOT / package)
    assert text.count("\n") < MOST_LINES
