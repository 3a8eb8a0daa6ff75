from __future__ import annotations

from pathlib import Path

import pytest

from bench._systems import DEFAULT, SYSTEMS, Setup, parse_entries
from outrider.args import ServeArgs
from outrider.errors import StartupError

SETUP = Setup(
    model_path=Path("/model"), gguf=lambda kind: Path(f"/model.{kind}.gguf"), threads=3, context_length=512,
    llama_server=Path("/llama-server"), vllm_python=Path("/vllm/python"),
)  # fmt: skip


def test_loads_of_each_system() -> None:
    entries = parse_entries("outrider, vllm@1+8,llama.cpp-q8@1,transformers", [1, 8, 32])
    assert [(entry.system.name, entry.streams) for entry in entries] == [
        ("outrider", (1, 8, 32)), ("vllm", (1, 8)), ("llama.cpp-q8", (1,)), ("transformers", (1,)),
    ]  # fmt: skip


def test_a_system_may_run_twice_under_two_names() -> None:
    one, other = parse_entries("outrider@16,outrider#2@16", [1])
    assert (other.system.name, other.system.launch, other.streams) == ("outrider#2", one.system.launch, (16,))


def test_the_default_names_what_there_is() -> None:
    assert len(parse_entries(DEFAULT, [1, 8])) == len(DEFAULT.split(","))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("outrider,sglang", "no system 'sglang'"),
        ("vllm,vllm@1", "named twice; vllm#2 is another of its kind"),
        ("vllm#", "no system 'vllm#'"),
        ("vllm#two", "no system 'vllm#two'"),
        ("sglang#2", "no system 'sglang#2'"),
        ("vllm@one", "numbers of streams"),
        ("vllm@0", "takes 1 to"),
        ("transformers@2", "takes 1 to 1"),
        ("", "names none"),
    ],
)
def test_nonsense_is_refused(text: str, says: str) -> None:
    with pytest.raises(StartupError, match=says):
        parse_entries(text, [1])


def test_a_system_without_its_loads_is_refused() -> None:
    with pytest.raises(StartupError, match="at most 1 streams"):
        parse_entries("transformers", [8])


@pytest.mark.parametrize("name", [name for name in SYSTEMS if name.startswith("outrider")])
def test_our_own_flags_are_taken(name: str) -> None:
    launch = SYSTEMS[name].launch(SETUP, 1234, 8)
    settings = ServeArgs.parse(launch.command[launch.command.index("serve") + 1 :])
    assert (settings.port, settings.threads, settings.max_running_requests) == (1234, 3, 8)
    drafter = next((part.upper() for part in ("ngram", "eagle3") if f"-{part}" in name), "NONE")
    assert settings.algorithm == drafter
    assert (
        settings.quantization
        == {"bf16": None, "int8": "int8_dynamic" if "dynamic" in name else "int8"}[SYSTEMS[name].precision]
    )


def test_all_get_the_same_room() -> None:
    llama = SYSTEMS["llama.cpp-q8-ngram"].launch(SETUP, 1234, 8).command
    assert llama[llama.index("--model") + 1] == "/model.q8_0.gguf"
    assert llama[llama.index("--ctx-size") + 1] == str(8 * 512)
    assert llama[llama.index("--threads") + 1] == "3"
    assert "--spec-type" in llama
    vllm = SYSTEMS["vllm"].launch(SETUP, 1234, 8)
    assert vllm.command[vllm.command.index("--max-model-len") + 1] == "512"
    assert vllm.environment["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(("name", "flag"), [("vllm", "--vllm-python"), ("llama.cpp", "--llama-server")])
def test_what_is_not_there_is_named(name: str, flag: str) -> None:
    with pytest.raises(StartupError, match=flag):
        SYSTEMS[name].launch(Setup(Path("/model"), SETUP.gguf), 1234, 1)
