"""Names of attention backends, and FlashInfer's backend over stand-ins for FlashInfer's classes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine.attention import (
    BACKENDS,
    DRAFT_ATTENTION,
    AttentionChoice,
    attention_backend,
    build_attention,
    check_fp8,
    check_heads,
)  # fmt: skip
from kernels.attention import flashinfer, reference, torch_native
from kernels.attention.layout import AttentionLayout
from kernels.attention.split import SplitAttention
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
    with pytest.raises(StartupError, match=f"^{DRAFT_ATTENTION} {message}"):
        attention_backend(name, device, flag=DRAFT_ATTENTION)


@pytest.mark.parametrize(
    ("choice", "flag"),
    [
        (AttentionChoice("fast"), "--attention-backend"),
        (AttentionChoice("fast", flag=DRAFT_ATTENTION), "--speculative-draft-attention-backend"),
        (AttentionChoice(prefill="fast"), "--prefill-attention-backend"),
        (AttentionChoice("torch_native", decode="fast"), "--decode-attention-backend"),
        (AttentionChoice("triton"), "--attention-backend"),
        (AttentionChoice(prefill="triton"), "--prefill-attention-backend"),
        (AttentionChoice(decode="triton"), "--decode-attention-backend"),
        (AttentionChoice(decode="flashinfer", verify="decode"), "--decode-attention-backend"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_flag_that_asked(choice: AttentionChoice, flag: str) -> None:
    with pytest.raises(StartupError, match=f"^{flag} "):
        build_attention(choice, CPU)


def test_triton_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(StartupError, match="needs the package triton"):
        attention_backend("triton", CUDA)
    assert attention_backend("auto", CUDA) is torch_native.attention


@pytest.fixture
def capable(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Has CUDA devices be of a compute capability, and Triton installed."""

    def be(major: int, minor: int) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, minor))

    be(9, 0)
    return be


def test_gpus_that_are_too_old_for_triton(capable: Callable[[int, int], None]) -> None:
    assert AttentionChoice().resolved(CUDA).prefill == "triton"
    capable(7, 5)
    assert attention_backend("auto", CUDA) is torch_native.attention
    assert build_attention(AttentionChoice(), CUDA) is torch_native.attention
    message = r"--decode-attention-backend triton needs compute capability 8\.0; this GPU has 7\.5: use torch_native"
    with pytest.raises(StartupError, match=message):
        build_attention(AttentionChoice(decode="triton"), CUDA)


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ((8, 8, 512), "head_dim is 512; the Triton kernels take 1 to 256: use --attention-backend torch_native"),
        ((128, 1, 64), "num_attention_heads is 128 and num_key_value_heads 1, 128 query heads .* at most 64"),
    ],
)
@pytest.mark.usefixtures("capable")
def test_heads_that_triton_does_not_cover_are_told_at_the_start(heads: tuple[int, int, int], message: str) -> None:
    config: Any = SimpleNamespace(num_heads=heads[0], num_kv_heads=heads[1], head_dim=heads[2])
    with pytest.raises(StartupError, match=message):
        check_heads(AttentionChoice(), config, torch.bfloat16, CUDA)
    check_heads(AttentionChoice("torch_native"), config, torch.bfloat16, CUDA)
    check_heads(AttentionChoice(), config, torch.bfloat16, CPU)


def test_flashinfer_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(StartupError, match="needs the package flashinfer-python"):
        attention_backend("flashinfer", CUDA)


def test_the_names() -> None:
    assert BACKENDS == ("auto", "torch_native", "triton", "flashinfer")


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        (AttentionChoice(), "torch_native"),
        (AttentionChoice("triton"), "triton"),
        (AttentionChoice("triton", verify="decode"), "triton trees as decode"),
        (AttentionChoice("auto", decode="flashinfer"), "torch_native+flashinfer"),
        (AttentionChoice("flashinfer", prefill="triton", verify="decode"), "triton+flashinfer trees as decode"),
    ],
)
def test_a_choice_is_named_by_what_serves(choice: AttentionChoice, name: str) -> None:
    assert str(choice.resolved(CPU)) == name


def test_one_kernel_for_all_leaves_no_choice_for_trees() -> None:
    for choice in (AttentionChoice(verify="decode"), AttentionChoice("triton", "torch_native", "auto", "decode")):
        with pytest.raises(StartupError, match=r"--speculative-attention-mode is decode, but torch_native"):
            build_attention(choice, CPU)


def test_on_cpu_prefill_and_decode_are_torchs_whatever_names_it() -> None:
    assert build_attention(AttentionChoice("auto", prefill="torch_native"), CPU) is torch_native.attention
    with pytest.raises(StartupError, match="triton needs a CUDA device"):
        build_attention(AttentionChoice("auto", decode="triton"), CPU)


@pytest.mark.usefixtures("capable")
def test_triton_verifies_trees_in_the_tiles_that_the_mode_names(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []

    class Triton:
        def __init__(self, device: torch.device, *, library: object, **options: Any) -> None:
            made.append(options)

    monkeypatch.setitem(sys.modules, "kernels.attention.triton", SimpleNamespace(TritonAttention=Triton))
    build_attention(AttentionChoice("triton"), CUDA, page_size=16)
    build_attention(AttentionChoice("triton", verify="decode"), CUDA)
    split = build_attention(AttentionChoice("torch_native", decode="triton", verify="decode"), CUDA)
    assert isinstance(split, SplitAttention)
    assert made == [
        {"page_size": 16, "narrow_trees": False},
        {"page_size": 1, "narrow_trees": True},
        {"page_size": 1, "narrow_trees": True},
    ]


def test_fp8_needs_backends_that_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    check_fp8(AttentionChoice(), e4m3, CPU)
    for choice in (AttentionChoice("flashinfer"), AttentionChoice("triton", decode="flashinfer")):
        with pytest.raises(StartupError, match=r"flashinfer does not read torch\.float8_e5m2 here"):
            check_fp8(choice, e5m2, CUDA)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    check_fp8(AttentionChoice("triton"), e5m2, CUDA)
    with pytest.raises(StartupError, match=r"fp8_e4m3, which triton reads .* 8\.9 on; this one has 8\.0: use fp8_e5m2"):
        check_fp8(AttentionChoice("triton"), e4m3, CUDA)


class Recorded:
    """The reference, and the segments' numbers of rows that came to it."""

    def __init__(self) -> None:
        self.counts: list[list[int]] = []

    def __call__(
        self, q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, layout: AttentionLayout, scale: float,
        **options: Any,
    ) -> torch.Tensor:  # fmt: skip
        self.counts.append(layout.num_rows.tolist())
        return reference.attention(q, k_pool, v_pool, layout, scale, **options)


@pytest.mark.parametrize("trees_with_decode", [False, True])
def test_segments_go_to_the_backend_of_their_kind(trees_with_decode: bool) -> None:
    pieces = [Piece(9, 4), Piece(7, 1), Piece(20, 6, random_tree(RNG, 6)), Piece(3, 1), Piece(0, 5)]
    case = make_case(pieces)
    prefill, decode = Recorded(), Recorded()
    split = SplitAttention(prefill, decode, trees_with_decode=trees_with_decode)
    out = split(case.q, case.k_pool, case.v_pool, case.layout, case.scale, soft_cap=3.0, window=5)
    wanted = reference.attention(case.q, case.k_pool, case.v_pool, case.layout, case.scale, soft_cap=3.0, window=5)
    torch.testing.assert_close(out, wanted, atol=1e-6, rtol=0)
    split(case.q, case.k_pool, case.v_pool, case.layout, case.scale)
    assert prefill.counts == ([[4, 5]] if trees_with_decode else [[4, 6, 5]]) * 2
    assert decode.counts == ([[1, 6, 1]] if trees_with_decode else [[1, 1]]) * 2
    alone = make_case(pieces[1:2])
    split(alone.q, alone.k_pool, alone.v_pool, alone.layout, alone.scale)
    assert (len(prefill.counts), decode.counts[-1]) == (2, [1])


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


def run(case: Case, *, alone: bool = False, **options: Any) -> torch.Tensor:
    attention = flashinfer.FlashInferAttention(CPU, LIBRARY, alone=alone)
    return attention(case.q, case.k_pool, case.v_pool, case.layout, case.scale, **options)


@pytest.mark.parametrize(("soft_cap", "window"), [(0.0, 0), (0.0, 3), (5.0, 0), (0.7, 8)])
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("name", STEPS)
def test_flashinfer_is_told_what_the_layout_says(name: str, alone: bool, soft_cap: float, window: int) -> None:
    case = make_case(STEPS[name], dtype=torch.bfloat16)
    wanted = reference.attention(
        case.q, case.k_pool, case.v_pool, case.layout, case.scale, soft_cap=soft_cap, window=window
    )
    out = run(case, alone=alone, soft_cap=soft_cap, window=window)
    torch.testing.assert_close(out, wanted, atol=0.02, rtol=0.01)


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
