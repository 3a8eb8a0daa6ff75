"""Imports point one way. The table below is the rule; what a process loads is checked by loading it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Which of our packages each of them may import, itself aside; and so for folders of programs.
ALLOWED: dict[str, set[str]] = {
    "outrider": set(),
    "kernels": set(),
    "engine": {"outrider", "kernels"},
    "verify_service": {"outrider", "kernels", "engine"},
    "draft_service": {"outrider", "kernels", "engine"},
    "gateway": {"outrider"},
    "training": {"outrider", "kernels", "engine"},
    "bench": {"outrider", "kernels", "engine", "verify_service", "draft_service", "gateway", "training"},
    "deploy": {"outrider", "gateway"},
    "examples/python": {"outrider"},
}
NO_TORCH = ("outrider", "gateway")


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Every import of a file, also those inside functions: line, and the module's full name."""
    package = path.parent.relative_to(ROOT).parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("package", [name for name in ALLOWED if (ROOT / name).is_dir()])
def test_a_package_imports_only_what_it_may(package: str) -> None:
    forbidden = ALLOWED.keys() - ALLOWED[package] - {package} | {"tests"}
    if package in NO_TORCH:
        forbidden |= {"torch", "transformers"}
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sources(package)
        for line, name in imports(path)
        if name.partition(".")[0] in forbidden
    ]
    assert wrong == []


def test_every_package_has_a_rule() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages - {"tests"} <= ALLOWED.keys()


def test_kernels_init_is_empty() -> None:
    """`kernels/__init__.py` is empty, since transformers imports it when it looks for the Hugging Face package."""
    assert (ROOT / "kernels" / "__init__.py").read_text() == ""


def reads_environment(node: ast.AST) -> bool:
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        return ast.unparse(node.value) == "os.environ"
    return isinstance(node, ast.Attribute) and ast.unparse(node) in {"os.environ.get", "os.getenv"}


def test_only_env_reads_the_environment() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for package in ALLOWED
        for path in sources(package)
        if path != ROOT / "outrider" / "env.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path)))
        if isinstance(node, ast.expr) and reads_environment(node)
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("load", "heavy"),
    [
        ("outrider.cli", {"torch", "numba", "transformers", "starlette"}),
        ("outrider.launcher", {"torch", "numba", "transformers", "starlette"}),
        ("outrider.chat", {"torch", "numba", "transformers"}),
        ("gateway.app", {"torch", "numba", "transformers"}),
        ("draft_service.app", {"torch", "transformers"}),
        ("draft_service.worker", {"torch", "transformers"}),
        ("draft_service.service", {"torch", "transformers"}),
        ("draft_service.drafters.ngram", {"torch", "transformers"}),
        ("verify_service.app", {"transformers"}),
    ],
)
def test_what_a_module_loads(load: str, heavy: set[str]) -> None:
    script = f"import sys, {load}; sys.exit(', '.join({heavy!r} & sys.modules.keys()) or 0)"
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
