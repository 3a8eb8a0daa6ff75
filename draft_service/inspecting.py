"""`outrider draft --inspect`: the tree that would be proposed after a text, drawn for people."""

from __future__ import annotations

import asyncio
import json

import numpy as np
from tokenizers import Tokenizer

from draft_service.drafters.base import Draft, TextRequest
from draft_service.drafters.factory import make_drafter
from engine.model_folder import resolve_model
from outrider.args import DraftArgs
from outrider.errors import StartupError
from outrider.text_files import load_tokenizer, stated_vocab_size
from outrider.tree import ROOT, TokenTree
from outrider.v1 import common_pb2
from outrider.wire import Ids

MAX_TOKENS = 4096


def proposed_tree(args: DraftArgs, text: str) -> str:
    """The tree, a line for each node. A head drafts from states, for which the target is loaded and run.

    The tree hangs below the text's last token. Raises StartupError for a text without tokens, or with too many.
    """
    folder = resolve_model(args.model_path, revision=args.revision)
    if not (folder / "tokenizer.json").is_file():
        raise StartupError(f"{folder} has no tokenizer.json, which --inspect needs")
    tokenizer = load_tokenizer(folder / "tokenizer.json", stated_vocab_size(folder))
    tokens = np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.int32)
    drafter = make_drafter(args)
    try:
        least = 2 if drafter.features.width else 1
        if not least <= len(tokens) <= MAX_TOKENS:
            raise StartupError(f"--inspect has {len(tokens)} tokens; it must have {least} to {MAX_TOKENS}")
        features = _features(args, drafter.features, tokens) if drafter.features.width else None
        draft = asyncio.run(drafter.propose(TextRequest(tokens, features=features)))
    finally:
        drafter.close_down()
    tree = drawn(tokenizer, int(tokens[-1]), draft)
    if not len(draft) and drafter.algorithm == common_pb2.ALGORITHM_NGRAM:
        tree += ": no text that it has seen goes on here (--speculative-ngram-external-corpus-path gives it some)"
    return tree


def drawn(tokenizer: Tokenizer, root: int, draft: Draft) -> str:
    """Each node below its parent, likelier siblings first, with the probability of its path."""
    lines = [_shown(tokenizer, root) if len(draft) else f"{_shown(tokenizer, root)}  nothing is proposed"]

    def below(tree: TokenTree, node: int, indent: str) -> None:
        children = sorted(tree.children(node), key=lambda child: -draft.probabilities[child])
        for child in children:
            last = child == children[-1]
            shown = _shown(tokenizer, int(tree.tokens[child]))
            lines.append(f"{indent}{'└' if last else '├'}─ {shown}  {draft.probabilities[child]:.3f}")
            below(tree, child, indent + ("   " if last else "│  "))

    below(draft.tree, ROOT, "")
    return "\n".join(lines)


def _shown(tokenizer: Tokenizer, token: int) -> str:
    return json.dumps(tokenizer.decode([token], skip_special_tokens=False), ensure_ascii=False)


def _features(args: DraftArgs, layout: common_pb2.FeatureLayout, tokens: Ids) -> common_pb2.Tensor:
    """The target's rows of all tokens but the last."""
    # Here: torch's, which a drafter of n-grams has not.
    from draft_service.drafters.features import pack_rows
    from engine.batch import Segment
    from engine.feature_spec import FeatureSpec
    from engine.feature_wire import kind_name
    from engine.runner import ModelRunner

    count = len(tokens) - 1
    runner = ModelRunner.load(
        resolve_model(args.model_path, revision=args.revision), dtype=args.dtype, device=args.device, num_slots=count,
        max_sessions=1, max_len=count, features=FeatureSpec(kind_name(layout.kind), tuple(layout.aux_layers)),
        load_format=args.load_format, max_batch_tokens=count, threads=args.threads,
    )  # fmt: skip
    slots = np.arange(count, dtype=np.int32)
    runner.slot_table[0, :count] = slots
    runner.forward([Segment(0, 0, tokens[:-1], slots, num_logits=0)])
    assert runner.features is not None
    return pack_rows(runner.features)
