"""A head that Outrider trained, in vLLM: does it load there, and does it draft what it drafts here?

    python -m bench.vllm_head --head DIR --python VENV/bin/python --prompts 8

vLLM (its CPU wheel will do, in a venv of its own) answers MT-bench's questions greedily, three drafts a round from
the exported head; printed are accept lengths per round as vLLM counts them, and as they are here for the same answers.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from bench._flags import parser_of, positive
from bench._main import as_command
from engine.model_folder import resolve_model
from outrider.errors import StartupError
from training.accept_length import CHAIN_STEPS, chain_rounds
from training.answers import read_first_turns
from training.args import MT_BENCH
from training.chat_format import ChatFormat
from training.data.store import Example
from training.evaluate import features_of_head, load_published
from training.target_states import TargetStates

_SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
}  # fmt: skip
# Runs in the other Python. Prints ids of each answer, then how many rounds and accepted drafts there were.
_ANSWER = """
import json, sys
from vllm import LLM, SamplingParams
asked = json.load(sys.stdin)
llm = LLM(model=asked["target"], dtype="bfloat16", enforce_eager=True, max_model_len=1024, max_num_seqs=1,
          disable_log_stats=False, speculative_config={
              "method": asked["method"], "model": asked["head"], "num_speculative_tokens": asked["drafts"]})
sampling = SamplingParams(temperature=0, max_tokens=asked["tokens"])
said = llm.generate([{"prompt_token_ids": ids} for ids in asked["prompts"]], sampling)
counts = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
rounds, accepted = (counts["vllm:spec_decode_num_" + name] for name in ("drafts", "accepted_tokens"))
print("\\n" + json.dumps([[list(one.outputs[0].token_ids) for one in said], rounds, accepted]))
"""


def main(argv: list[str] | None = None) -> int:
    """Asks both and prints two numbers."""
    parser = parser_of("vllm_head", __doc__)
    parser.add_argument("--head", type=Path, required=True, help="folder of an exported head")
    parser.add_argument("--python", required=True, help="a Python that has vLLM")
    parser.add_argument("--method", default="eagle3", help="vLLM's name for the kind of head: eagle3, eagle")
    parser.add_argument("--model-path", help="the target (default: the embedded model)")
    parser.add_argument("--prompts", type=positive, default=8, help="questions, spread over MT-bench")
    parser.add_argument("--tokens", type=positive, default=64, help="most tokens of an answer")
    args = parser.parse_args(argv)
    target = resolve_model(args.model_path)
    chat, talks = ChatFormat.of_model(target), read_first_turns(MT_BENCH)
    chosen = talks[:: max(1, len(talks) // args.prompts)][: args.prompts]
    prompts = [chat.prompt(messages) for _, messages in chosen]
    answers, rounds, accepted = _vllm(args, target, prompts)
    print(f"vLLM: {1 + accepted / rounds:.3f} tokens a round, {rounds:.0f} rounds")
    examples = [
        Example(np.array([*prompt, *said], np.int64), ((len(prompt), len(prompt) + len(said)),), "eval")
        for prompt, said in zip(prompts, answers, strict=True)
    ]
    longest = max(len(example.tokens) for example in examples)
    states = TargetStates(
        target, features_of_head(args.head, target), dtype="auto", device="cpu", load_format="auto", max_len=longest,
        max_tokens=max(2048, longest), threads=None,
    )  # fmt: skip
    own = chain_rounds(load_published(args.head, states, max_len=longest + CHAIN_STEPS), states, examples)
    print(f"Outrider: {own.accept_length:.3f} tokens a round, {own.num_rounds} rounds")
    return 0


def _vllm(args: argparse.Namespace, target: Path, prompts: list[list[int]]) -> tuple[list[list[int]], float, float]:
    asked: dict[str, Any] = {
        "target": str(target), "head": str(args.head.resolve()), "method": args.method, "drafts": CHAIN_STEPS,
        "tokens": args.tokens, "prompts": prompts,
    }  # fmt: skip
    try:
        done = subprocess.run(
            [args.python, "-c", _ANSWER], input=json.dumps(asked), env=os.environ | _SETTINGS, text=True, check=True,
            stdout=subprocess.PIPE,
        )  # fmt: skip
    except OSError as error:
        raise StartupError(f"{args.python} cannot be run: {error.strerror}") from error
    except subprocess.CalledProcessError as error:
        raise StartupError(f"vLLM ended with {error.returncode}; why is above") from error
    return json.loads(done.stdout.strip().splitlines()[-1])


if __name__ == "__main__":
    raise SystemExit(as_command("vllm_head"))
