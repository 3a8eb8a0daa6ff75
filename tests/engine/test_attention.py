"""Names of attention backends, and FlashInfer's backend over stand-ins for FlashInfer's classes."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine.attention import BACKENDS, attention_backend
from kernels.attention import flashinfer, reference, torch_native
from outrider.errors import StartupError
from tests.kernels.attention_cases import Case, Piece, make_case, random_tree

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("name", ["auto", "torch_native"])
def test_on_cpu_torch_serves(name: str) -> None:
    assert attention_backend(name, CPU) is torch_native.attention


@pytest.mark.parametrize(
    ("name", "device", "message"),
    [
        ("triton", CPU, "triton needs a CUDA device; this one is cpu"),
        ("flashinfer", CPU, "flashinfer needs a CUDA device; this one is cpu"),
        ("trtllm_mha", CUDA, "'trtllm_mha' is SGLang's and not offered here; there are auto, torch_native"),
        ("fa3", CPU, "'fa3' is SGLang's"),
        ("fast", CPU, "'fast' is unknown; there are auto, torch_native, triton, flashinfer"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(name: str, device: torch.device, message: str) -> None:
    with pytest.raises(StartupError, match=message):
        attention_backend(name, device)


def test_triton_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(StartupError, match="needs the package triton"):
        attention_backend("triton", CUDA)
    assert attention_backend("auto", CUDA) is torch_native.attention


def test_flashinfer_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(StartupError, match="needs the package flashinfer-python"):
        attention_backend("flashinfer", CUDA)


def test_the_names() -> None:
    assert BACKENDS == ("auto", "torch_native", "triton", "flashinfer")


class Wrapper:
    """Does what FlashInfer's paged wrappers document, plainly; `plan` has the arguments in their order."""

    def __init__(self, workspace: torch.Tensor, kv_layout: str) -> None:
        assert (workspace.dtype, kv_layout) == (torch.uint8, "NHD")
        self.num_plans = 0

    def keep(
        self, rows: torch.Tensor, pages: torch.Tensor, indices: torch.Tensor, last: torch.Tensor, heads: int,
        kv_heads: int, head_dim: int, page_size: int, **options: Any,
    ) -> None:  # fmt: skip
        assert (rows.dtype, pages.dtype, indices.dtype, page_size) == (torch.int32,) * 3 + (1,)
        assert (last == 1).all()
        self.num_plans += 1
        self.rows, self.pages, self.indices, self.sizes = rows, pages, indices, (heads, kv_heads, head_dim)
        self.options = options

    def run(self, q: torch.Tensor, pools: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        heads, kv_heads, head_dim = self.sizes
        assert q.shape[1:] == (heads, head_dim)
        out, taken = torch.empty_like(q), 0
        for segment in range(len(self.rows) - 1):
            rows = slice(int(self.rows[segment]), int(self.rows[segment + 1]))
            slots = self.indices[int(self.pages[segment]) : int(self.pages[segment + 1])]
            size = (rows.stop - rows.start, len(slots))
            keys, values = (pool[slots, 0].float().repeat_interleave(heads // kv_heads, 1) for pool in pools)
            scores = torch.einsum("ihd,jhd->hij", q[rows].float(), keys) * self.options["sm_scale"]
            cap = self.options["logits_soft_cap"]
            scores = cap * torch.tanh(scores / cap) if cap else scores
            back = torch.arange(size[1] - size[0], size[1])[:, None] - torch.arange(size[1])[None, :]
            visible = torch.ones(size, dtype=torch.bool)
            if "custom_mask" in self.options:
                visible = self.options["custom_mask"][taken : taken + size[0] * size[1]].view(size)
            elif self.options.get("causal"):
                visible = back >= 0
            if self.options["window_left"] >= 0:
                visible = visible & (back <= self.options["window_left"])
            taken += size[0] * size[1]
            weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
            out[rows] = torch.einsum("hij,jhd->ihd", weights, values).to(q.dtype)
        return out


class Prefill(Wrapper):
    def plan(self, rows: torch.Tensor, *pages: Any, **options: Any) -> None:
        self.keep(rows, *pages, **options)


class Decode(Wrapper):
    def plan(self, indptr: torch.Tensor, *pages: Any, **options: Any) -> None:
        self.keep(torch.arange(len(indptr), dtype=torch.int32), indptr, *pages, **options)


LIBRARY = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Prefill, BatchDecodeWithPagedKVCacheWrapper=Decode)
RNG = np.random.default_rng(11)
STEPS = {
    "decode": [Piece(9, 1), Piece(0, 1), Piece(40, 1)],
    "prefill": [Piece(9, 4), Piece(0, 7), Piece(3, 1)],
    "trees": [Piece(9, 6, random_tree(RNG, 6)), Piece(20, 5), Piece(30, 1)],
}


def run(case: Case, **options: Any) -> torch.Tensor:
    attention = flashinfer.FlashInferAttention(CPU, LIBRARY)
    return attention(case.q, case.k_pool, case.v_pool, case.layout, case.scale, **options)


@pytest.mark.parametrize("name", STEPS)
def test_flashinfer_is_told_what_the_layout_says(name: str) -> None:
    case = make_case(STEPS[name], dtype=torch.bfloat16)
    wanted = reference.attention(case.q, case.k_pool, case.v_pool, case.layout, case.scale)
    torch.testing.assert_close(run(case), wanted, atol=0.02, rtol=0.01)
    # Nothing lies further back than a window this wide.
    torch.testing.assert_close(run(case, window=100), wanted, atol=0.02, rtol=0.01)
    capped = run(case, soft_cap=1000.0)
    torch.testing.assert_close(capped, wanted, atol=0.02, rtol=0.01)


def test_flashinfers_window_goes_by_depth_in_a_tree() -> None:
    # A star: its leaves, all one below the root, see the root and themselves through a window of two.
    star = make_case([Piece(9, 4, [-1, 0, 0, 0])], dtype=torch.bfloat16)
    alone = make_case([Piece(9, 4, [-1, 0, 0, 0])], dtype=torch.bfloat16)
    alone.layout.prefix_lens[:] = 0
    wanted = reference.attention(alone.q, alone.k_pool, alone.v_pool, alone.layout, alone.scale)
    torch.testing.assert_close(run(star, window=2)[1:], wanted[1:], atol=0.02, rtol=0.01)


def test_flashinfer_plans_once_a_step() -> None:
    case = make_case(STEPS["decode"], dtype=torch.float16)
    attention = flashinfer.FlashInferAttention(CPU, LIBRARY)
    for _ in range(3):
        attention(case.q, case.k_pool, case.v_pool, case.layout, case.scale)
    assert attention._decode.num_plans == 1
    attention(case.q, case.k_pool, case.v_pool, case.layout, case.scale, window=4)
    assert attention._decode.num_plans == 2


def test_flashinfer_refuses_fp32() -> None:
    with pytest.raises(ValueError, match="float32"):
        run(make_case(STEPS["decode"]))
