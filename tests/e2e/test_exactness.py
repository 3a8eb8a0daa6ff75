"""Greedy fp32 answers over HTTP are transformers' own, token for token, whatever drafts there are."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.conftest import MAX_TOKENS
from tests.e2e.reference import Answer, Comparison
from tests.e2e.stack import Stack, part, serve, socket_folder

Answers = list[tuple[list[int], Answer]]
FP32 = ("--dtype=float32", "--context-length=1024")


def _check(stack: Stack, answers: Answers, *, speculate: bool = True) -> list[dict]:
    comparison = Comparison()
    with ThreadPoolExecutor(4) as pool:
        results = list(
            pool.map(
                lambda pair: stack.generate(pair[0], speculate=speculate, temperature=0, max_new_tokens=MAX_TOKENS),
                answers,
            )
        )
    for result, (_, answer) in zip(results, answers, strict=True):
        comparison.check(result["output_ids"], answer)
    comparison.finish()
    return results


def _check_until(stack: Stack, answers: Answers, accepted: int, proposed: int = 0) -> list[dict]:
    """Asks until more than so many drafts are accepted, of more than so many: on a busy machine they may come late."""
    counts: list[tuple[int, int]] = []
    for _ in range(20):
        results = _check(stack, answers)
        metas = [result["meta_info"] for result in results]
        counts.append((sum(m["spec_accepted_drafts"] for m in metas), sum(m["spec_proposed_drafts"] for m in metas)))
        if counts[-1][0] > accepted and counts[-1][1] > proposed:
            return results
    pytest.fail(f"drafts accepted and proposed: {counts}, never more than {accepted} and {proposed}")


@pytest.mark.slow
def test_ngram_on_and_off(greedy_answers: Answers) -> None:
    with serve(*FP32, "--speculative-algorithm=NGRAM", "--disable-speculation-brake") as stack:
        drafted = _check(stack, greedy_answers)
        assert sum(result["meta_info"]["spec_accepted_drafts"] for result in drafted) > 0
        again = _check_until(stack, greedy_answers, 130)  # the prefix cache and a trie that knows the answers
        assert sum(result["meta_info"]["cached_tokens"] for result in again) > 0
        plain = _check(stack, greedy_answers, speculate=False)
        assert all(result["meta_info"].get("spec_proposed_drafts", 0) == 0 for result in plain)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [("--attention-backend=torch_native", "--page-size=16"), ("--page-size=64",)])
def test_other_attention_and_larger_pages(greedy_answers: Answers, flags: tuple[str, ...]) -> None:
    few = greedy_answers[:3]
    with serve(*FP32, "--speculative-algorithm=NGRAM", "--disable-speculation-brake", *flags) as stack:
        _check(stack, few)
        _check_until(stack, few, 40)
        _check(stack, few, speculate=False)


@pytest.mark.slow
def test_random_trees(greedy_answers: Answers) -> None:
    with socket_folder() as folder:
        address = f"unix:{folder}/verify.sock"
        verify = part("verify", f"--listen={address}", *FP32, "--disable-speculation-brake", "--max-total-tokens=4096")
        gateway = part("gateway", f"--verify-address={address}", "--port=0", ready=r"http://\S+")
        with verify, gateway as process:
            url = process.wait_for(r"(http://[\d.:]+)").group(1)
            process.wait_for("ready")
            drafter = subprocess.Popen(
                [sys.executable, "-m", "tests.e2e.random_drafter", address, "7"], stdout=subprocess.PIPE, text=True
            )
            try:
                assert drafter.stdout is not None
                assert "serves" in drafter.stdout.readline()
                with Stack(process, url) as stack:
                    _check_until(stack, greedy_answers, 0, proposed=600)
                assert drafter.poll() is None
            finally:
                drafter.kill()
                drafter.communicate()
