"""Time of a draft round by algorithm, tree and batch, and how much of it is bookkeeping in Python.

    python -m bench.drafting --batch 1,8 --trees 3,1,4/5,4,8

A round is what the service does between a verdict and its answer: extend each session by its committed tokens (with the
target's states where a head reads them) and grow its tree. Heads and draft models are of the model's shape with random
weights, unless --head names one: time does not depend on their values. `model` is the time inside forward passes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench._flags import counts, output_file, parser_of, positive, shapes
from bench._main import as_command
from bench._output import write_json
from draft_service.drafters.base import DraftRequest
from draft_service.drafters.factory import make_drafter
from draft_service.drafters.features import pack_rows
from draft_service.drafters.model_drafter import ModelDrafter
from draft_service.session import Extension, Session, Wishes
from engine.model_folder import resolve_model
from outrider.args import DraftArgs
from outrider.text_files import read_json
from outrider.v1 import common_pb2, verify_pb2

CONTEXT = 256
COMMITTED = 3  # tokens of each verdict
ROUNDS = 30
DRAFT_LAYERS = 4  # of the random STANDALONE model
ALGORITHMS = ("EAGLE", "EAGLE3", "STANDALONE")
SHIPPED = "shipped"  # as --head: what comes with Outrider


@dataclass
class Row:
    """One setting; milliseconds a round, the median of many."""

    algorithm: str
    num_steps: int
    topk: int
    num_draft_tokens: int
    batch: int
    round_ms: float
    model_ms: float

    @property
    def python_share(self) -> float:
        """The share of a round that is outside of forward passes."""
        return 1 - self.model_ms / self.round_ms


def write_shape(folder: Path, target: Path, algorithm: str) -> Path:
    """A config.json from which random weights are made: a head for the target, or a shallow copy of it."""
    config = read_json(target / "config.json")
    if algorithm == "STANDALONE":
        config["num_hidden_layers"] = DRAFT_LAYERS
    else:
        name = "LlamaForCausalLMEagle3" if algorithm == "EAGLE3" else "LlamaForCausalLMEagle"
        config |= {"architectures": [name], "num_hidden_layers": 1}
        if algorithm == "EAGLE3":
            config["draft_vocab_size"] = min(8192, config["vocab_size"])
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "generation_config.json"):
        if algorithm == "STANDALONE" and (target / name).exists():
            (folder / name).symlink_to(target / name)
    return folder


def build(args: argparse.Namespace, target: Path, algorithm: str, tree: tuple[int, int, int]) -> ModelDrafter[Any]:
    """The drafter of these settings."""
    with tempfile.TemporaryDirectory() as folder:
        given = args.head is not None
        path = args.head if given else str(write_shape(Path(folder) / "draft", target, algorithm))
        drafter = make_drafter(
            DraftArgs(
                model_path=str(target), speculative_algorithm=algorithm,
                speculative_draft_model_path=None if path == SHIPPED else path,
                speculative_draft_load_format=None if given else "dummy", speculative_num_steps=tree[0],
                speculative_eagle_topk=tree[1], speculative_num_draft_tokens=tree[2], max_sessions=64,
                dtype=args.dtype, device=args.device, draft_max_total_tokens=64 * 1024, threads=args.threads,
            )
        )  # fmt: skip
    assert isinstance(drafter, ModelDrafter)
    return drafter


class Clock:
    """Seconds spent in a model's forward passes: in its `run`, and its grower's."""

    def __init__(self, drafter: ModelDrafter[Any]) -> None:
        self.seconds = 0.0
        model = drafter.model
        model.run = self._timed(model.run)
        if model.grower is not None:
            model.grower.run = self._timed(model.grower.run)

    def _timed(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return run(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start

        return timed


def measure(drafter: ModelDrafter[Any], tree: tuple[int, int, int], algorithm: str, batch: int) -> Row:
    """Rounds of `batch` sessions."""
    rng = np.random.default_rng(0)
    sessions = [open_session(drafter, uid, rng) for uid in range(1, batch + 1)]
    clock, rounds, models = Clock(drafter), [], []
    requests = [DraftRequest(session, tree[2] - 1) for session in sessions]
    for _ in range(ROUNDS):
        extensions = [extended(drafter, session, rng) for session in sessions]
        clock.seconds, start = 0.0, time.perf_counter()
        drafter.extend(extensions)
        drafter.draft(requests)
        rounds.append((time.perf_counter() - start) * 1000)
        models.append(clock.seconds * 1000)
    drafter.close(sessions)
    return Row(algorithm, *tree, batch, float(np.median(rounds)), float(np.median(models)))


def open_session(drafter: ModelDrafter[Any], uid: int, rng: np.random.Generator) -> Session:
    """A session with CONTEXT tokens, taken on and caught up."""
    tokens = rng.integers(10, 1000, CONTEXT).astype(np.int32)
    session = Session(
        uid=uid, session_id=uid, generation=1, prompt_len=1, remaining=100_000, vocabulary="", vocab_size=2**31 - 1,
        wishes=Wishes(), corpus_scope="", prediction=np.empty(0, np.int32), tokens=tokens,
    )  # fmt: skip
    drafter.open([session])
    if drafter.features.width:
        drafter.add_features([(session, feature_rows(drafter, 0, CONTEXT - 1))])
    return session


def extended(drafter: ModelDrafter[Any], session: Session, rng: np.random.Generator) -> Extension:
    """The extension that a verdict brings."""
    base_len = len(session.tokens)
    tokens = rng.integers(10, 1000, COMMITTED).astype(np.int32)
    session.commit(tokens)
    verdict = verify_pb2.Verdict(session=session.session_id, generation=1, base_len=base_len, tokens=tokens.tolist())
    if drafter.features.width:
        verdict.features.CopyFrom(feature_rows(drafter, base_len - 1, COMMITTED))
    return Extension(session, base_len, verdict)


def feature_rows(drafter: ModelDrafter[Any], first_pos: int, count: int) -> common_pb2.FeatureRows:
    """Random rows as verify would send."""
    rows = pack_rows(torch.randn(count, drafter.features.width, dtype=torch.bfloat16))
    return common_pb2.FeatureRows(first_pos=first_pos, count=count, rows=rows)


def main(argv: Sequence[str]) -> int:
    """Measures, prints a table, and writes JSON where asked to."""
    parser = parser_of("drafting", __doc__)
    parser.add_argument("--model", default=None, help="folder or hub id of the target; default: the embedded model")
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS), help="which; default: %(default)s")
    parser.add_argument(
        "--head", default=None, help="folder of a head or draft model to use instead of random ones, or `shipped`"
    )
    parser.add_argument(
        "--trees", type=shapes, default="3,1,4/3,4,8/5,4,8", help="steps,topk,tokens/...; default: %(default)s"
    )
    parser.add_argument("--batch", type=counts, default=(1, 8), help="sessions in a round; default: 1,8")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=positive, default=None)
    parser.add_argument("--output", type=output_file, default=None, help="file for the figures as JSON")
    args = parser.parse_args(argv)
    target = resolve_model(args.model)
    rows: list[Row] = []
    for algorithm in args.algorithms.upper().split(","):
        for steps, topk, tokens in args.trees:
            drafter = build(args, target, algorithm, (steps, topk, tokens))
            for batch in args.batch:
                row = measure(drafter, (steps, topk, tokens), algorithm, batch)
                rows.append(row)
                print(
                    f"{algorithm:<11} steps {steps} topk {topk} tokens {tokens:>2}  batch {batch:>2}  "
                    f"round {row.round_ms:6.2f} ms  model {row.model_ms:6.2f} ms  Python {row.python_share:4.0%}"
                )
            drafter.close_down()
    if args.output:
        report = [asdict(row) | {"python_share": row.python_share} for row in rows]
        write_json(args.output, report)
    return 0


if __name__ == "__main__":
    raise SystemExit(as_command("drafting"))
