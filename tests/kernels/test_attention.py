"""The attention kernels: the reference against the definition, the others against the reference."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.attention import cpu, reference, torch_native
from kernels.attention.pool import FP8, load, store
from tests.kernels.attention_cases import PIECES, Case, Piece, make_case, random_tree

Kernel = Callable[..., torch.Tensor]
RNG = np.random.default_rng(5)
STEPS = {
    "one row, no prefix": [Piece(0, 1)],
    "one row": [Piece(37, 1)],
    "one row, many chunks": [Piece(1300, 1)],
    "prefill": [Piece(0, 70)],
    "prefill over a chunk's edge": [Piece(200, 130)],
    "a tree": [Piece(90, 13, random_tree(RNG, 13))],
    "a tree over a chunk's edge": [Piece(254, 30, random_tree(RNG, 30))],
    "a chain over a chunk's edge": [Piece(250, 20, list(range(-1, 19)))],
    "a star": [Piece(5, 9, [-1] + [0] * 8)],
    "a tree without prefix": [Piece(0, 6, random_tree(RNG, 6))],
    "all together": [Piece(3, 1), Piece(0, 19), Piece(400, 8, random_tree(RNG, 8)), Piece(255, 1), Piece(64, 33)],
}
SHAPES = [(6, 2, 16), (4, 4, 32), (9, 3, 64), (7, 1, 80), (2, 2, 128), (3, 1, 192)]


@pytest.fixture(params=["torch_native", "cpu"])
def kernel(request: pytest.FixtureRequest) -> Kernel:
    if request.param == "torch_native":
        return torch_native.attention
    return partial(cpu.attention, library=request.getfixturevalue("library"))


def run(kernel: Kernel, case: Case) -> torch.Tensor:
    return kernel(case.q, case.k_pool, case.v_pool, case.layout, case.scale)


def by_definition(case: Case, soft_cap: float = 0.0, window: int = 0) -> torch.Tensor:
    """One row and head at a time, in float64, straight from the formula."""
    out = torch.zeros(case.q.shape, dtype=torch.float64)
    layout, group = case.layout, case.q.shape[1] // case.k_pool.shape[1]
    for s in range(len(layout.first_rows)):
        first, count, start = int(layout.first_rows[s]), int(layout.num_rows[s]), int(layout.mask_starts[s])
        for i in range(count):
            here = int(layout.positions[first + i])
            prefix = layout.slot_table[layout.table_rows[s], : layout.prefix_lens[s]]
            seen = [slot for position, slot in enumerate(prefix) if not window or here - position < window]
            for j in range(count):
                if j <= i if start < 0 else layout.masks[start + i * count + j]:
                    near = not window or here - int(layout.positions[first + j]) < window
                    seen += [layout.slots[first + j]] if near else []
            for h in range(case.q.shape[1]):
                q = case.q[first + i, h].double()
                scores = [float(q @ case.k_pool[slot, h // group].double()) * case.scale for slot in seen]
                if soft_cap:
                    scores = [soft_cap * math.tanh(score / soft_cap) for score in scores]
                weights = [math.exp(score - max(scores)) for score in scores]
                for weight, slot in zip(weights, seen, strict=True):
                    out[first + i, h] += weight / sum(weights) * case.v_pool[slot, h // group].double()
    return out


@pytest.mark.parametrize("name", [name for name in STEPS if "many" not in name])
def test_the_reference_is_the_definition(name: str) -> None:
    case = make_case(STEPS[name])
    torch.testing.assert_close(run(reference.attention, case).double(), by_definition(case), atol=2e-6, rtol=0)


@pytest.mark.parametrize(("soft_cap", "window"), [(0.4, 0), (0.0, 5), (30.0, 1), (0.8, 60)])
@pytest.mark.parametrize("name", ["one row", "prefill", "a tree", "a star"])
def test_the_reference_bends_scores_and_hides_keys_as_defined(name: str, soft_cap: float, window: int) -> None:
    case = make_case(STEPS[name], heads=2, kv_heads=1)
    out = reference.attention(
        case.q, case.k_pool, case.v_pool, case.layout, case.scale, soft_cap=soft_cap, window=window
    )
    torch.testing.assert_close(out.double(), by_definition(case, soft_cap, window), atol=2e-6, rtol=0)


@settings(deadline=None, max_examples=60)
@given(
    pieces=PIECES,
    soft_cap=st.sampled_from([0.0, 0.7, 30.0]),
    window=st.sampled_from([0, 1, 5, 40, 200]),
    shape=st.sampled_from([(4, 2, 16), (3, 1, 32), (2, 2, 24)]),
    pool_dtype=st.sampled_from([torch.float32, torch.float8_e4m3fn, torch.float8_e5m2]),
    padding=st.sampled_from([0, 3]),
)
def test_torch_bends_scores_hides_keys_and_reads_fp8_as_the_reference_does(
    pieces: list[Piece], soft_cap: float, window: int, shape: tuple[int, int, int], pool_dtype: torch.dtype,
    padding: int,
) -> None:  # fmt: skip
    heads, kv_heads, head_dim = shape
    case = make_case(pieces, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    k_pool, v_pool = (pool.clamp(-400, 400).to(pool_dtype) for pool in (case.k_pool, case.v_pool))
    q = torch.cat([case.q, torch.full((padding, heads, head_dim), torch.nan)])
    out, wanted = (
        kernel(q, k_pool, v_pool, case.layout, case.scale, soft_cap=soft_cap, window=window)
        for kernel in (torch_native.attention, reference.attention)
    )
    torch.testing.assert_close(out, wanted, atol=3e-6, rtol=0)
    assert not out[len(case.q) :].any()


@pytest.mark.parametrize("dtype", FP8.values())
def test_an_fp8_pool_keeps_the_nearest_number_and_never_infinity(dtype: torch.dtype) -> None:
    pool = torch.zeros((6, 1, 4), dtype=dtype)
    largest = torch.finfo(dtype).max
    rows = torch.tensor([[[0.3, -1.0, 1e9, -1e9]], [[0.0, 7.1, largest, torch.inf]]])
    slots = torch.tensor([4, 1])
    store(pool, slots, rows.bfloat16())
    expected = torch.tensor([[[0.3, -1.0, largest, -largest]], [[0.0, 7.1, largest, largest]]])
    torch.testing.assert_close(load(pool, slots, torch.float32), expected, atol=0, rtol=0.13)
    assert not load(pool, torch.tensor([0, 2, 3, 5]), torch.float32).any()


def test_some_segments_of_a_step_are_a_step() -> None:
    case = make_case(STEPS["all together"])
    whole = run(reference.attention, case)
    part, rows = case.layout.selected(np.array([0, 2, 4]))
    out = reference.attention(case.q[rows], case.k_pool, case.v_pool, part, case.scale)
    torch.testing.assert_close(out, whole[rows], atol=1e-6, rtol=0)
    assert len(rows) == 1 + 8 + 33


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("shape", SHAPES)
def test_fp32(kernel: Kernel, name: str, shape: tuple[int, int, int]) -> None:
    heads, kv_heads, head_dim = shape
    case = make_case(STEPS[name], heads=heads, kv_heads=kv_heads, head_dim=head_dim, seed=len(name))
    torch.testing.assert_close(run(kernel, case), run(reference.attention, case), atol=3e-6, rtol=0)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("shape", SHAPES)
def test_bf16(kernel: Kernel, name: str, shape: tuple[int, int, int]) -> None:
    heads, kv_heads, head_dim = shape
    case = make_case(STEPS[name], heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=torch.bfloat16)
    # Half a unit in the last place of numbers up to 4, and of the weights.
    torch.testing.assert_close(run(kernel, case), run(reference.attention, case), atol=0.02, rtol=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("prefix_len", "window"), [(0, 0), (1, 0), (100, 0), (249, 0), (256, 0), (700, 0), (255, 33)])
def test_a_trees_path_has_the_bits_of_its_own_sequence(
    library: ctypes.CDLL, dtype: torch.dtype, prefix_len: int, window: int
) -> None:
    """The C kernel promises more than closeness: tree, chunk or single row, a row's bits are the same."""
    parents = random_tree(np.random.default_rng(prefix_len), 24)
    tree = make_case([Piece(prefix_len, 24, parents)], heads=9, kv_heads=3, head_dim=64, dtype=dtype)
    kernel = partial(cpu.attention, library=library, window=window)
    together = run(kernel, tree)
    for row in range(24):
        path, node = [], row
        while node >= 0:
            path.insert(0, node)
            node = parents[node]
        for split in {0, len(path) // 2, len(path) - 1}:
            alone = sequence_of(tree, path, split)
            assert torch.equal(run(kernel, alone)[-1], together[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (3, 1), (5, 1), (9, 3)])
def test_a_row_has_the_same_bits_however_many_go_with_it(
    library: ctypes.CDLL, dtype: torch.dtype, heads: int, kv_heads: int
) -> None:
    """Blocks of 32 lanes, each the last ones of their own count: one alone, too."""
    count = 44
    path = list(range(count))
    case = make_case(
        [Piece(30, count, [i - 1 for i in path])], heads=heads, kv_heads=kv_heads, head_dim=64, dtype=dtype
    )
    kernel = partial(cpu.attention, library=library)
    whole = run(kernel, case)
    for size in (1, 2, 3, 7, 11, 33):
        for split in range(0, count - size, size):
            part = run(kernel, sequence_of(case, path[: split + size], split))
            assert torch.equal(part, whole[split : split + size]), (size, split)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("prefix_len", [0, 30, 255])
def test_a_row_may_see_several_keys_of_one_position(kernel: Kernel, dtype: torch.dtype, prefix_len: int) -> None:
    """No tree has them, but a mask can say so."""
    case = make_case(
        [Piece(prefix_len, 9, [-1, 0, 0, 0, 1, 1, 2, 3, 0])], heads=4, kv_heads=2, head_dim=32, dtype=dtype
    )
    mask = case.layout.masks.reshape(9, 9)
    mask[3, :3] = mask[7] = True
    mask[8, 4:7] = True
    atol, rtol = (3e-6, 0.0) if dtype is torch.float32 else (0.02, 0.01)
    torch.testing.assert_close(run(kernel, case), run(reference.attention, case), atol=atol, rtol=rtol)


def sequence_of(tree: Case, path: list[int], split: int) -> Case:
    """The path's last rows as a causal segment; those before `split` are part of the prefix."""
    layout = tree.layout
    prefix_len = int(layout.prefix_lens[0])
    table = np.concatenate([layout.slot_table[0, :prefix_len], layout.slots[path]])[None]
    count = len(path) - split
    return Case(
        tree.q[path[split:]],
        tree.k_pool,
        tree.v_pool,
        type(layout)(
            slot_table=np.ascontiguousarray(table),
            first_rows=np.zeros(1, np.int32),
            num_rows=np.array([count], np.int32),
            prefix_lens=np.array([prefix_len + split], np.int32),
            table_rows=np.zeros(1, np.int32),
            slots=np.ascontiguousarray(layout.slots[path[split:]]),
            positions=np.arange(prefix_len + split, prefix_len + len(path), dtype=np.int32),
            masks=np.zeros(0, np.bool_),
            mask_starts=np.array([-1], np.int64),
        ),
        tree.scale,
    )


def test_large_scores_do_not_overflow(kernel: Kernel) -> None:
    case = make_case([Piece(300, 5)])
    case.q *= 300.0
    torch.testing.assert_close(run(kernel, case), run(reference.attention, case), atol=1e-3, rtol=0)


def test_nan_stays_in_its_row(kernel: Kernel) -> None:
    case = make_case([Piece(20, 8, [-1] + [0] * 7)])
    expected = run(reference.attention, case)
    case.q[3, 2] = torch.nan
    out = run(kernel, case)
    assert out[3, 2].isnan().all()
    out[3, 2] = expected[3, 2]
    torch.testing.assert_close(out, expected, atol=3e-6, rtol=0)


def test_the_c_kernel_refuses_what_it_does_not_know(library: ctypes.CDLL) -> None:
    case = make_case([Piece(3, 1)], head_dim=24)
    with pytest.raises(ValueError, match="head_dim 24"):
        run(partial(cpu.attention, library=library), case)
    case = make_case([Piece(3, 1)], dtype=torch.float16)
    with pytest.raises(ValueError, match="float16"):
        run(partial(cpu.attention, library=library), case)
    with pytest.raises(ValueError, match="no soft cap"):
        run(partial(cpu.attention, library=library, soft_cap=3.0), make_case([Piece(3, 1)]))


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pieces=PIECES, long=st.integers(0, 700), window=st.sampled_from([1, 5, 40, 200, 256, 400]))
def test_the_c_kernel_hides_keys_as_the_reference_does(
    library: ctypes.CDLL, pieces: list[Piece], long: int, window: int
) -> None:
    case = make_case([*pieces, Piece(long, 5)], heads=4, kv_heads=2, head_dim=32)
    out, wanted = (
        kernel(case.q, case.k_pool, case.v_pool, case.layout, case.scale, window=window)
        for kernel in (partial(cpu.attention, library=library), reference.attention)
    )
    torch.testing.assert_close(out, wanted, atol=3e-6, rtol=0)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    pieces=PIECES, long=st.integers(0, 700), window=st.sampled_from([0, 5, 256]), kept=st.sampled_from(list(FP8)),
    dtype=st.sampled_from(cpu.COMPUTED), shape=st.sampled_from([(4, 2, 32), (9, 3, 64), (2, 2, 48)]),
)  # fmt: skip
def test_the_c_kernel_reads_fp8_as_the_same_numbers_in_its_own_dtype(
    library: ctypes.CDLL, pieces: list[Piece], long: int, window: int, kept: str, dtype: torch.dtype,
    shape: tuple[int, int, int],
) -> None:  # fmt: skip
    """To the bit: so what holds of a row in every tree and batch holds here too."""
    heads, kv_heads, head_dim = shape
    case = make_case([*pieces, Piece(long, 5)], heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    pools = [pool.to(FP8[kept]) for pool in (case.k_pool, case.v_pool)]
    q, kernel = case.q.to(dtype), partial(cpu.attention, library=library, window=window)
    out, wanted = (
        kernel(q, k_pool, v_pool, case.layout, case.scale)
        for k_pool, v_pool in (pools, [pool.to(dtype) for pool in pools])
    )
    assert torch.equal(out, wanted)
