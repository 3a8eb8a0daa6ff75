"""`outrider serve --colocate`: verify and draft in one process say what they say apart, and end as cleanly."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.e2e.small_model import write_small_model
from tests.e2e.stack import serve

SMALL = (
    "--speculative-algorithm=NGRAM", "--dtype=float32", "--device=cpu", "--threads=1", "--max-total-tokens=4096",
    "--disable-speculation-brake",
)  # fmt: skip
PROMPTS = [[5, 6, 7], [11, 12, 13, 14], [40]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model's folder."""
    return write_small_model(tmp_path_factory.mktemp("model"))


@pytest.mark.slow
def test_one_process_says_what_two_say(model: Path) -> None:
    answers: dict[bool, list[list[int]]] = {}
    for colocate in (False, True):
        flags = [f"--model-path={model}", *SMALL, *(["--colocate"] if colocate else [])]
        with serve(*flags) as stack:
            asked = {"temperature": 0, "max_new_tokens": 48, "ignore_eos": True}
            sampled = {"temperature": 1.0, "sampling_seed": 3, "max_new_tokens": 48, "ignore_eos": True}
            answers[colocate] = [stack.generate(ids, **asked)["output_ids"] for ids in PROMPTS]
            answers[colocate] += [stack.generate(ids, **sampled)["output_ids"] for ids in PROMPTS]
            plain = [stack.generate(ids, speculate=False, **asked)["output_ids"] for ids in PROMPTS]
            assert answers[colocate][: len(PROMPTS)] == plain
            accepted = 0
            while not accepted:  # on a busy machine drafts may all come too late
                again = stack.generate(PROMPTS[0], **asked)
                assert again["output_ids"] == plain[0]
                accepted = again["meta_info"].get("spec_accepted_drafts", 0)
            if colocate:
                check_process(stack.process.lines, stack.child("colocated"))
                with pytest.raises(AssertionError):
                    stack.child("draft")
        assert not any("by force" in line for line in stack.process.lines)
    assert answers[False] == answers[True]


def _start_of(metrics: str) -> str:
    return next(line.split()[1] for line in metrics.splitlines() if line.startswith("process_start_time_seconds "))


def check_process(lines: list[str], pid: int) -> None:
    """Checks that both services' metrics are those of the one process."""
    (said,) = [line for line in lines if line.startswith("Metrics at ")]
    verify, draft, _ = [httpx.get(url, timeout=60).text for url in said.removeprefix("Metrics at ").split()]
    assert f"process_start_time_seconds {_start_of(verify)}" in draft
    assert Path(f"/proc/{pid}/cmdline").read_bytes().count(b"\0--\0") == 1
