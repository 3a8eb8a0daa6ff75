"""The systems that `bench peers` compares: how each is started as a server on the same model, and what it takes.

Each gets the same number of threads, as many streams as the run will open, and room for the same context length.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from outrider.errors import StartupError

OURS_READY = "Outrider serves "  # what `outrider serve` says once its drafter has enlisted too


@dataclass(frozen=True)
class Setup:
    """What all servers have in common. `gguf` gives llama.cpp's file of a precision; it is asked only when needed."""

    model_path: Path
    gguf: Callable[[str], Path]
    threads: int = 2
    context_length: int = 1536
    llama_server: Path | None = None
    llama_ngram: str = "--spec-type ngram-simple --spec-ngram-simple-size-n 4 --spec-ngram-simple-size-m 8"
    vllm_python: Path | None = None
    vllm_eager: bool = False


@dataclass(frozen=True)
class Launch:
    """A server's command line, and what it needs in its environment beside ours.

    ready: what it says once it serves as it is meant to, where its health does not tell; ours without its drafter does.
    """

    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    ready: str = ""


@dataclass(frozen=True)
class System:
    """One way to serve the model. `precision` says which systems may be compared; `launch(setup, port, streams)`."""

    name: str
    precision: str
    launch: Callable[[Setup, int, int], Launch]
    max_streams: int | None = None

    @property
    def ours(self) -> bool:
        """Whether it is Outrider."""
        return self.name.startswith("outrider")


def _outrider(*flags: str) -> Callable[[Setup, int, int], Launch]:
    def launch(setup: Setup, port: int, streams: int) -> Launch:
        return Launch(
            [
                sys.executable, "-P", "-m", "outrider", "serve", "--model-path", str(setup.model_path),
                "--port", str(port), "--threads", str(setup.threads), "--dtype", "bfloat16",
                "--context-length", str(setup.context_length), "--max-running-requests", str(streams), *flags,
            ],
            {"OUTRIDER_LOG_LEVEL": "warning"},
            ready=OURS_READY,
        )  # fmt: skip

    return launch


def _vllm(*flags: str) -> Callable[[Setup, int, int], Launch]:
    def launch(setup: Setup, port: int, streams: int) -> Launch:
        if setup.vllm_python is None:
            raise StartupError("vLLM is measured with --vllm-python PATH, or --install FOLDER")
        eager = ["--enforce-eager"] if setup.vllm_eager else []
        return Launch(
            [
                str(setup.vllm_python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(setup.model_path),
                "--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16",
                "--max-model-len", str(setup.context_length), "--max-num-seqs", str(streams), *eager, *flags,
            ],
            {
                "OMP_NUM_THREADS": str(setup.threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
                # Else the model runs in a worker process of its own, which is one more to share the cores with.
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                # On CPUs 0.32 cannot load what this saves, and compiles at each start; inductor's own cache works.
                "VLLM_USE_AOT_COMPILE": "0",
            },
        )  # fmt: skip

    return launch


def _llama(precision: str, *, ngram: bool = False) -> Callable[[Setup, int, int], Launch]:
    def launch(setup: Setup, port: int, streams: int) -> Launch:
        if setup.llama_server is None:
            raise StartupError("llama.cpp is measured with --llama-server PATH, or --install FOLDER")
        return Launch([
            str(setup.llama_server), "--model", str(setup.gguf(precision)), "--host", "127.0.0.1", "--port", str(port),
            "--threads", str(setup.threads), "--threads-batch", str(setup.threads), "--parallel", str(streams),
            # No prompt comes twice: a store of past ones would only cost it time.
            "--ctx-size", str(setup.context_length * streams), "--cache-ram", "0", "--no-ui",
            *(setup.llama_ngram.split() if ngram else ()),
        ])  # fmt: skip

    return launch


def _transformers(setup: Setup, port: int, streams: int) -> Launch:
    return Launch(
        [sys.executable, "-P", "-m", "bench._transformers_server", str(setup.model_path), str(port)],
        {"OMP_NUM_THREADS": str(setup.threads), "HF_HUB_OFFLINE": "1"},
    )


PLAIN = ("--speculative-algorithm", "NONE")
NGRAM = ("--speculative-algorithm", "NGRAM")
EAGLE3 = ("--speculative-algorithm", "EAGLE3")
VLLM_NGRAM = json.dumps({"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4})

SYSTEMS: Mapping[str, System] = {
    system.name: system
    for system in (
        System("outrider", "bf16", _outrider(*PLAIN)),
        System("outrider-ngram", "bf16", _outrider(*NGRAM)),
        System("outrider-ngram-colocated", "bf16", _outrider(*NGRAM, "--colocate")),
        System("outrider-eagle3", "bf16", _outrider(*EAGLE3)),
        System("outrider-eagle3-colocated", "bf16", _outrider(*EAGLE3, "--colocate")),
        System("outrider-int8", "int8", _outrider(*PLAIN, "--quantization", "int8")),
        System("outrider-int8-ngram", "int8", _outrider(*NGRAM, "--quantization", "int8")),
        System("outrider-int8-dynamic", "int8", _outrider(*PLAIN, "--quantization", "int8_dynamic")),
        System("outrider-int8-dynamic-ngram", "int8", _outrider(*NGRAM, "--quantization", "int8_dynamic")),
        System("outrider-int8-dynamic-eagle3", "int8", _outrider(*EAGLE3, "--quantization", "int8_dynamic")),
        System("transformers", "bf16", _transformers, max_streams=1),
        System("vllm", "bf16", _vllm()),
        System("vllm-ngram", "bf16", _vllm("--speculative-config", VLLM_NGRAM)),
        System("llama.cpp", "bf16", _llama("bf16")),
        System("llama.cpp-ngram", "bf16", _llama("bf16", ngram=True)),
        System("llama.cpp-q8", "int8", _llama("q8_0")),
        System("llama.cpp-q8-ngram", "int8", _llama("q8_0", ngram=True)),
    )
}
DEFAULT = (
    "outrider,outrider-ngram,outrider-eagle3,transformers,vllm,llama.cpp,llama.cpp-ngram@1,outrider-int8@1,"
    "llama.cpp-q8@1"
)


@dataclass(frozen=True)
class Entry:
    """A system and the loads, in streams, that it is put under."""

    system: System
    streams: tuple[int, ...]


def parse_entries(text: str, streams: list[int]) -> list[Entry]:
    """`outrider,outrider#2,llama.cpp-q8@1,vllm@1+8`: systems, each under all of `streams`, or those after its @.

    With # and a number it is one more of the same kind.

    StartupError for an unknown name or number, a system named twice, and one that takes no more than fewer streams.
    """
    entries: list[Entry] = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        name, _, own = word.partition("@")
        kind, again, number = name.partition("#")
        if kind not in SYSTEMS or (again and not number.isdecimal()):
            raise StartupError(f"there is no system {name!r}; {', '.join(SYSTEMS)} are, and each with # and a number")
        if any(entry.system.name == name for entry in entries):
            raise StartupError(f"system {name} is named twice; {kind}#2 is another of its kind")
        system = replace(SYSTEMS[kind], name=name)
        try:
            wanted = [int(number) for number in own.split("+")] if own else streams
        except ValueError as error:
            raise StartupError(f"{word}: after @ come numbers of streams, as in {name}@1+8") from error
        if own and (min(wanted) < 1 or max(wanted) > (system.max_streams or max(wanted))):
            raise StartupError(f"{word}: {name} takes 1 to {system.max_streams or 'any number of'} streams")
        taken = tuple(number for number in wanted if number <= (system.max_streams or number))
        if not taken:
            raise StartupError(f"{name} takes at most {system.max_streams} streams; give --concurrency 1 too")
        entries.append(Entry(system, taken))
    if not entries:
        raise StartupError("--systems names none")
    return entries
