"""A guide names each flag of each command, as far as its command line is made of settings: `outrider bench` has others.

What stands below in EXCEPTIONS is in `--help` alone, each for a reason.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import outrider.args
import training.args
from outrider.flags import Args, flag_of
from tests.test_imports import ROOT

_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]")
_PLAIN = "`outrider chat` has no guide: it is a client for a person at a terminal, who has --help there"
# By command, flags that no guide has to name, and why.
EXCEPTIONS: dict[str, dict[str, str]] = {
    "chat": dict.fromkeys(("--model", "--prompt", "--system", "--temperature", "--no-speculation"), _PLAIN),
}


def settings() -> Iterator[type[Args]]:
    """The settings of each command."""
    for package in (outrider.args, training.args):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            found = vars(importlib.import_module(module.name)).values()
            ours = [kind for kind in found if isinstance(kind, type) and kind.__module__ == module.name]
            yield from (kind for kind in ours if issubclass(kind, Args) and hasattr(kind, "command"))


SETTINGS = {kind.command: kind for kind in settings()}


def named_in_guides() -> set[str]:
    guides: list[Path] = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *ROOT.glob("*/README.md")]
    texts = (path.read_text(encoding="utf-8") for path in guides if not path.name.startswith("benchmarks"))
    return {flag for text in texts for flag in _FLAG.findall(text)}


@pytest.mark.parametrize("command", SETTINGS)
def test_a_guide_names_each_flag(command: str) -> None:
    flags = {flag_of(spec) for spec in dataclasses.fields(SETTINGS[command])}
    assert flags - named_in_guides() == EXCEPTIONS.get(command, {}).keys()


def test_exceptions_are_of_commands() -> None:
    assert SETTINGS.keys() >= EXCEPTIONS.keys() | {"verify", "draft", "gateway", "serve", "train head"}
