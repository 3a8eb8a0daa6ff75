"""The Triton attention kernels against the reference, over ragged steps, page sizes, caps and windows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.attention import reference
from kernels.attention.triton_blocks import Heads
from kernels.attention.triton_plan import Bucket
from kernels.rope import apply_rope, rope_frequencies, rope_table
from tests.kernels.attention_cases import PIECES, Case, Piece, make_case, random_tree
from tests.kernels.interpreted import INTERPRETED, run_under_the_interpreter

RNG = np.random.default_rng(7)
STEPS = {
    "one row, no prefix": [Piece(0, 1)],
    "one row": [Piece(37, 1)],
    "one row, cut": [Piece(700, 1)],
    "one row, more pieces than are joined at once": [Piece(2300, 1)],
    "prefill": [Piece(0, 70)],
    "prefill, later": [Piece(100, 40)],
    "prefill, cut": [Piece(130, 40)],
    "a tree": [Piece(90, 13, random_tree(RNG, 13))],
    "a tree, cut": [Piece(300, 7, random_tree(RNG, 7))],
    "a tree of two words": [Piece(4, 70, random_tree(RNG, 70))],
    "a tree without prefix": [Piece(0, 6, random_tree(RNG, 6))],
    "all together": [Piece(3, 1), Piece(0, 19), Piece(200, 8, random_tree(RNG, 8)), Piece(255, 1), Piece(64, 33)],
}
SHAPES = [(4, 2, 64), (3, 1, 96), (2, 2, 128), (8, 1, 256), (7, 1, 80)]
# Half a unit in the last place of numbers up to 4, and of the weights.
TOLERANCE = {torch.float32: (3e-6, 0.0), torch.bfloat16: (0.02, 0.01), torch.float16: (0.003, 0.002)}


def test_under_the_interpreter() -> None:
    run_under_the_interpreter(__file__)


def run(
    case: Case, device: torch.device, *, page_size: int = 1, soft_cap: float = 0.0, window: int = 0,
    narrow_trees: bool = False,
) -> torch.Tensor:  # fmt: skip
    from kernels.attention.triton import TritonAttention

    attention = TritonAttention(device, page_size=page_size, narrow_trees=narrow_trees)
    q, k_pool, v_pool = case.q.to(device), case.k_pool.to(device), case.v_pool.to(device)
    return attention(q, k_pool, v_pool, case.layout, case.scale, soft_cap=soft_cap, window=window).cpu()


def run_reference(case: Case, soft_cap: float = 0.0, window: int = 0) -> torch.Tensor:
    layout = replace(case.layout, _plan=[])
    return reference.attention(case.q, case.k_pool, case.v_pool, layout, case.scale, soft_cap=soft_cap, window=window)


def assert_near(out: torch.Tensor, wanted: torch.Tensor) -> None:
    atol, rtol = TOLERANCE[wanted.dtype]
    torch.testing.assert_close(out, wanted, atol=atol, rtol=rtol)


def paged(case: Case, page_size: int) -> Case:
    """The step of `case` with each prefix in whole pages, scattered; what no segment may read is NaN."""
    layout = case.layout
    num_pages = int((-(-layout.prefix_lens // page_size)).sum()) + -(-len(layout.slots) // page_size) + 1
    order = np.random.default_rng(1).permutation(num_pages).astype(np.int32)
    slots = (order[:, None] * page_size + np.arange(page_size, dtype=np.int32)).reshape(-1)
    k_pool = torch.full((len(slots), *case.k_pool.shape[1:]), torch.nan, dtype=case.k_pool.dtype)
    v_pool = k_pool.clone()
    table, taken, lens = np.full_like(layout.slot_table, order[-1] * page_size), 0, layout.prefix_lens.tolist()
    new = [slots[-1:]]
    for row, length in enumerate(lens):
        table[row, :length] = slots[taken : taken + length]
        taken += -(-length // page_size) * page_size
    own = slots[taken : taken + len(layout.slots)][::-1].copy()
    old = [layout.slot_table[row, :length] for row, length in enumerate(lens)] + [layout.slots]
    new = [table[row, :length] for row, length in enumerate(lens)] + [own]
    k_pool[np.concatenate(new)], v_pool[np.concatenate(new)] = (
        pool[np.concatenate(old)] for pool in (case.k_pool, case.v_pool)
    )
    return replace(case, k_pool=k_pool, v_pool=v_pool, layout=replace(layout, slot_table=table, slots=own, _plan=[]))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", STEPS)
def test_steps(device: torch.device, name: str, dtype: torch.dtype) -> None:
    case = make_case(STEPS[name], heads=4, kv_heads=2, head_dim=16, dtype=dtype)
    assert_near(run(case, device), run_reference(case))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
def test_head_shapes(device: torch.device, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    heads, kv_heads, head_dim = shape
    pieces = [Piece(40, 5, [-1, 0, 0, 1, 1]), Piece(9, 20), Piece(140, 1)]
    case = make_case(pieces, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    assert_near(run(case, device), run_reference(case))


@pytest.mark.gpu
@settings(deadline=None, max_examples=20, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    pieces=PIECES,
    page_size=st.sampled_from([1, 16, 32, 64]),
    soft_cap=st.sampled_from([0.0, 0.7, 30.0]),
    window=st.sampled_from([0, 1, 5, 40, 200]),
    dtype=st.sampled_from(list(TOLERANCE)),
    shape=st.sampled_from([(4, 2, 16), (3, 1, 32), (2, 2, 24)]),
    narrow_trees=st.booleans(),
)
def test_ragged_steps(
    device: torch.device, pieces: list[Piece], page_size: int, soft_cap: float, window: int, dtype: torch.dtype,
    shape: tuple[int, int, int], narrow_trees: bool,
) -> None:  # fmt: skip
    heads, kv_heads, head_dim = shape
    case = paged(make_case(pieces, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype), page_size)
    out = run(case, device, page_size=page_size, soft_cap=soft_cap, window=window, narrow_trees=narrow_trees)
    assert_near(out, run_reference(case, soft_cap, window))


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [1, 16, 32, 64])
def test_page_sizes(device: torch.device, page_size: int) -> None:
    case = paged(make_case(STEPS["all together"], heads=4, kv_heads=2), page_size)
    assert_near(run(case, device, page_size=page_size), run_reference(case))
    assert_near(run(case, device), run_reference(case))


@pytest.mark.gpu
@pytest.mark.parametrize("window", [1, 5, 33, 120])
def test_windows(device: torch.device, window: int) -> None:
    case = make_case([Piece(150, 40), Piece(100, 12, random_tree(RNG, 12)), Piece(60, 1), Piece(0, 50)], heads=4)
    assert_near(run(case, device, window=window), run_reference(case, window=window))


@pytest.mark.gpu
def test_large_scores_do_not_overflow(device: torch.device) -> None:
    case = make_case([Piece(300, 5)], heads=2)
    case.q *= 300.0
    torch.testing.assert_close(run(case, device), run_reference(case), atol=1e-3, rtol=0)
    capped = run(case, device, soft_cap=5.0)
    assert_near(capped, run_reference(case, soft_cap=5.0))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_nan_stays_in_its_row(device: torch.device) -> None:
    case = make_case([Piece(150, 8, [-1] + [0] * 7)])
    out_before = run(case, device)
    case.q[3, 2] = torch.nan
    out = run(case, device)
    assert out[3, 2].isnan().all()
    out[3, 2] = out_before[3, 2]
    assert torch.equal(out, out_before)


@pytest.mark.gpu
@pytest.mark.parametrize("pool_dtype", [torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_the_pool_may_be_narrower_than_the_queries(device: torch.device, pool_dtype: torch.dtype) -> None:
    if device.type == "cuda" and pool_dtype.itemsize == 1 and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no fp8")
    case = make_case([Piece(150, 1), Piece(9, 5, [-1, 0, 0, 1, 1])])
    k_pool, v_pool = (pool.clamp(-400, 400).to(pool_dtype) for pool in (case.k_pool, case.v_pool))
    case = replace(case, k_pool=k_pool, v_pool=v_pool)
    assert_near(run(case, device), run_reference(case))


@pytest.mark.gpu
def test_queries_may_be_a_view(device: torch.device) -> None:
    case = make_case(STEPS["a tree"], heads=4, kv_heads=2)
    wide = torch.cat([case.q, torch.full_like(case.q, torch.nan)], dim=1)
    assert_near(run(replace(case, q=wide[:, :4]), device), run_reference(case))


@pytest.mark.gpu
def test_a_bucket_serves_smaller_steps_from_the_same_memory(device: torch.device) -> None:
    from kernels.attention.triton import TritonAttention

    attention = TritonAttention(device, page_size=16)
    bucket = Bucket(num_segments=3, rows_per_segment=9, max_prefix_len=320, has_masks=True)
    steps = [
        [Piece(300, 9, random_tree(RNG, 9)), Piece(5, 1), Piece(17, 4, random_tree(RNG, 4))],
        [Piece(0, 2, [-1, 0])],
        [Piece(320, 1), Piece(150, 1)],
    ]
    places = set()
    for pieces in steps:
        case = paged(make_case(pieces, heads=4, kv_heads=2), 16)
        attention.prepare(case.layout, Heads(4, 2, 16, torch.float32), bucket)
        padding = torch.full((bucket.num_rows - len(case.q), 4, 16), torch.nan)
        q = torch.cat([case.q, padding]).to(device)
        out = attention(q, case.k_pool.to(device), case.v_pool.to(device), case.layout, case.scale).cpu()
        assert_near(out[: len(case.q)], run_reference(case))
        assert attention._plan is not None
        places.add(attention._plan._data.data_ptr())
    assert len(places) == 1


@pytest.mark.gpu
def test_a_captured_graph_replays_other_steps(device: torch.device) -> None:
    if INTERPRETED:
        pytest.skip("graphs need a CUDA device")
    from kernels.attention.triton import TritonAttention

    attention, heads = TritonAttention(device), Heads(4, 2, 64, torch.bfloat16)
    bucket = Bucket(num_segments=2, rows_per_segment=5, max_prefix_len=900, has_masks=True)
    cases = [
        make_case(pieces, heads=4, kv_heads=2, head_dim=64, dtype=torch.bfloat16)
        for pieces in ([Piece(900, 5, random_tree(RNG, 5)), Piece(3, 1)], [Piece(70, 2, [-1, 0])])
    ]
    q = torch.zeros((bucket.num_rows, 4, 64), dtype=torch.bfloat16, device=device)
    k_pool, v_pool = (torch.zeros((1024, 2, 64), dtype=torch.bfloat16, device=device) for _ in range(2))
    attention.prepare(cases[0].layout, heads, bucket)
    attention(q, k_pool, v_pool, cases[0].layout, 0.125)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k_pool, v_pool, cases[0].layout, 0.125)
    for case in cases:
        q[: len(case.q)] = case.q.to(device)
        k_pool[: len(case.k_pool)], v_pool[: len(case.v_pool)] = case.k_pool.to(device), case.v_pool.to(device)
        attention.prepare(case.layout, heads, bucket)
        graph.replay()
        assert_near(out[: len(case.q)].cpu(), run_reference(replace(case, scale=0.125)))


@pytest.mark.gpu
def test_pools_laid_out_differently_are_refused(device: torch.device) -> None:
    case = make_case([Piece(3, 1)])
    case.v_pool = case.v_pool.transpose(0, 1).contiguous().transpose(0, 1)
    with pytest.raises(ValueError, match="strides"):
        run(case, device)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "pool_dtype"), [
    (torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16),
    (torch.float32, torch.float16),
])  # fmt: skip
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 64), (3, 3, 96)])
def test_rope_and_store(
    device: torch.device, dtype: torch.dtype, pool_dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int
) -> None:
    from kernels.attention.triton_rope import rope_and_store

    generator = torch.Generator().manual_seed(3)
    qkv = torch.randn((5, heads + 2 * kv_heads, head_dim), generator=generator).to(dtype)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    rows = rope_table(rope_frequencies(head_dim, 1e4), 100)[torch.tensor([0, 99, 3, 3, 50])]
    slots = torch.tensor([7, 0, 4, 11, 2])
    pools = [torch.zeros((12, kv_heads, head_dim), dtype=pool_dtype) for _ in range(2)]
    k_pool, v_pool = (pool.clone().to(device) for pool in pools)
    there = [tensor.to(device) for tensor in (qkv, rows, slots)]
    parts = there[0].split([heads, kv_heads, kv_heads], dim=1)
    rotated = rope_and_store(parts[0], parts[1], parts[2], there[1], k_pool, v_pool, there[2])
    pools[0][slots], pools[1][slots] = apply_rope(k, rows).to(pool_dtype), v.to(pool_dtype)
    # A product may be fused with the sum, which rounds once less.
    rtol = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}[pool_dtype]
    torch.testing.assert_close(rotated.cpu(), apply_rope(q, rows), atol=1e-6, rtol=rtol)
    torch.testing.assert_close(k_pool.cpu(), pools[0], atol=1e-6, rtol=rtol)
    assert torch.equal(v_pool.cpu(), pools[1])
    narrow = k_pool.to(torch.float8_e5m2)
    with pytest.raises(ValueError, match="float8_e5m2"):
        rope_and_store(parts[0], parts[1], parts[2], there[1], narrow, narrow, there[2])
