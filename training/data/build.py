"""`outrider train data`: conversations of the target with itself, until there are enough tokens."""

from __future__ import annotations

import dataclasses
import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from engine.feature_spec import FeatureSpec
from engine.model_folder import resolve_model
from engine.runner import DEFAULT_MAX_BATCH_TOKENS, ModelRunner
from outrider.out_of_memory import memory_for
from outrider.telemetry import announce
from training.args import DataArgs
from training.chat_format import ChatFormat
from training.data.completer import PREFILL_TOKENS, Completer, Conversation
from training.data.conversations import Record, Script
from training.data.given import read_conversations
from training.data.material import Material
from training.data.overlap import OverlapFilter, read_prompts
from training.data.passages import Passages
from training.data.store import DataFolder, check_facts
from training.data.templates import Composer
from training.state_store import StateFiles, stored_layers
from training.stopping import Stopping
from training.target_states import target_id, trainable_config

SHARD_TOKENS = 50_000
SHARD_SECONDS = 300.0
# Settings that make no other data.
_FREE = frozenset({"output", "store_states", "share", "device", "threads"})


def main(args: DataArgs) -> int:
    """Makes or goes on making data; signals to end leave what there is written out."""
    stopping = Stopping("finishing the conversations under way; once more to end at once")
    model_path = resolve_model(args.model_path, revision=args.revision)
    config = trainable_config(model_path)  # hours pass before `train head` could refuse it
    output, facts = Path(args.output), data_facts(args, model_path, config.vocab_size)
    check_facts(output, facts)  # before anything is loaded, or made
    chat = ChatFormat.of_model(model_path)
    script = make_script(args, chat)
    layers = () if args.store_states is None else stored_layers(config.num_layers)
    with memory_for(f"--batch-size {args.batch_size} and --max-len {args.max_len}"):
        runner = ModelRunner.load(
            model_path, dtype=args.dtype, device=args.device, threads=args.threads, max_len=args.max_len,
            num_slots=(args.batch_size + 1) * args.max_len, max_sessions=args.batch_size, load_format=args.load_format,
            quantization=args.quantization, features=FeatureSpec("aux", layers) if layers else None,
            max_batch_tokens=max(DEFAULT_MAX_BATCH_TOKENS, args.batch_size + PREFILL_TOKENS),
        )  # fmt: skip
    kept = args.store_states
    states = None if kept is None else StateFiles(Path(kept), runner, layers)
    folder = DataFolder(output, facts, states, asked(args))
    script.know(folder.keys)
    completer = Completer(runner, shared=chat.opening)
    report = _Report(folder, args.tokens, completer)
    for index, records in completer.run(_numbered(script, folder.ended, args.share_of(), stopping, report)):
        folder.add(index, records)
        report.update()
        if folder.num_pending >= SHARD_TOKENS or report.seconds_since_flush() > SHARD_SECONDS:
            folder.flush()
            script.know(folder.keys)
            report.flushed()
    folder.flush()
    report.close()
    return 0


def make_script(args: DataArgs, chat: ChatFormat) -> Script:
    """The conversations that these settings ask for. StartupError for files of prompts that cannot be read."""
    passages = Passages.of_system()
    overlap = OverlapFilter(text for path in args.exclude_paths() for text in read_prompts(path))
    given = [talk for path in args.prompts for talk in read_conversations(Path(path))]
    composer = Composer(Material.load(), passages.prose, passages.code)
    return Script(chat, composer, overlap, seed=args.seed, mix=args.mix(), given=given)


def data_facts(args: DataArgs, model_path: Path, vocab_size: int) -> dict[str, Any]:
    """Facts that must stay the same when data is added to."""
    target = target_id(model_path, args.load_format)
    return {"format": 1, "seed": args.seed, "target": target, "vocab_size": vocab_size}


def asked(args: DataArgs) -> dict[str, Any]:
    """Flags that the data follows from, as JSON has them."""
    values = {spec.name: getattr(args, spec.name) for spec in dataclasses.fields(args) if spec.name not in _FREE}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _numbered(
    script: Script, ended: set[int], share: tuple[int, int], stopping: Stopping, report: _Report
) -> Iterator[Conversation]:
    """Conversations that have not ended before, numbers beside their results, until enough or told to stop.

    Of `share` (k, n): every nth of the user's own from the kth on; then numbers k - 1, k - 1 + n, and so on.
    """
    first, step = share[0] - 1, share[1]
    for index in itertools.chain(script.given_numbers[first::step], itertools.count(first, step)):
        if index in ended:
            continue
        if stopping.asked or report.enough():
            return
        yield _with_number(index, script.conversation(index))


def _with_number(index: int, conversation: Conversation) -> Conversation:
    records: list[Record] = yield from conversation
    return index, records


class _Report:
    """The progress bar, or a line a minute where no terminal is."""

    def __init__(self, folder: DataFolder, wanted: int, completer: Completer) -> None:
        self._folder, self._wanted, self._completer = folder, wanted, completer
        self._started = self._flushed = self._said = time.monotonic()
        self._bar = tqdm(
            total=wanted, initial=min(folder.num_answer_tokens, wanted), unit="tok", unit_scale=True,
            desc="Answer tokens", disable=not sys.stderr.isatty(),
        )  # fmt: skip

    def enough(self) -> bool:
        """Whether the folder holds what was asked for."""
        return self._folder.num_answer_tokens >= self._wanted

    def update(self) -> None:
        """Shows where we are."""
        now = time.monotonic()
        self._bar.update(self._folder.num_answer_tokens - self._bar.n)
        if self._bar.disable and now - self._said > 60:
            self._said = now
            self._print()

    def _print(self) -> None:
        rate = self._completer.num_generated / (time.monotonic() - self._started)
        announce(f"{self._folder.num_answer_tokens:,} of {self._wanted:,} answer tokens, {rate:.0f} tokens/s generated")

    def seconds_since_flush(self) -> float:
        """Age of what is pending."""
        return time.monotonic() - self._flushed

    def flushed(self) -> None:
        """Notes that a shard was written."""
        self._flushed = time.monotonic()

    def close(self) -> None:
        """Says the last words."""
        self._bar.close()
        self._print()
