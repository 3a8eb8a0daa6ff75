"""`outrider train eval`: accept length by category, computed in this process or measured through the services."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tqdm import tqdm

from engine.config import ModelConfig
from engine.feature_spec import FeatureSpec
from engine.loader import load_checkpoint
from engine.model_folder import resolve_model
from engine.models.heads.base import Head, Vocabulary
from engine.models.heads.load import HeadFolder, load_head
from engine.models.heads.target import TargetShape
from engine.models.llama_weights import tensor_shapes
from engine.tensors import EMBEDDING, OUTPUT_HEAD
from kernels.linear import Linear
from outrider.errors import StartupError
from outrider.telemetry import announce
from training.accept_length import Rounds, Tree, chain_rounds, tree_rounds
from training.answers import greedy_answers
from training.args import EvalArgs
from training.checkpoints import EXPORT_FOLDER, LAST, Checkpoint
from training.data.given import read_first_turns
from training.export import export, kind_of
from training.exported import algorithm_of, is_whole_model
from training.kinds import STANDALONE, Kind, ShallowConfig
from training.outputs import check_file, made_folder, write_file
from training.served import ask_all
from training.target_states import TargetStates, trainable_config


@dataclass(slots=True)
class Figures:
    """Rounds of one category, with chains and with trees."""

    chain: Rounds = field(default_factory=Rounds)
    tree: Rounds = field(default_factory=Rounds)


@dataclass(frozen=True, slots=True)
class Published:
    """An exported network, in place of one that is being trained."""

    kind: Kind
    head: Head

    def built(self) -> Head:
        """The network."""
        return self.head


def main(args: EvalArgs) -> int:
    """Measures, prints a table, and writes the figures where they are wanted."""
    if not Path(args.head).is_dir():
        raise StartupError(f"--head is {args.head!r}, which is no folder")
    if args.output is not None:
        check_file(Path(args.output), "the figures")
    target = resolve_model(args.model_path, revision=args.revision)
    if not args.serve:
        trainable_config(target)  # before the answers, which take long
    with _exported(Path(args.head), target, args.load_format) as folder:
        figures = _served(args, folder) if args.serve else _computed(args, folder, target)
    total = Figures()
    for found in figures.values():
        total.chain.add(found.chain)
        total.tree.add(found.tree)
    figures["all"] = total
    announce(table(figures, with_trees=total.tree.num_rounds > 0))
    if args.output is not None:
        rows = {
            name: {kind: asdict(rounds) | {"accept_length": rounds.accept_length} for kind, rounds in
                   (("chain", found.chain), ("tree", found.tree))}
            for name, found in figures.items()
        }  # fmt: skip
        text = json.dumps(rows, indent=1) + "\n"
        write_file(Path(args.output), "the figures", lambda path: path.write_text(text, encoding="utf-8"))
    return 0


def table(figures: dict[str, Figures], *, with_trees: bool) -> str:
    """Markdown: accept length by category."""
    lines = ["| category | rounds | chain |" + (" tree |" if with_trees else "")]
    lines.append("|---|---|---|" + ("---|" if with_trees else ""))
    for name, found in figures.items():
        tree = f" {found.tree.accept_length:.2f} |" if with_trees else ""
        lines.append(f"| {name} | {found.chain.num_rounds} | {found.chain.accept_length:.2f} |{tree}")
    return "\n".join(lines)


def _computed(args: EvalArgs, folder: Path, target_folder: Path) -> dict[str, Figures]:
    shape = features_of_head(folder, target_folder)  # before the answers, which take long
    answers = greedy_answers(
        args.prompts_path(), target_folder, dtype=args.dtype, device=args.device, load_format=args.load_format,
        threads=args.threads, answer_tokens=args.answer_tokens, max_prompts=args.max_prompts,
    )  # fmt: skip
    longest = max(len(answer.example.tokens) for answer in answers)
    target = TargetStates(
        target_folder, shape, dtype=args.dtype, device=args.device, load_format=args.load_format,
        max_tokens=max(2048, longest), max_len=longest, threads=args.threads,
    )  # fmt: skip
    network = load_published(folder, target, max_len=longest + max(args.steps, args.tree_steps))
    tree = Tree(*args.tree)
    figures: dict[str, Figures] = defaultdict(Figures)
    for answer in tqdm(answers, desc="Answers", disable=not sys.stderr.isatty()):
        own = figures[answer.category]
        own.chain.add(chain_rounds(network, target, [answer.example], num_steps=args.steps))
        if tree.num_nodes:
            own.tree.add(tree_rounds(network, target, [answer.example], tree))
    return dict(figures)


def _served(args: EvalArgs, folder: Path) -> dict[str, Figures]:
    """Through `outrider serve`, one question at a time."""
    prompts = read_first_turns(args.prompts_path())[: args.max_prompts]
    algorithm = algorithm_of(folder)
    figures: dict[str, Figures] = defaultdict(Figures)
    shapes = {"chain": (args.steps, 1, args.steps + 1)}
    if args.tree[2] and algorithm != STANDALONE:
        shapes["tree"] = args.tree
    for name, shape in shapes.items():
        for category, rounds in asyncio.run(ask_all(args, folder, algorithm, shape, prompts)):
            getattr(figures[category], name).add(rounds)
    return dict(figures)


def load_published(folder: Path, target: TargetStates, *, max_len: int) -> Published:
    """An exported head or shallow model, in the target's dtype."""
    dtype = target.runner.dtype
    if not is_whole_model(folder):
        head, features = load_head(
            folder, target.folder, max_len=max_len, dtype=str(dtype).removeprefix("torch."), device=target.device,
            target_load_format=target.load_format,
        )  # fmt: skip
        return Published(Kind(algorithm_of(folder), {}, head.config, features, shift=1), head)
    model = ModelConfig.from_folder(folder)
    config = ShallowConfig(model)
    _, stored = load_checkpoint(folder, tensor_shapes(model))
    tensors = {name: tensor.to(target.device, dtype) for name, tensor in stored}
    embedding = tensors[EMBEDDING]
    vocabulary = Vocabulary(embedding, embedding if model.tied_embeddings else tensors[OUTPUT_HEAD])
    head = config.build(tensors, vocabulary, max_len, Linear)
    return Published(Kind(STANDALONE, {}, config, FeatureSpec(), shift=0), head)


def features_of_head(folder: Path, target: Path) -> FeatureSpec:
    """The states of the target that an exported head goes on from."""
    if is_whole_model(folder):
        return FeatureSpec()
    return HeadFolder.open(folder).config.features(TargetShape.from_folder(target))


@contextlib.contextmanager
def _exported(folder: Path, target: Path, load_format: str) -> Iterator[Path]:
    """The folder itself, or for a while an export of the training whose output it is; what it exported itself stays."""
    if not (folder / LAST).is_file():
        yield folder
        return
    checkpoint = Checkpoint.load(folder / LAST)
    kind = kind_of(checkpoint, target, load_format)
    with tempfile.TemporaryDirectory(prefix=".eval-", dir=made_folder(folder, "the head")) as measured:
        output = Path(measured) / EXPORT_FOLDER
        export(kind, checkpoint, output, target=target, load_format=load_format)
        yield output
