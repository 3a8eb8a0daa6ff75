"""kernels.likeliest on a CUDA device, in Triton: two launches, where torch's operators take some fifteen.

A program finds the likeliest of a block of a row and the block's sum; another joins the blocks of a row. A logit and
its id make one whole number, greater for a higher logit and, of equal ones, for the lower id, so that one maximum finds
both. Blocks go by ids alone: a row's bits do not depend on the rows beside it, nor on how many are looked for. Its
speed has not been measured.
"""

from __future__ import annotations

import typing as tp  # Triton's compiler refuses a bare `Any` in a kernel's annotations

import torch
import triton
import triton.language as tl

from kernels.triton_common import jit

BLOCK = 2048
MOST_FOUND = 4096
"""Most that is found in all blocks of a row together: what a program can hold in its registers."""
LEAST: tp.Any = tl.constexpr(-(1 << 63))
"""Below any key."""
_HIGHEST: tp.Any = tl.constexpr(0x7FFFFFFF)


def takes(vocab: int, num_top: int) -> bool:
    """Whether so many can be found of rows of `vocab` logits."""
    return _num_blocks(vocab) * min(num_top, vocab) <= MOST_FOUND


def likeliest(logits: torch.Tensor, num_top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes kernels.likeliest.likeliest of what it `takes`; equals come in the order of their ids."""
    rows = logits if logits.stride(1) == 1 else logits.contiguous()
    (num_rows, vocab), device = rows.shape, rows.device
    top, blocks = min(num_top, vocab), _num_blocks(vocab)
    chances = torch.empty((num_rows, top), dtype=torch.float32, device=device)
    ids = torch.empty((num_rows, top), dtype=torch.int64, device=device)
    if not num_rows:
        return chances, ids
    found = torch.empty((num_rows, blocks, top), dtype=torch.int64, device=device)
    sums = torch.empty((num_rows, blocks), dtype=torch.float32, device=device)
    _of_blocks[(num_rows, blocks)](
        rows, found, sums, ROW=rows.stride(0), VOCAB=vocab, TOP=top, BLOCK=BLOCK, num_warps=4
    )
    _of_rows[(num_rows,)](
        found, sums, chances, ids, BLOCKS=blocks, TOP=top, BLOCK_B=triton.next_power_of_2(blocks),
        BLOCK_F=triton.next_power_of_2(blocks * top), num_warps=4,
    )  # fmt: skip
    return chances, ids


def _num_blocks(vocab: int) -> int:
    return -(-vocab // BLOCK)


@jit
def _of_blocks(
    logits: tp.Any, found: tp.Any, sums: tp.Any, ROW: tl.constexpr, VOCAB: tl.constexpr, TOP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Programs [R, blocks]: the TOP greatest keys of a block, falling, and its sum of exp(logit - the highest)."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < VOCAB
    x = tl.load(logits + row * ROW + token, mask=inside, other=float("-inf")).to(tl.float32)
    left = tl.where(inside, keys(x, token), LEAST)
    at = row * tl.num_programs(1) + block
    best = tl.max(left, 0)
    highest = number_of(best)
    # Of nothing but -inf the sum is 0; NaN and inf make it NaN.
    tl.store(sums + at, tl.sum(tl.exp(x - tl.where(highest == float("-inf"), 0.0, highest)), 0))
    for place in range(TOP):
        tl.store(found + at * TOP + place, best)
        left = tl.where(left == best, LEAST, left)
        best = tl.max(left, 0)


@jit
def _of_rows(
    found: tp.Any, sums: tp.Any, chances: tp.Any, ids: tp.Any, BLOCKS: tl.constexpr, TOP: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_F: tl.constexpr,
) -> None:  # fmt: skip
    """Programs [R]."""
    row = tl.program_id(0).to(tl.int64)
    found += row * BLOCKS * TOP
    place, block = tl.arange(0, BLOCK_F), tl.arange(0, BLOCK_B)
    left = tl.load(found + place, mask=place < BLOCKS * TOP, other=LEAST)
    best = tl.max(left, 0)
    highest = number_of(best)
    # Where nothing but -inf is, inf or NaN, these are NaN, and so is all that is divided by them.
    there = block < BLOCKS
    shares = tl.exp(number_of(tl.load(found + block * TOP, mask=there, other=0)) - highest)
    total = tl.sum(tl.where(there, tl.load(sums + row * BLOCKS + block, mask=there, other=0.0) * shares, 0.0), 0)
    for rank in range(TOP):
        tl.store(chances + row * TOP + rank, tl.exp(number_of(best) - highest) / total)
        tl.store(ids + row * TOP + rank, id_of(best))
        left = tl.where(left == best, LEAST, left)
        best = tl.max(left, 0)


@jit
def keys(x: tp.Any, id: tp.Any) -> tp.Any:
    """int64: a number's order above 32 bits of its id's, NaN as the highest."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)  # there is one zero
    order = tl.where(bits < 0, bits ^ _HIGHEST, bits)
    order = tl.where(x == x, order, _HIGHEST)
    return (order.to(tl.int64) << 32) | (id ^ _HIGHEST).to(tl.int64)


@jit
def number_of(key: tp.Any) -> tp.Any:
    """The fp32 number of a key."""
    order = (key >> 32).to(tl.int32)
    return tl.where(order < 0, order ^ _HIGHEST, order).to(tl.float32, bitcast=True)


@jit
def id_of(key: tp.Any) -> tp.Any:
    """The id of a key, int64."""
    return (key ^ _HIGHEST) & _HIGHEST
