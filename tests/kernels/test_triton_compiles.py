"""The Triton kernels compile and fit, for Hopper all, attention for what is smaller too.

No GPU is needed for that, only triton's own assembler.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.attention.triton_blocks import Blocks, Heads, blocks_for
from tests.kernels.interpreted import INTERPRETED

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(INTERPRETED, reason="the interpreter does not compile"),
]
# What a program may have at most: 227 KiB on Hopper; these kernels keep to what Ada (99) and Ampere (163) have too.
SHARED_LIMIT = 99 * 1024
HOPPER, ADA, AMPERE = 90, 89, 80
TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
MODELS = [
    Heads(9, 3, 64, torch.bfloat16),
    Heads(32, 8, 128, torch.bfloat16),
    Heads(32, 32, 96, torch.float16),
    Heads(16, 8, 256, torch.bfloat16),
    Heads(32, 8, 128, torch.float32),
]
CASES = [(heads, blocks) for heads in MODELS for blocks in blocks_for(heads)]


def compiled(
    kernel: Any, types: dict[str, str], sizes: dict[str, Any], num_warps: int, num_stages: int, target: int = HOPPER
) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in sizes.items()}, aligned)
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)


def stack_bytes(kernel: Any, folder: Path) -> int:
    """What spilled registers take of each thread's stack, as cuobjdump reports it."""
    import triton

    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    said = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    found = re.search(r"STACK:(\d+)", said)
    assert found is not None, said
    return int(found.group(1))


def compiled_attend(heads: Heads, blocks: Blocks, *, extras: bool = False, target: int = HOPPER) -> Any:
    import triton
    import triton.language as tl

    from kernels.attention.triton_kernels import attend

    pointer, head_dim = f"*{TYPES[heads.dtype]}", heads.head_dim
    types = dict.fromkeys(("items", "segments", "table", "slots", "positions"), "*i32") | {
        "q": pointer, "k_pool": pointer, "v_pool": pointer, "out": pointer, "parts": "*fp32", "part_sums": "*fp32",
        "masks": "*i64", "scale": "fp32",
    }  # fmt: skip
    sizes = {
        "Q_ROW": heads.num_heads * head_dim, "Q_HEAD": head_dim, "KV_SLOT": heads.num_kv_heads * head_dim,
        "KV_HEAD": head_dim, "KV_HEADS": heads.num_kv_heads, "GROUP": heads.group, "HEAD_DIM": head_dim,
        "BLOCK_D": triton.next_power_of_2(head_dim), "BLOCK_M": blocks.rows, "BLOCK_N": blocks.keys,
        "PAGE": 16 if extras else 1, "MASK_WORDS": 1, "WINDOW": 4096 if extras else 0,
        "SOFT_CAP": 50.0 if extras else 0.0, "OPERAND": getattr(tl, str(heads.dtype).removeprefix("torch.")),
        "PRECISION": "ieee",
    }  # fmt: skip
    return compiled(attend, types, sizes, blocks.num_warps, blocks.num_stages, target)


@pytest.mark.parametrize(("heads", "blocks"), CASES)
@pytest.mark.parametrize("extras", [False, True])
def test_attend(heads: Heads, blocks: Blocks, extras: bool, tmp_path: Path) -> None:
    kernel = compiled_attend(heads, blocks, extras=extras)
    assert kernel.metadata.shared <= SHARED_LIMIT
    assert stack_bytes(kernel, tmp_path) <= 16
    if heads.dtype is not torch.float32 and blocks.rows >= 64:
        assert "wgmma" in kernel.asm["ptx"]


@pytest.mark.parametrize(("target", "model", "size"), [(ADA, 1, 2), (ADA, 3, 0), (AMPERE, 3, 0), (AMPERE, 3, 1)])
def test_attend_on_smaller_gpus(target: int, model: int, size: int, tmp_path: Path) -> None:
    """The tiles that take the most shared memory there, and the most registers."""
    heads = MODELS[model]
    kernel = compiled_attend(heads, blocks_for(heads)[size], target=target)
    assert kernel.metadata.shared <= SHARED_LIMIT
    assert stack_bytes(kernel, tmp_path) <= 64  # Ampere's, of head_dim 256


def test_combine(tmp_path: Path) -> None:
    from kernels.attention.triton_kernels import combine

    types = {"out": "*bf16", "parts": "*fp32", "part_sums": "*fp32", "tiles": "*i32"}
    sizes = {"KV_HEADS": 8, "GROUP": 4, "HEAD_DIM": 96, "BLOCK_D": 128, "BLOCK_M": 64}
    assert stack_bytes(compiled(combine, types, sizes, 4, 3), tmp_path) == 0


def test_rope_and_store(tmp_path: Path) -> None:
    from kernels.attention.triton_rope import _rope_and_store

    types = dict.fromkeys(("q", "k", "v", "rotated", "k_pool", "v_pool"), "*bf16") | {"rope": "*fp32", "slots": "*i64"}
    strides = {"Q_ROW": 6144, "Q_HEAD": 128, "K_ROW": 6144, "K_HEAD": 128, "V_ROW": 6144, "V_HEAD": 128}
    sizes = strides | {"KV_SLOT": 1024, "KV_HEAD": 128, "HEADS": 32, "KV_HEADS": 8, "HALF": 64, "BLOCK": 64}
    assert stack_bytes(compiled(_rope_and_store, types, sizes, 1, 3), tmp_path) == 0


@pytest.mark.parametrize("adds", [False, True])
def test_norm(adds: bool, tmp_path: Path) -> None:
    from kernels.norm_triton import _rms_norm

    types = dict.fromkeys(("x", "weight", "out", *(("more", "total") if adds else ())), "*bf16") | {"eps": "fp32"}
    sizes: dict[str, Any] = {"ROW": 4096, "HEAD": 0, "MORE_ROW": 4096, "HEADS": 1, "WIDTH": 4096, "BLOCK": 4096}
    sizes |= {} if adds else {"more": None, "total": None}
    assert stack_bytes(compiled(_rms_norm, types, sizes, 8, 3), tmp_path) == 0


@pytest.mark.parametrize("pool_type", ["*fp8e4nv", "*fp8e5"])
def test_attend_over_an_fp8_pool(pool_type: str, tmp_path: Path) -> None:
    import triton.language as tl

    from kernels.attention.triton_kernels import attend

    sizes_there = blocks_for(Heads(32, 8, 128, torch.bfloat16))
    for blocks in (sizes_there[0], sizes_there[-1]):
        types = dict.fromkeys(("items", "segments", "table", "slots", "positions"), "*i32") | {
            "q": "*bf16", "k_pool": pool_type, "v_pool": pool_type, "out": "*bf16", "parts": "*fp32",
            "part_sums": "*fp32", "masks": "*i64", "scale": "fp32",
        }  # fmt: skip
        sizes = {
            "Q_ROW": 4096, "Q_HEAD": 128, "KV_SLOT": 1024, "KV_HEAD": 128, "KV_HEADS": 8, "GROUP": 4, "HEAD_DIM": 128,
            "BLOCK_D": 128, "BLOCK_M": blocks.rows, "BLOCK_N": blocks.keys, "PAGE": 16, "MASK_WORDS": 1, "WINDOW": 0,
            "SOFT_CAP": 0.0, "OPERAND": tl.bfloat16, "PRECISION": "ieee",
        }  # fmt: skip
        kernel = compiled(attend, types, sizes, blocks.num_warps, blocks.num_stages)
        assert kernel.metadata.shared <= SHARED_LIMIT
        assert stack_bytes(kernel, tmp_path) <= 16


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("topk", [4, 16])
def test_drafting(topk: int, dtype: torch.dtype, tmp_path: Path) -> None:
    from kernels.likeliest_triton import BLOCK, MOST_FOUND, _of_blocks, _of_rows
    from kernels.tree_growth_triton import _grow_on

    pointer = f"*{TYPES[dtype]}"
    sizes: dict[str, Any] = {"ROW": 128256, "VOCAB": 128256, "TOP": topk, "BLOCK": BLOCK}
    types = {"logits": pointer, "found": "*i64", "sums": "*fp32", "chances": "*fp32", "ids": "*i64"}
    assert stack_bytes(compiled(_of_blocks, types, sizes, 4, 3), tmp_path) == 0
    sizes = {"BLOCKS": MOST_FOUND // topk, "TOP": topk, "BLOCK_B": MOST_FOUND // topk, "BLOCK_F": MOST_FOUND}
    assert stack_bytes(compiled(_of_rows, types, sizes, 4, 3), tmp_path) == 0
    types |= dict.fromkeys(("names", "tokens", "bits", "own"), "*i64") | {"reach": "*fp32"}
    types |= dict.fromkeys(("came_out", "inputs", "states"), pointer)
    types |= dict.fromkeys(("batch", "step", "entries", "most"), "i32")
    sizes = {"TOPK": topk, "PARENTS": topk, "WORDS": 1, "HIDDEN": 5120, "IS_FIRST": False, "IS_LAST": False}
    sizes |= {"HAS_NAMES": True, "BLOCK_C": topk * topk, "BLOCK_W": 1, "BLOCK_H": 4096}
    assert stack_bytes(compiled(_grow_on, types, sizes, 4, 3), tmp_path) == 0
    sizes |= {"PARENTS": 1, "IS_FIRST": True, "BLOCK_C": topk}
    assert stack_bytes(compiled(_grow_on, types, sizes, 4, 3), tmp_path) == 0


@pytest.mark.parametrize("dtype", TYPES)
def test_paired_norms(dtype: torch.dtype, tmp_path: Path) -> None:
    from kernels.paired_norms_triton import _paired_norms

    pointers = ("embedding", "states", "embedding_norm", "state_norm", "out")
    types = dict.fromkeys(pointers, f"*{TYPES[dtype]}") | {"tokens": "*i64", "eps": "fp32"}
    sizes = {"EMBEDDING_ROW": 8192, "STATE_ROW": 8192, "WIDTH": 8192, "BLOCK": 8192}
    assert stack_bytes(compiled(_paired_norms, types, sizes, 16, 3), tmp_path) == 0


def test_sampling(tmp_path: Path) -> None:
    from kernels.sampling_triton import _NUM_WARPS, _SEARCH_BLOCK, _VOCAB_BLOCK, _draw_row

    types = dict.fromkeys(("temperature", "top_p", "min_p", "u", "scratch"), "*fp64")
    types |= {"logits": "*fp32", "rows": "*i64", "top_k": "*i64", "tokens": "*i64"}
    sizes = {"LOGIT_ROW": 128256, "VOCAB": 128256, "BLOCK": _VOCAB_BLOCK, "SEARCH_BLOCK": _SEARCH_BLOCK}
    assert stack_bytes(compiled(_draw_row, types, sizes, _NUM_WARPS, 3), tmp_path) <= 16


def test_acceptance(tmp_path: Path) -> None:
    from kernels.acceptance_triton import _walk_coupled, _walk_thresholds

    types: dict[str, str] = dict.fromkeys(("parents", "tokens"), "*i32")
    types |= dict.fromkeys(("num_nodes", "target_tokens", "nodes_out", "num_out", "bonus_out"), "*i64")
    walk = compiled(_walk_coupled, types, {"WIDTH": 63, "BLOCK": 64}, 1, 3)
    assert stack_bytes(walk, tmp_path) == 0
    types |= dict.fromkeys(("probs", "coins", "finals", "threshold_single", "threshold_acc"), "*fp64")
    del types["target_tokens"]
    sizes = {"WIDTH": 63, "VOCAB": 128256, "BLOCK": 64, "VOCAB_BLOCK": 1024}
    assert stack_bytes(compiled(_walk_thresholds, types, sizes, 4, 3), tmp_path) <= 16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [8, 4])
def test_products_with_quantised_weights(bits: int, dtype: torch.dtype, tmp_path: Path) -> None:
    import triton.language as tl

    from kernels.quantized_triton import _int4_tile, _int8_tile

    pointer = f"*{TYPES[dtype]}"
    types = {"x": pointer, "y": pointer, "codes": "*i8", "scales": "*fp32", "pairs": "*u8", "steps": "*bf16"}
    types |= {
        "lows": "*bf16",
        **dict.fromkeys(("num_rows", "num_outputs", "num_inputs", "num_pairs", "num_groups"), "i32"),
    }
    sizes = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 128, "OPERAND": getattr(tl, str(dtype).removeprefix("torch."))}
    sizes |= {"BLOCK_K": 64, "PAIRS": 16} if bits == 4 else {}
    kernel = compiled(_int4_tile if bits == 4 else _int8_tile, types, sizes, 4, 4)
    assert kernel.metadata.shared <= SHARED_LIMIT
    assert stack_bytes(kernel, tmp_path) <= 16
