"""`make setup` with fake Pythons: which of them a .venv is made with, and when it is made anew."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STAND_IN = """#!/bin/sh
for last; do :; done
case "$*" in
    *_base_executable*) echo NAME ;;
    *ensurepip*) echo 100 ;;
    "-m venv "*)
        case "$*" in *--clear*) rm -rf "$last" ;; esac
        mkdir -p "$last/bin" && touch "$last/pyvenv.cfg" && cp "$0" "$last/bin/python" ;;
    "-m pip install "*) echo "NAME $LC_ALL $*" >>pip.log ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with the Makefile and scripts, and with two Pythons below `pythons`."""
    folder = tmp_path / "ö"
    shutil.copytree(ROOT / "scripts", folder / "scripts")
    shutil.copy(ROOT / "Makefile", folder)
    for name in ("pyproject.toml", "constraints.txt"):
        (folder / name).touch()
    for name in ("first", "second"):
        python = folder / "pythons" / name
        python.parent.mkdir(exist_ok=True)
        python.write_text(STAND_IN.replace("NAME", name))
        python.chmod(0o755)
    make(folder, "setup", PYTHON="pythons/first")
    assert maker(folder) == "first"
    (folder / ".venv" / "kept").touch()
    (folder / ".venv" / ".set-up").unlink()
    (folder / "pythons" / "python3.12").symlink_to("second")  # what is found where none is named
    return folder


def make(folder: Path, target: str, **variables: str) -> None:
    known = {"PATH": f"{folder}/pythons:{os.environ['PATH']}", "LC_ALL": "C", **variables}
    subprocess.run(["make", target], cwd=folder, env=known, check=True, capture_output=True)


def maker(folder: Path) -> str:
    """The Python for which packages were installed last."""
    return (folder / "pip.log").read_text().splitlines()[-1].split()[0]


@pytest.mark.parametrize("variables", [{}, {"PYTHON": "pythons/first"}])
def test_a_venv_that_works_stays(checkout: Path, variables: dict[str, str]) -> None:
    make(checkout, "setup", **variables)
    assert (maker(checkout), (checkout / ".venv" / "kept").exists()) == ("first", True)


def test_another_python_makes_it_anew(checkout: Path) -> None:
    make(checkout, "setup", PYTHON="pythons/second")
    assert (maker(checkout), (checkout / ".venv" / "kept").exists()) == ("second", False)


def test_one_whose_python_is_gone_is_made_anew(checkout: Path) -> None:
    (checkout / ".venv" / "bin" / "python").unlink()
    make(checkout, "setup", PYTHON="pythons/second")
    assert (maker(checkout), (checkout / ".venv" / "kept").exists()) == ("second", False)


def test_a_folder_that_is_none_is_not_emptied(checkout: Path) -> None:
    mine = checkout / "mine"
    mine.mkdir()
    (mine / "letter").touch()
    known = {"PATH": f"{checkout}/pythons:{os.environ['PATH']}", "PYTHON": "pythons/first"}
    refused = subprocess.run(["make", "setup", "VENV=mine"], cwd=checkout, env=known, capture_output=True, text=True)
    assert refused.returncode
    assert "mine is no virtual environment" in refused.stderr
    assert (mine / "letter").exists()


def test_the_path_is_written_in_letters_that_it_has(checkout: Path) -> None:
    lines = (checkout / "pip.log").read_text().splitlines()
    assert [line.split()[1] for line in lines if "--editable" in line] == ["C.UTF-8"]


def test_the_demo_needs_no_tools_for_tests(checkout: Path) -> None:
    (checkout / "pip.log").unlink()
    make(checkout, "demo", PYTHON="pythons/second")
    installed = (checkout / "pip.log").read_text()
    assert "--editable" in installed
    assert "dev" not in installed
    make(checkout, "setup")
    assert "--group dev" in (checkout / "pip.log").read_text().removeprefix(installed)
