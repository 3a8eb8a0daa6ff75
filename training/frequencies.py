"""How often the target writes each token: what a draft vocabulary and FR-Spec's map of hot tokens are chosen by."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from engine.saving import save_tensors
from outrider.errors import StartupError
from outrider.telemetry import announce
from training.args import TokenMapArgs
from training.data.store import META, read_examples, read_facts, shard_paths
from training.outputs import check_file, save, write_file


def answer_counts(folder: Path) -> np.ndarray:
    """int64 [vocab]: how often each token stands in the answers of a data folder."""
    paths = shard_paths(folder)
    if not paths:
        raise StartupError(f"{folder} holds no training data ({META} and shards); `outrider train data` makes it")
    vocab_size = read_facts(folder)["vocab_size"]
    counts = np.zeros(vocab_size, np.int64)
    for path in paths:
        for example in read_examples(path):
            for start, end in example.answers:
                found = np.bincount(example.tokens[start:end], minlength=vocab_size)
                if len(found) > vocab_size:
                    raise StartupError(f"{path} holds token {len(found) - 1}; {META} beside it has {vocab_size} tokens")
                counts += found
    return counts


def hot_tokens(counts: np.ndarray, size: int) -> np.ndarray:
    """int64 [min(size, vocab)]: the most frequent ids, falling, equal ones ascending."""
    return np.argsort(-counts, kind="stable")[:size].astype(np.int64)


def main(args: TokenMapArgs) -> int:
    """Writes the map: most frequent first, as FR-Spec's are (Zhao et al., 2025)."""
    path = Path(args.output)
    check_file(path, "the map")
    counts = answer_counts(Path(args.data))
    tokens = torch.from_numpy(hot_tokens(counts, args.size))

    def write(partial: Path) -> None:
        if path.suffix == ".pt":
            save(tokens.tolist(), partial)
        else:
            save_tensors({"token_map": tokens}, partial)

    write_file(path, "the map", write)
    covered = counts[tokens.numpy()].sum() / max(1, counts.sum())
    announce(f"{path}: {len(tokens)} tokens, {covered:.2%} of {counts.sum():,} answer tokens")
    return 0
