"""What is measured while training: accept lengths on conversations held out, and on a benchmark's prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from engine.model_folder import resolve_model
from outrider.errors import StartupError
from training.accept_length import chain_rounds, tree_rounds
from training.answers import greedy_answers
from training.args import HeadArgs
from training.batches import Dataset
from training.data.store import Example
from training.network import DraftNetwork
from training.target_states import States, TargetStates

# Every fourth text is enough: trees cost more to measure than chains, and follow them.
_TREE_SHARE = 4


class _Remembered:
    """A target that computes each batch once; a training measures the same conversations again and again."""

    def __init__(self, target: TargetStates) -> None:
        self.device = target.device
        self._target = target
        self._found: dict[tuple[bytes, ...], States] = {}

    def __call__(self, conversations: Sequence[np.ndarray]) -> States:
        """See TargetStates."""
        key = tuple(tokens.tobytes() for tokens in conversations)
        if key not in self._found:
            self._found[key] = self._target(conversations)
        return self._found[key]


class Evaluation:
    """Called with a network: accept length of chains and trees, by name."""

    def __init__(self, args: HeadArgs, target: TargetStates, dataset: Dataset) -> None:
        if args.quantization is not None:  # accept length counts on the target that is served
            target = TargetStates(
                target.folder, target.features, dtype=args.dtype, device=str(target.device), threads=args.threads,
                load_format=args.load_format, max_tokens=args.batch_tokens, max_len=args.max_len,
            )  # fmt: skip
        self._target = _Remembered(target)
        self._batch_tokens = args.batch_tokens
        self._held_out = dataset.held_out(args.eval_conversations)
        self._prompts: list[Example] = []
        if args.eval_prompts is not None:
            answers = greedy_answers(
                Path(args.eval_prompts), resolve_model(args.model_path, revision=args.revision), dtype=args.dtype,
                device=str(target.device), load_format=args.load_format, threads=args.threads,
                answer_tokens=args.eval_answer_tokens, kept=Path(args.output) / "eval_answers.json",
            )  # fmt: skip
            self._prompts = [answer.example for answer in answers]
            longest, most = max(len(one.tokens) for one in self._prompts), min(args.max_len, args.batch_tokens)
            if longest > most:
                raise StartupError(
                    f"an answer to --eval-prompts ends after {longest} tokens; --max-len and --batch-tokens must be "
                    "at least that"
                )

    def __call__(self, network: DraftNetwork) -> dict[str, float]:
        """chain and tree on what is held out; prompts_chain and prompts_tree on the prompts."""
        figures = self._measured(network, self._held_out, "")
        return figures | (self._measured(network, self._prompts, "prompts_") if self._prompts else {})

    def _measured(self, network: DraftNetwork, examples: list[Example], prefix: str) -> dict[str, float]:
        chain = chain_rounds(network, self._target, examples, batch_tokens=self._batch_tokens)
        tree = tree_rounds(network, self._target, examples[::_TREE_SHARE])
        return {f"{prefix}chain": chain.accept_length, f"{prefix}tree": tree.accept_length}
