"""Texts to ask about, from what Python and the system bring: documentation, licences, docstrings.

What there is differs from machine to machine; prompts made of it differ too.
"""

from __future__ import annotations

import ast
import gzip
import random
import re
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from outrider.errors import StartupError

DOC_FOLDERS: Final = (Path("/usr/share/doc"), Path("/usr/share/common-licenses"), Path("/usr/share/perl"))
DOC_SUFFIXES: Final = {"", ".txt", ".md", ".rst", ".pod", ".gz"}
MIN_CHARS: Final = 150
MAX_CHARS: Final = 900
MAX_FILE_BYTES: Final = 400_000
_BLANK = re.compile(r"\n\s*\n")


class Passages:
    """Paragraphs of prose and documentation of code, drawn at random, in a fixed order for a given machine."""

    def __init__(self, prose: Iterable[str], code: Iterable[str]) -> None:
        self._prose = sorted(set(prose))
        self._code = sorted(set(code))
        if not self._prose or not self._code:
            raise StartupError("this machine has no documentation to make prompts of")

    @classmethod
    def of_system(cls) -> Passages:
        """Finds passages in this machine's documentation and Python's standard library."""
        code = list(docstrings(Path(sysconfig.get_path("stdlib"))))
        prose = [text for folder in DOC_FOLDERS for text in documents(folder)]
        return cls([*prose, *(text for text in code if is_prose(text))] or code, code)

    def prose(self, rng: random.Random) -> str:
        """Draws a paragraph."""
        return rng.choice(self._prose)

    def code(self, rng: random.Random) -> str:
        """A function or class with its documentation."""
        return rng.choice(self._code)


def documents(folder: Path) -> Iterator[str]:
    """Paragraphs of prose in the text files below `folder`; changelogs and copyright files left out, they are lists."""
    for path in sorted(folder.rglob("*")) if folder.is_dir() else ():
        name = path.name.lower()
        if path.suffix not in DOC_SUFFIXES or name.startswith(("changelog", "copyright", "news", "thanks", "authors")):
            continue
        if path.is_file() and path.stat().st_size <= MAX_FILE_BYTES:
            yield from paragraphs(_read(path))


def docstrings(folder: Path) -> Iterator[str]:
    """`def name(arguments)` and the docstring, of the functions and classes of the modules of `folder`."""
    for path in sorted(folder.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef) or node.name.startswith("_"):
                continue
            text = ast.get_docstring(node)
            if text is None or not MIN_CHARS <= len(text) <= MAX_CHARS:
                continue
            head = f"class {node.name}" if isinstance(node, ast.ClassDef) else f"def {node.name}({_arguments(node)})"
            yield f"{path.stem}: {head}\n\n{text}"


def paragraphs(text: str) -> Iterator[str]:
    """The prose of a text, a paragraph or several short ones at a time, lines joined."""
    for block in _BLANK.split(text):
        joined = " ".join(block.split())
        if MIN_CHARS <= len(joined) <= MAX_CHARS and is_prose(joined):
            yield joined


def is_prose(text: str) -> bool:
    """Sentences rather than tables, code or lists."""
    kept = sum(character.isalpha() or character in " ,.'" for character in text)
    words = text.split()
    return (
        text.isascii()
        and kept >= 0.94 * len(text)
        and text[:1].isupper()
        and text.rstrip()[-1:] in ".!?"
        and 3.5 < len(text) / max(len(words), 1) < 8
    )


def _arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    return ast.unparse(node.args)


def _read(path: Path) -> str:
    """Text of a file; empty when it is none or cannot be opened, for a machine's files are not ours to mend."""
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if path.suffix == ".gz" else data
        return data[:MAX_FILE_BYTES].decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError, zlib.error):
        return ""
