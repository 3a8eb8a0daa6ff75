"""From flags to a drafter with a head: which head, whether it fits the target, and what it needs of it."""

from __future__ import annotations

from pathlib import Path

import torch

from draft_service.drafters.eagle import EagleDrafter
from draft_service.drafters.graphs import graph_sizes, tree_sizes
from draft_service.drafters.models import HeadModel
from draft_service.drafters.mtp import MultiLayerDrafter
from draft_service.drafters.pool_size import ROWS_PER_SESSION, check_pool
from draft_service.drafters.shape import TreeShape, possible_steps, tree_shape
from draft_service.drafters.standalone import MAX_BATCH_TOKENS
from engine.cpu_kernels import cpu_kernels
from engine.devices import pick_device, take_device
from engine.feature_spec import FeatureSpec
from engine.feature_wire import wire_kind
from engine.loader import compute_dtype
from engine.model_folder import resolve_model
from engine.models.heads.base import Head
from engine.models.heads.load import HeadFolder, load_head
from engine.models.heads.names import NoHeadError
from engine.models.heads.runner import HeadRunner
from engine.models.heads.target import TargetShape
from engine.quantization import KernelLinears, draft_quantization
from engine.shipped import shipped_head, shipped_token_map, stored_quantization
from engine.threads import share_cores
from outrider.args import DraftArgs
from outrider.errors import StartupError
from outrider.text_files import vocab_fingerprint
from outrider.v1 import common_pb2

_ALGORITHMS = {"eagle": common_pb2.ALGORITHM_EAGLE, "eagle3": common_pb2.ALGORITHM_EAGLE3}


def features_needed(args: DraftArgs) -> FeatureSpec:
    """The target's states that the head goes on from; no weights are read. StartupError as for make_drafter."""
    target_folder, folder, load_format = _folders(args)
    opened = HeadFolder.open(folder, load_format=load_format)
    _check_family(args, folder, opened.config.family, opened.names.num_stages)
    return opened.config.features(TargetShape.from_folder(target_folder))


def make_drafter(args: DraftArgs) -> EagleDrafter | MultiLayerDrafter:
    """Makes the drafter of EAGLE, EAGLE3 or NEXTN. StartupError for a head that is absent or does not fit."""
    target_folder, folder, load_format = _folders(args)
    target = TargetShape.from_folder(target_folder)
    device = _device(args, folder, target, load_format)
    stored = stored_quantization(folder, device)
    method = draft_quantization(args.speculative_draft_model_quantization, args.quantization, device, stored=stored)
    token_map = args.speculative_token_map
    if token_map is None and (args.speculative_algorithm or "").upper() != "EAGLE3":  # which has its own
        token_map = shipped_token_map(folder, target_folder)
    threads = share_cores(args.threads, by_kernels=device.type == "cpu" and cpu_kernels() is not None)
    head, spec = load_head(
        folder, target_folder, max_len=args.draft_max_total_tokens, dtype=args.dtype, device=device,
        load_format=load_format, target_load_format=args.load_format, token_map=token_map,
        make_linear=KernelLinears(method, threads),
    )  # fmt: skip
    _check_family(args, folder, head.config.family, head.num_stages)
    shape = _shape(args, head, target)
    steps = possible_steps(args, shape, has_layer_for_each=head.config.family == "multi-layer")
    runner = HeadRunner(
        head, num_slots=args.draft_max_total_tokens, max_sessions=ROWS_PER_SESSION * args.max_sessions,
        attention=args.speculative_draft_attention_backend or "auto", max_batch_tokens=MAX_BATCH_TOKENS,
        graphs=graph_sizes(args, steps, shape.topk),
    )  # fmt: skip
    kind = MultiLayerDrafter if head.config.family == "multi-layer" else EagleDrafter
    return kind(
        HeadModel(
            runner, args.draft_max_total_tokens, max_batch_tokens=MAX_BATCH_TOKENS,
            graphs=tree_sizes(args, steps, shape.topk, is_quantized=method is not None),
        ), shape,
        algorithm=_ALGORITHMS.get(head.config.family, common_pb2.ALGORITHM_MTP),
        draft_model=args.speculative_draft_model_path or str(folder),
        features=common_pb2.FeatureLayout(
            kind=wire_kind(spec.kind), aux_layers=spec.layers, width=head.config.feature_width
        ),
        target=common_pb2.ModelInfo(
            model_path=str(target_folder), architecture=target.architecture, vocab_size=target.vocab_size,
            vocab_fingerprint=vocab_fingerprint(target_folder), hidden_size=target.hidden_size,
            num_layers=target.num_layers,
        ),
    )  # fmt: skip


def _device(args: DraftArgs, folder: Path, target: TargetShape, load_format: str) -> torch.device:
    """The device that is drafted on. StartupError where its memory is too small for the pool."""
    device = pick_device(args.device)
    take_device(device)
    block = HeadFolder.open(folder, load_format=load_format).config.block
    check_pool(args, block, compute_dtype(args.dtype, target), device)
    return device


def _folders(args: DraftArgs) -> tuple[Path, Path, str]:
    """The target's folder, the head's, and the form of the head's weights."""
    target_folder = resolve_model(args.model_path, revision=args.revision, load_format=args.load_format)
    load_format = args.speculative_draft_load_format or args.load_format
    return target_folder, _head_folder(args, target_folder, load_format), load_format


def _head_folder(args: DraftArgs, target_folder: Path, load_format: str) -> Path:
    """The folder that --speculative-draft-model-path names; else a shipped head's, or a target's with MTP layers."""
    if args.speculative_draft_model_path:
        return resolve_model(
            args.speculative_draft_model_path, revision=args.speculative_draft_model_revision,
            flag="--speculative-draft-model-path", revision_flag="--speculative-draft-model-revision",
            load_format=load_format,
        )  # fmt: skip
    shipped = shipped_head((args.speculative_algorithm or "").upper(), target_folder)
    if shipped is not None:
        return shipped
    try:
        HeadFolder.open(target_folder, load_format=load_format)
    except NoHeadError as error:
        raise StartupError(
            f"--speculative-draft-model-path is not given, and the target has no head of its own: {error}"
        ) from error
    return target_folder


def _check_family(args: DraftArgs, folder: Path, family: str, num_layers: int) -> None:
    """The algorithm that was asked for is the head's, and a multi-layer one's chains are no longer than its layers."""
    algorithm = (args.speculative_algorithm or "").upper()
    if (algorithm == "EAGLE3") != (family == "eagle3"):
        fitting = "EAGLE3" if family == "eagle3" else "EAGLE"
        raise StartupError(
            f"--speculative-algorithm is {algorithm}, but the head in {folder} is of family {family}: use {fitting}"
        )
    if args.enable_multi_layer_eagle and family != "multi-layer":
        raise StartupError(
            f"--enable-multi-layer-eagle needs a layer for each step; the head in {folder} is of family {family}"
        )
    if args.speculative_adaptive and family == "multi-layer":
        raise StartupError(
            f"--speculative-adaptive needs a head with one layer for all steps; the one in {folder} has one for each, "
            "and runs all of them: leave the flag out"
        )
    steps, topk = args.speculative_num_steps, args.speculative_eagle_topk
    if family == "multi-layer" and steps is not None and (topk != 1 or steps > num_layers):
        raise StartupError(
            f"a multi-layer head of {num_layers} layers drafts chains of at most as many tokens; "
            f"--speculative-num-steps is {steps} and --speculative-eagle-topk {topk}"
        )


def _shape(args: DraftArgs, head: Head, target: TargetShape) -> TreeShape:
    """The trees to draft; a multi-layer head's default is a chain of as many as its layers."""
    shape = tree_shape(args, is_head=True, target_architecture=target.architecture)
    if head.config.family == "multi-layer" and args.speculative_num_steps is None:
        return TreeShape(head.num_stages, 1, head.num_stages + 1)
    return shape
