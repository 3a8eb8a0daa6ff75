"""The C kernels' structures and functions as ctypes sees them; the C sources say what they mean."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_float, c_int, c_int32, c_int64, c_uint32, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch

from kernels.attention.layout import AttentionLayout
from kernels.native.build import load_library

WIDTH_UNIT = 16  # widths must be a multiple of it, whatever the CPU's vectors


class CMatrix(Structure):
    """A packed matrix (linear.h)."""

    _fields_ = [
        ("data", c_void_p), ("bias", c_void_p), ("n", c_int32), ("k", c_int32), ("format", c_int32),
        ("streams", c_int32),
    ]  # fmt: skip


class CHeads(Structure):
    """Attention's shape, and what is done to q and k (attention.h)."""

    _fields_ = [
        ("num_heads", c_int32), ("num_kv_heads", c_int32), ("head_dim", c_int32), ("wide", c_int32),
        ("kept", c_int32), ("scale", c_float), ("eps", c_float), ("q_norm", c_void_p), ("k_norm", c_void_p),
        ("rope", c_void_p), ("window", c_int32),
    ]  # fmt: skip


class CLayout(Structure):
    """A step's layout (attention.h)."""

    _fields_ = [
        ("slot_table", c_void_p), ("first_rows", c_void_p), ("num_rows", c_void_p), ("prefix_lens", c_void_p),
        ("table_rows", c_void_p), ("slots", c_void_p), ("positions", c_void_p), ("masks", c_void_p),
        ("mask_starts", c_void_p), ("table_width", c_int32), ("num_segments", c_int32), ("first_run", c_void_p),
        ("num_run", c_void_p),
    ]  # fmt: skip


class CLayer(Structure):
    """A decoder layer (decoder.h)."""

    _fields_ = [
        ("input_norm", c_void_p), ("post_norm", c_void_p), ("q_norm", c_void_p), ("k_norm", c_void_p),
        ("qkv", CMatrix), ("output", CMatrix), ("gate_up", CMatrix), ("down", CMatrix),
        ("k_pool", c_void_p), ("v_pool", c_void_p), ("window", c_int64),
    ]  # fmt: skip


class CModel(Structure):
    """A decoder (decoder.h)."""

    _fields_ = [
        ("hidden", c_int32), ("ffn", c_int32), ("num_layers", c_int32), ("vocab", c_int32),
        ("wide_activations", c_int32), ("wide_embedding", c_int32), ("last_feature", c_int32),
        ("num_aux", c_int32), ("feature_width", c_int32), ("gates_apart", c_int32), ("aux_layers", c_void_p),
        ("heads", CHeads), ("layers", POINTER(CLayer)), ("embedding", c_void_p), ("final_norm", c_void_p),
        ("head", CMatrix), ("features", c_void_p), ("entry", c_int32), ("residual_normed", c_int32),
        ("carry_normed", c_int32), ("num_fuse_norms", c_int32), ("embedding_norm", c_void_p), ("state_norm", c_void_p),
        ("join", CMatrix * 2), ("fuse", CMatrix), ("fuse_norms", c_void_p),
    ]  # fmt: skip


class CLikeliest(Structure):
    """Where the likeliest tokens of a step's rows go (likeliest.h)."""

    _fields_ = [("probabilities", c_void_p), ("ids", c_void_p), ("num_top", c_int32), ("width", c_int32)]


class CGrowth(Structure):
    """Trees that grow together (grow.h)."""

    _fields_ = [
        ("batch", c_int32), ("num_steps", c_int32), ("topk", c_int32), ("num_logits", c_int32),
        ("num_drafted", c_int32), ("num_read", c_int32), ("table_width", c_int32), ("state_bytes", c_int32),
        ("num_tips", c_int32), ("inputs_are_features", c_int32), ("slot_table", c_void_p), ("table_rows", c_void_p),
        ("lengths", c_void_p), ("behind", c_void_p), ("behind_tokens", c_void_p), ("inputs", c_void_p),
        ("slots", c_void_p), ("names", c_void_p), ("tip_chances", c_void_p), ("tip_words", c_void_p),
        ("carried", c_void_p), ("scores", c_void_p), ("tokens", c_void_p), ("frontier", c_void_p),
        ("entry_tokens", c_void_p), ("entry_parents", c_void_p), ("masks", c_void_p), ("logits", c_void_p),
        ("counts", c_void_p), ("nodes", c_void_p), ("chances", c_void_p), ("least_reach", c_float),
        ("num_run", c_int32),
    ]  # fmt: skip


class CPlan(Structure):
    """A bucket of attention's plans (plan.h)."""

    _fields_ = [
        ("data", c_void_p), ("order", c_void_p), ("items", c_void_p), ("num_segments", c_int32),
        ("rows_per_segment", c_int32), ("max_prefix_len", c_int32), ("has_masks", c_int32),
        ("rows_per_tile", c_int32), ("num_items", c_int32), ("num_kv_heads", c_int32), ("page_size", c_int32),
        ("min_piece", c_int32), ("target_programs", c_int32), ("tiles", c_int32), ("segments", c_int32),
        ("slots", c_int32), ("positions", c_int32), ("masks", c_int32), ("mask_words", c_int32), ("table", c_int32),
    ]  # fmt: skip


# Parts of a step's time, in decoder.h's order.
PARTS = ("norms", "qkv", "rope_and_kv", "attention", "output", "gate_up", "down", "head")

SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "outrider_decoder_create": (c_void_p, [POINTER(CModel), c_int]),
    "outrider_decoder_destroy": (None, [c_void_p]),
    "outrider_decoder_forward": (
        c_int,
        [
            c_void_p, POINTER(CLayout), c_void_p, c_void_p, c_void_p, c_void_p, c_int, c_void_p, c_int, c_void_p,
            c_void_p, c_void_p, c_void_p,
        ],
    ),
    "outrider_grow": (c_int, [c_void_p, POINTER(CGrowth), c_int, c_int]),
    "outrider_attention": (c_int, [POINTER(CHeads), POINTER(CLayout), c_void_p, c_void_p, c_void_p, c_void_p]),
    "outrider_product_team": (c_void_p, [c_int]),
    "outrider_team_destroy": (None, [c_void_p]),
    "outrider_product": (
        c_int,
        [c_void_p, POINTER(CMatrix), c_void_p, c_int, c_int, c_void_p, c_int, c_float, c_int, c_void_p],
    ),
    "outrider_likeliest": (None, [c_void_p, c_int64, c_int, c_int, c_int, c_void_p, c_void_p]),
    "outrider_copy_finite": (c_int, [c_void_p, c_void_p, c_int64, c_int, c_uint32]),
    "outrider_plan": (c_int64, [POINTER(CLayout), POINTER(CPlan)]),
    "outrider_instructions": (c_char_p, []),
    "outrider_has_bf16_dot": (c_int, []),
}  # fmt: skip


@cache
def open_library(cache_folder: Path, max_compilers: int | None = None) -> ctypes.CDLL:
    """The compiled kernels, with their signatures; see kernels.native.build.load_library, also for what it raises."""
    return with_signatures(load_library(cache_folder, max_compilers=max_compilers))


def with_signatures(library: ctypes.CDLL) -> ctypes.CDLL:
    """The library, its functions told what they take and give."""
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def address(tensor: torch.Tensor | None) -> int | None:
    """Where a tensor's numbers lie; the caller keeps it alive."""
    return None if tensor is None else tensor.data_ptr()


def c_layout(layout: AttentionLayout) -> CLayout:
    """A layout's addresses, looked up once and kept with it; the layout must outlive the result."""
    if layout.addresses is None:
        arrays = (
            layout.slot_table, layout.first_rows, layout.num_rows, layout.prefix_lens, layout.table_rows, layout.slots,
            layout.positions, layout.masks, layout.mask_starts,
        )  # fmt: skip
        layout.addresses = CLayout(*(array.ctypes.data for array in arrays), layout.slot_table.shape[1])
    layout.addresses.num_segments = len(layout.first_rows)
    return layout.addresses
