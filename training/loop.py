"""`outrider train head`: the loop, and what is around it."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from engine.model_folder import resolve_model
from engine.tensors import EMBEDDING, OUTPUT_HEAD
from outrider.errors import StartupError, Unfinished
from outrider.telemetry import announce, get_logger
from training.accept_length import CHAIN_STEPS, Tree
from training.args import HeadArgs
from training.args.head import read
from training.averages import Averages
from training.batches import Batch, Dataset
from training.checkpoints import BEST, EXPORT_FOLDER, LAST, Checkpoint
from training.data.given import read_first_turns
from training.data.store import MADE_WITH, check_target, read_facts
from training.evaluation import Evaluation
from training.export import check_replaceable, export
from training.exported import exported_tensors, initial_folder
from training.frequencies import answer_counts, hot_tokens
from training.initial import first_tensors
from training.kinds import Kind, make_kind
from training.losses import Report, Weights, batch_loss
from training.network import DraftNetwork
from training.optimizers import Optimizers, schedule
from training.outputs import made_folder, write_file
from training.plot import plot
from training.ranks import Ranks, join
from training.state_store import StateStore, stored_layers
from training.stopping import Stopping
from training.target_states import States, TargetStates, target_id, trainable_config
from training.writer import Writer, writer_of

# Steps whose mean loss is noted.
_LAST_STEPS = 100
# Settings that may change when training goes on.
_FREE = {
    "tokens", "output", "data", "device", "threads", "eval_every", "eval_conversations", "eval_prompts",
    "eval_answer_tokens", "save_every", "store_states", "model_path", "revision", "load_format", "dtype",
    "initial_head",
}  # fmt: skip
# Those of them that it takes to make a head again: a card tells how it was begun.
_TOLD = ("model_path", "revision", "load_format", "dtype", "initial_head", "tokens")

log = get_logger(__name__)


def main(args: HeadArgs) -> int:
    """Trains, or goes on training, until enough tokens are seen or a signal asks for an end; then exports."""
    stopping = Stopping("finishing the set-up, or the step under way; once more to end at once")
    ranks = join(args.device)
    try:
        trainer = Trainer(args, ranks)
        trainer.run(writer_of(args, ranks, trainer.checkpoint.seen), stopping)
    finally:
        ranks.close()
    return 0


class Trainer:
    """A network, its data, and where both stand."""

    def __init__(self, args: HeadArgs, ranks: Ranks) -> None:
        self.args, self.ranks = args, ranks
        model_path = resolve_model(args.model_path, revision=args.revision)
        stored, config = args.store_states, trainable_config(model_path)
        self.kind = make_kind(
            args.algorithm, model_path, draft_vocab_size=args.draft_vocab_size, num_kv_heads=args.num_kv_heads,
            num_layers=args.num_layers, fc_norm=not args.no_fc_norm,
        )  # fmt: skip
        self.dataset = Dataset(
            Path(args.data), seed=args.seed, batch_tokens=args.batch_tokens, max_len=args.max_len, rank=ranks.rank,
            num_ranks=ranks.num_ranks, least=ranks.least,
        )  # fmt: skip
        facts = facts_of(args, model_path)
        _check_given(args, self.dataset.folder, facts["target"], config.vocab_size)
        self.folder = made_folder(Path(args.output), "the head")  # no sooner than all that is given was read
        check_replaceable(self.folder / EXPORT_FOLDER)
        torch.manual_seed(args.seed)
        self.target = TargetStates(
            model_path, self.kind.features, dtype=args.dtype, device=ranks.device, load_format=args.load_format,
            max_tokens=args.batch_tokens, max_len=args.max_len, threads=args.threads, quantization=args.quantization,
            more_layers=stored_layers(config.num_layers) if stored else (),
        )  # fmt: skip
        self.store = StateStore(Path(stored), self.target) if stored else None
        self.checkpoint = self._begin_or_resume(facts)
        self.checkpoint.facts[MADE_WITH] = read_facts(self.dataset.folder).get(MADE_WITH, [])
        self.network = _network(self.kind, self.checkpoint, self.target, args)
        self._loss = _LossModule(self.network, args)
        self.module = ranks.wrapped(self._loss)
        self.optimizers = Optimizers(
            self.network, learning_rate=args.learning_rate, weight_decay=args.weight_decay,
            use_muon=args.optimizer == "muon",
        )  # fmt: skip
        if self.checkpoint.optimizers:
            self.optimizers.load_state_dict(self.checkpoint.optimizers)
        self.averages = None
        if args.average_tokens:
            self.averages = Averages(self.network, self.checkpoint.averaged, args.average_tokens)
        self._losses = deque(self.checkpoint.losses, maxlen=_LAST_STEPS)
        self._last_batch: Batch | None = None
        self.evaluation = Evaluation(args, self.target, self.dataset) if ranks.is_first else None

    def run(self, writer: Writer, stopping: Stopping) -> None:
        """Steps until the end, evaluating and saving on the way. Unfinished where the loss is no number any more."""
        args, at = self.args, self.checkpoint
        batches = self.dataset.batches(at.plan)
        if not at.history and not stopping.asked:
            self._evaluate(writer)
        saved = at.seen
        evaluated = at.history[-1]["seen"] if at.history else at.seen
        with tqdm(total=args.tokens, initial=min(at.seen, args.tokens), unit="tok", unit_scale=True,
                  disable=not (sys.stderr.isatty() and self.ranks.is_first)) as bar:  # fmt: skip
            while at.seen < args.tokens and not self.ranks.any(stopping.asked):
                report, tokens = self._step(batches)
                bar.update(tokens)
                self._losses.append(report.token_losses[0])
                writer.step(at, report, tokens)
                if at.seen - evaluated >= args.eval_every or at.seen >= args.tokens:
                    evaluated = at.seen
                    self._evaluate(writer)
                if at.seen - saved >= args.save_every:
                    saved = at.seen
                    self._save(LAST)
        self._save(LAST)
        if self.ranks.is_first:
            export(
                self.kind, at, self.folder / EXPORT_FOLDER, target=self.target.folder, load_format=self.args.load_format
            )
            announce(f"{self.folder / EXPORT_FOLDER}: the head after {at.seen:,} tokens")

    def _step(self, batches: Iterator[Batch]) -> tuple[Report, int]:
        """One step of the optimizers over `accumulate` batches; the last batch's report, and tokens of all ranks."""
        args, at, count = self.args, self.checkpoint, 0
        for index in range(args.accumulate):
            batch = next(batches).to(self.target.device)
            self._last_batch, states = batch, self._states(batch)
            last = index == args.accumulate - 1
            with contextlib.nullcontext() if last else _no_sync(self.module):
                report: Report = self.module(batch, states)
                self._check_losses(report)
                (report.loss / args.accumulate).backward()
            count += batch.num_tokens
        nn.utils.clip_grad_norm_(self.network.parameters(), args.clip_norm)
        self.optimizers.step(schedule(at.seen, args.tokens, args.warmup_tokens))
        count = self.ranks.total(count)
        at.seen += count
        if self.averages is not None:
            self.averages.take(self.network, at.seen, count)
        at.step += 1
        return report, count  # pyright: ignore[reportPossiblyUnboundVariable]  accumulate is at least 1

    def _evaluate(self, writer: Writer) -> None:
        if self.evaluation is None:
            return
        with self._measured():
            figures = {"seen": self.checkpoint.seen, **self.evaluation(self.network)}
        if self._losses:
            figures["loss"] = sum(self._losses) / len(self._losses)
        history = self.checkpoint.history
        is_best = all(figures["chain"] > row["chain"] for row in history)
        history.append(figures)
        writer.evaluated(self.checkpoint, figures)
        picture = self.folder / "accept_length.png"
        write_file(picture, "the picture", lambda path: plot(history, path, title=self.kind.algorithm))
        if is_best:
            self._save(BEST)

    def _measured(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.averages is None else self.network.using(self.averages.tensors)

    def _save(self, name: str) -> None:
        if not self.ranks.is_first:
            return
        self._check_parameters()
        at = self.checkpoint
        at.tensors = {key: tensor.cpu() for key, tensor in self.network.trained().items()}
        at.averaged = {} if self.averages is None else {k: t.cpu() for k, t in self.averages.tensors.items()}
        at.optimizers = self.optimizers.state_dict()
        at.losses = list(self._losses)
        at.save(self.folder / name)

    def _check_parameters(self) -> None:
        """Checks, as _check_losses, what is to be kept: the loss of the step before was of the parameters before it."""
        if self._last_batch is None:
            return
        with torch.no_grad():
            batch = self._last_batch
            self._check_losses(self._loss(batch, self._states(batch)))
        for tensors in (self.network.trained(), {} if self.averages is None else self.averages.tensors):
            for name, tensor in tensors.items():
                if not tensor.isfinite().all():
                    raise self._diverged(f"{name} is not finite")

    def _check_losses(self, report: Report) -> None:
        for loss in (*report.token_losses, *report.feature_losses):
            if not math.isfinite(loss):
                raise self._diverged(f"the loss is {loss}")

    def _diverged(self, what: str) -> Unfinished:
        return Unfinished(
            f"{what} after {self.checkpoint.seen:,} tokens; lower --learning-rate, which is "
            f"{self.args.learning_rate:g}. What was saved before stays in {self.folder}"
        )

    def _begin_or_resume(self, facts: dict[str, Any]) -> Checkpoint:
        path = self.folder / LAST
        if path.is_file():
            checkpoint = Checkpoint.load(path)
            checkpoint.check(read(facts), path)
            checkpoint.check_beginning(self.args.initial_head, path)
            if checkpoint.seen < self.args.tokens:
                checkpoint.facts["tokens"] = self.args.tokens
            log.info("training goes on", folder=str(self.folder), seen=checkpoint.seen, epoch=checkpoint.plan.epoch)
            return checkpoint
        return Checkpoint(facts | told_of(self.args), *self._first_tensors())

    def _first_tensors(self) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Tensors that training starts from, and the tokens that are drafted."""
        args = self.args
        counts = answer_counts(self.dataset.folder)
        drafted = torch.from_numpy(hot_tokens(counts, args.draft_vocab_size)).sort().values
        if args.initial_head is not None:
            folder = initial_folder(args.initial_head, self.kind.algorithm, self.target.folder)
            return exported_tensors(self.kind, folder, drafted)
        longest = min(args.max_len, args.batch_tokens)
        first = self.dataset.examples(1, held_out=False)[:8]
        if not first:
            raise StartupError(
                f"no answer in {self.dataset.folder} begins within the first {longest} tokens of its conversation; "
                "--max-len and --batch-tokens must be higher"
            )
        batches = (batch.to(self.target.device) for batch in self.dataset.once())
        tensors = first_tensors(
            self.kind, self.target, drafted, [example.tokens[:longest] for example in first],
            ((batch, self._states(batch)) for batch in batches), seed=args.seed,
        )  # fmt: skip
        return tensors, drafted

    def _states(self, batch: Batch) -> States:
        return self.store(batch) if self.store is not None else self.target(batch.conversations)


class _LossModule(nn.Module):
    """The loss of a batch as a module's forward, which is what DDP wraps."""

    def __init__(self, network: DraftNetwork, args: HeadArgs) -> None:
        super().__init__()
        self.network = network
        self._args = args

    def forward(self, batch: Batch, states: States) -> Report:
        """See losses."""
        args = self._args
        return batch_loss(
            self.network, batch, states, num_steps=args.unroll, unroll_every=args.unroll_every,
            weights=Weights(args.token_loss, args.feature_loss),
        )  # fmt: skip


def facts_of(args: HeadArgs, model_path: Path) -> dict[str, Any]:
    """Facts that must not change when training goes on."""
    own = {spec.name: getattr(args, spec.name) for spec in dataclasses.fields(args) if spec.name not in _FREE}
    return own | {"target": target_id(model_path, args.load_format)}


def _check_given(args: HeadArgs, data: Path, target: str, vocab_size: int) -> None:
    check_target(data, target, vocab_size)
    if args.eval_prompts is not None:
        read_first_turns(Path(args.eval_prompts))


def told_of(args: HeadArgs) -> dict[str, Any]:
    """Flags that may change when training goes on, and are kept for the card."""
    return {name: getattr(args, name) for name in _TOLD}


def _network(kind: Kind, checkpoint: Checkpoint, target: TargetStates, args: HeadArgs) -> DraftNetwork:
    # Rows near a conversation's end go on past it, in training and where accept length is measured.
    max_len = args.max_len + max(args.unroll, CHAIN_STEPS, Tree().num_steps)
    head = target.vocabulary_rows(OUTPUT_HEAD)[checkpoint.drafted]
    network = DraftNetwork(
        kind, checkpoint.tensors, target.vocabulary_rows(EMBEDDING), head, checkpoint.drafted, max_len=max_len,
        dtype=getattr(torch, args.train_dtype), train_output_head=args.train_output_head,
    )  # fmt: skip
    return network.to(target.device)


def _no_sync(module: nn.Module) -> contextlib.AbstractContextManager[None]:
    return module.no_sync() if isinstance(module, DistributedDataParallel) else contextlib.nullcontext()
