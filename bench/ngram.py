"""N-gram drafts: time of a lookup with its tree, tokens inserted per second, beside transformers' prompt lookup.

    python -m bench.ngram --tokens 1000000

Both propose at the same places in the second half of a text (this Python's own library, in the model's tokens). The
trie holds the context and, as a corpus, the first half; prompt lookup searches the context for its last tokens, as its
users set it. Reported beside time: how many of the proposed tokens come true along the best branch.
"""

from __future__ import annotations

import sysconfig
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import cast

import numpy as np
import torch

from bench._flags import output_file, parser_of, positive
from bench._main import as_command
from bench._output import write_json
from draft_service.drafters.base import DraftRequest
from draft_service.drafters.ngram import NgramDrafter
from draft_service.session import Session, Wishes
from engine.model_folder import resolve_model
from outrider.args import DraftArgs
from outrider.text_files import load_tokenizer
from outrider.wire import Ids

CONTEXTS = (512, 2048, 8192)
PLACES = 400
NUM_NODES = 11

Way = Callable[[Ids], tuple[list[list[int]], int]]
"""A context -> the branches proposed after it, and the nanoseconds that took."""


@dataclass
class Insertion:
    """Filling the trie: tokens per second in each tenth of the text, nodes and bytes."""

    tokens_per_s: float
    slowest_tenth_tokens_per_s: float
    num_nodes: int
    bytes_per_node: float


@dataclass
class Lookup:
    """One way of drafting, at one context length: microseconds, and tokens that came true a draft."""

    way: str
    context: int
    p50_us: float
    p99_us: float
    mean_true: float


def read_text(most: int, model: str | None) -> Ids:
    """The standard library's modules as tokens, int32, at most `most`."""
    tokenizer = load_tokenizer(resolve_model(model) / "tokenizer.json")
    pieces: list[np.ndarray] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        pieces.append(np.array(tokenizer.encode(path.read_text(errors="ignore")).ids, np.int32))
        if sum(map(len, pieces)) >= most:
            break
    return np.concatenate(pieces)[:most]


def insert(drafter: NgramDrafter, tokens: Ids) -> Insertion:
    """Puts the text in, a tenth at a time."""
    seconds: list[float] = []
    for piece in np.array_split(tokens, 10):
        start = time.perf_counter()
        drafter.corpus.insert(("text", ""), piece)
        drafter.corpus.flush()
        seconds.append(time.perf_counter() - start)
    nodes = drafter.corpus.num_nodes
    return Insertion(
        len(tokens) / sum(seconds), len(tokens) / 10 / max(seconds), nodes, drafter.corpus.num_bytes / max(1, nodes)
    )


def timed(draft: Way, text: Ids, context: int, way: str) -> Lookup:
    """Proposes at places spread over the second half of the text."""
    places = np.linspace(max(context, len(text) // 2), len(text) - 32, PLACES).astype(int)
    micros: list[float] = []
    true: list[int] = []
    for place in places:
        before, coming = text[place - context : place], text[place : place + 32].tolist()
        branches, nanos = draft(before)
        micros.append(nanos / 1000)
        true.append(max((_agreeing(branch, coming) for branch in branches), default=0))
    return Lookup(way, context, float(np.median(micros)), float(np.percentile(micros, 99)), float(np.mean(true)))


def _agreeing(branch: list[int], coming: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(branch, coming, strict=False)) if a != b), len(branch))


def ours(drafter: NgramDrafter) -> Way:
    """The drafter as the service calls it, once the session's text is in."""
    uids = count(1)

    def draft(context: Ids) -> tuple[list[list[int]], int]:
        session = Session(
            uid=next(uids), session_id=1, generation=1, prompt_len=1, remaining=1000, vocabulary="",
            vocab_size=2**31 - 1, wishes=Wishes(), corpus_scope="", prediction=np.empty(0, np.int32), tokens=context,
        )  # fmt: skip
        drafter.open([session])
        drafter.corpus.flush()
        start = time.perf_counter_ns()
        (found,) = drafter.draft([DraftRequest(session, NUM_NODES)])
        nanos = time.perf_counter_ns() - start
        drafter.close([session])
        tree = found.tree
        leaves = [node for node in range(len(found)) if not tree.children(node)]
        return [found.tokens[tree.path(leaf)].tolist() for leaf in leaves], nanos

    return draft


def prompt_lookup() -> Way:
    """transformers' generator of candidates, with the settings of its documentation's example."""
    from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

    generator = PromptLookupCandidateGenerator(num_output_tokens=NUM_NODES, max_matching_ngram_size=3, max_length=2**30)

    def draft(context: Ids) -> tuple[list[list[int]], int]:
        ids = torch.from_numpy(context.astype(np.int64))[None]
        start = time.perf_counter_ns()
        found = generator.get_candidates(cast(torch.LongTensor, ids))[0]
        nanos = time.perf_counter_ns() - start
        return [found[0, ids.shape[1] :].tolist()], nanos

    return draft


def main(argv: list[str]) -> int:
    """Measures, prints a table, and writes JSON where asked to."""
    parser = parser_of("ngram", __doc__)
    parser.add_argument("--tokens", type=positive, default=1_000_000, help="length of the text")
    parser.add_argument("--model", default=None, help="folder or hub id whose tokenizer is used; default: embedded")
    parser.add_argument("--capacity", type=positive, default=10_000_000, help="nodes of the trie")
    parser.add_argument("--output", type=output_file, default=None, help="file for the figures as JSON")
    args = parser.parse_args(argv)
    text = read_text(args.tokens, args.model)
    drafter = NgramDrafter.from_args(
        DraftArgs(
            speculative_ngram_capacity=args.capacity,
            speculative_ngram_scope="session",
            max_pending_tokens=max(8_000_000, args.tokens),
        )
    )
    try:
        drafter.warm_up()
        insertion = insert(drafter, text[: len(text) // 2])
        peer = prompt_lookup()
        lookups = [
            timed(draft, text, context, way)
            for context in CONTEXTS
            if context < len(text) // 2
            for way, draft in (("trie", ours(drafter)), ("transformers prompt lookup", peer))
        ]
    finally:
        drafter.close_down()
    if args.output:
        report = {"insertion": asdict(insertion), "lookups": [asdict(row) for row in lookups]}
        write_json(args.output, report)
    print(
        f"{len(text) // 2:,} tokens inserted at {insertion.tokens_per_s:,.0f} tokens/s (slowest tenth "
        f"{insertion.slowest_tenth_tokens_per_s:,.0f}); {insertion.num_nodes:,} nodes, "
        f"{insertion.bytes_per_node:.0f} bytes each"
    )
    for row in lookups:
        print(
            f"context {row.context:>5}  {row.way:<27} p50 {row.p50_us:7.1f} us  p99 {row.p99_us:7.1f} us  "
            f"true tokens a draft {row.mean_true:.2f}"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(as_command("ngram"))
