"""STANDALONE: a small language model with the target's vocabulary drafts for it.

It reads the session's tokens as they are (row i is token i), keeps its own keys and values of them, and needs nothing
of the target but its verdicts.
"""

from __future__ import annotations

from pathlib import Path

from draft_service.drafters.graphs import graph_sizes
from draft_service.drafters.kv import CacheRows
from draft_service.drafters.model_drafter import ModelDrafter
from draft_service.drafters.models import DraftModel, LanguageModel
from draft_service.drafters.pool_size import ROWS_PER_SESSION, check_pool
from draft_service.drafters.roster import State
from draft_service.drafters.shape import TreeShape, possible_steps, tree_shape
from draft_service.session import Session
from engine.attention import DRAFT_ATTENTION, AttentionChoice
from engine.config import ModelConfig
from engine.devices import pick_device
from engine.execution import Execution
from engine.loader import compute_dtype
from engine.model_folder import resolve_model
from engine.models.heads.token_map import load_token_map
from engine.quantization import draft_quantization
from engine.runner import ModelRunner
from engine.shipped import is_shipped, shipped_head, shipped_token_map, stored_quantization
from engine.threads import share_cores
from outrider.args import DraftArgs
from outrider.errors import StartupError
from outrider.telemetry import get_logger
from outrider.text_files import vocab_fingerprint
from outrider.v1 import common_pb2
from outrider.wire import Ids

log = get_logger(__name__)

# Rows of one forward: prompts are cut to it.
MAX_BATCH_TOKENS = 2048


class StandaloneDrafter(ModelDrafter[State]):
    """Any causal language model of the engine's."""

    def __init__(self, model: DraftModel, shape: TreeShape, *, draft_model: str, target: common_pb2.ModelInfo) -> None:
        super().__init__(
            model, shape, algorithm=common_pb2.ALGORITHM_STANDALONE, draft_model=draft_model, target=target
        )

    def _new_state(self, session: Session, rows: CacheRows) -> State:
        return State(session, rows)

    def _num_runnable(self, state: State) -> int:
        return len(state.session.tokens)

    def _num_committed(self, state: State) -> int:
        return len(state.session.tokens)

    def _tokens(self, session: Session, first: int, end: int) -> Ids:
        return session.tokens[first:end]

    def _input(self, state: State, first: int, end: int) -> None:
        return None


def make_drafter(args: DraftArgs) -> StandaloneDrafter:
    """Makes the drafter that flags name. StartupError for a model that is absent, refused, or of another vocabulary."""
    folder = _model_folder(args)
    shape = tree_shape(args, is_head=False)
    config = ModelConfig.from_folder(folder, trust_remote_code=args.trust_remote_code)
    fingerprint = vocab_fingerprint(folder)
    _check_vocabulary(args, folder, fingerprint)
    if config.long_position > config.max_position:
        log.warning(
            "the draft model's context is cut: its rotary scaling changes beyond it", tokens=config.max_position
        )
    check_pool(args, config, compute_dtype(args.dtype, config), pick_device(args.device))
    named = args.speculative_token_map
    if named is None and is_shipped(folder):
        named = shipped_token_map(folder, resolve_model(args.model_path, revision=args.revision))
    token_map = None if named is None else load_token_map(named, config.vocab_size)
    device = pick_device(args.device)
    runner = ModelRunner.load(
        folder, dtype=args.dtype, device=args.device, num_slots=args.draft_max_total_tokens,
        max_sessions=ROWS_PER_SESSION * args.max_sessions, max_len=args.draft_max_total_tokens,
        load_format=args.speculative_draft_load_format or args.load_format, max_batch_tokens=MAX_BATCH_TOKENS,
        threads=args.threads,
        quantization=draft_quantization(
            args.speculative_draft_model_quantization, args.quantization, device,
            stored=stored_quantization(folder, device),
        ),
        execution=Execution(
            AttentionChoice(args.speculative_draft_attention_backend or "auto", flag=DRAFT_ATTENTION),
            graphs=graph_sizes(args, possible_steps(args, shape), shape.topk),
        ),
        trust_remote_code=args.trust_remote_code, output_rows=token_map,
    )  # fmt: skip
    share_cores(args.threads, by_kernels=runner.uses_kernels)
    model = LanguageModel(runner, args.draft_max_total_tokens, max_batch_tokens=MAX_BATCH_TOKENS, token_map=token_map)
    target = common_pb2.ModelInfo(vocab_fingerprint=fingerprint)
    return StandaloneDrafter(model, shape, draft_model=args.speculative_draft_model_path or str(folder), target=target)


def _model_folder(args: DraftArgs) -> Path:
    """The folder that --speculative-draft-model-path names, or of the model that is shipped for the target."""
    if args.speculative_draft_model_path:
        return resolve_model(
            args.speculative_draft_model_path, revision=args.speculative_draft_model_revision,
            flag="--speculative-draft-model-path", revision_flag="--speculative-draft-model-revision",
            load_format=args.speculative_draft_load_format or args.load_format,
            trust_remote_code=args.trust_remote_code,
        )  # fmt: skip
    shipped = shipped_head("STANDALONE", resolve_model(args.model_path, revision=args.revision))
    if shipped is None:
        raise StartupError("STANDALONE drafts with a model of its own: give --speculative-draft-model-path")
    return shipped


def _check_vocabulary(args: DraftArgs, folder: Path, fingerprint: str) -> None:
    """Ids must mean the same on both sides; sizes may differ, since embeddings are padded. Unknown sides pass.

    Verify checks again when the drafter enlists, which is what counts where the target is on another machine.
    """
    target = None if args.model_path is None else Path(args.model_path).expanduser()
    theirs = vocab_fingerprint(target) if target is not None and target.is_dir() else ""
    if fingerprint and theirs and fingerprint != theirs:
        raise StartupError(
            f"the draft model {folder} and the target {target} have different vocabularies (fingerprints "
            f"{fingerprint[:12]} and {theirs[:12]}); STANDALONE needs the same tokenizer"
        )
