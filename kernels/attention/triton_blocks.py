"""Block sizes of the Triton attention kernels: the one place where the shape of a reduction is chosen.

Chosen by reasoning for H100 and H200 (132 multiprocessors, 227 KiB of shared memory and 65,536 registers each) and by
what the compiler reports for sm_90; none is tuned by measurement. In short:

- Decode is bound by reading keys: 16 rows, the least a tensor core multiplies, hold a group of query heads. A tile is
  32 to 64 keys and the pipeline is 5 deep: a key's address takes a load of its slot first, so 5 stages keep two tiles
  in flight, 64 KiB a program, where latency times bandwidth asks for about 25 KiB a multiprocessor.
- Trees take 64 rows, the least that a warpgroup's instruction (wgmma) multiplies, so that each key read from memory
  serves 64 rows; two programs fit a multiprocessor.
- Prefill is bound by arithmetic: 128 rows over two warpgroups where the accumulator fits the registers (head_dim up
  to 128), else 64.
- fp32 multiplies exactly (no tf32), outside the tensor cores: small tiles, or registers spill.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MAX_HEAD_DIM = 256
MAX_GROUP = 64
# Programs that a step's keys are cut into: about four for each multiprocessor, two of them at a time.
TARGET_PROGRAMS = 512
# Keys in the smallest piece: below, what a piece writes and `combine` reads nears what it saves.
MIN_PIECE = 128


@dataclass(frozen=True, slots=True)
class Blocks:
    """A tile of `rows` (query heads times rows) against `keys` at a time; the latter divides 64 and MIN_PIECE."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Heads:
    """The sizes of a model that shape the work. ValueError for what no kernel covers."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    """The dtype of the queries, which is multiplied in."""

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} query heads cannot share {self.num_kv_heads} kv heads")
        if self.group > MAX_GROUP:
            raise ValueError(
                f"num_attention_heads is {self.num_heads} and num_key_value_heads {self.num_kv_heads}, {self.group} "
                f"query heads for one kv head; the Triton kernels take at most {MAX_GROUP}"
            )
        if not 1 <= self.head_dim <= MAX_HEAD_DIM:
            raise ValueError(f"head_dim is {self.head_dim}; the Triton kernels take 1 to {MAX_HEAD_DIM}")
        if self.dtype not in {torch.float32, torch.bfloat16, torch.float16}:
            raise ValueError(f"queries in {self.dtype}; the Triton kernels take float32, bfloat16 and float16")

    @property
    def group(self) -> int:
        """Query heads for one kv head."""
        return self.num_heads // self.num_kv_heads


def blocks_for(heads: Heads) -> list[Blocks]:
    """The tile sizes to choose from, by rising rows; the smallest that holds a segment is used, else the last."""
    if heads.dtype is torch.float32:
        sizes = [Blocks(16, 16, 4, 3), Blocks(32, 16, 8, 3), Blocks(64, 16, 8, 3)]
        # 64 rows spill registers: only for groups that nothing smaller holds.
        largest = max(32, heads.group)
    elif heads.head_dim > 128:
        sizes = [Blocks(16, 32, 4, 5), Blocks(64, 32, 4, 3)]
        largest = 64
    else:
        sizes = [Blocks(16, 64, 4, 5), Blocks(64, 64, 4, 3), Blocks(128, 64, 8, 3)]
        largest = 128
    fitting = [blocks for blocks in sizes if heads.group <= blocks.rows <= largest]
    return fitting or sizes[-1:]


def piece_len(num_keys: int, num_kv_heads: int) -> int:
    """Keys per piece of a prefix, so that a launch of `num_keys` (over all its tiles) fills the GPU and no more.

    Pieces depend on all that goes together in a step, as other reductions do. A mode in which they must not would
    return a constant here.
    """
    wanted = -(-num_keys * num_kv_heads // TARGET_PROGRAMS)
    return max(MIN_PIECE, -(-wanted // 64) * 64)


def most_pieces(num_tiles: int, num_kv_heads: int) -> tuple[int, int]:
    """Bounds for a launch of `num_tiles`, whatever their keys: all pieces, and those of tiles with more than one.

    A tile of w keys is cut in ceil(w / piece) <= w / piece + 1, which is <= 2 w / piece where there are several; and
    the tiles' w together are at most TARGET_PROGRAMS / kv heads pieces.
    """
    filled = -(-TARGET_PROGRAMS // num_kv_heads)
    return filled + num_tiles, min(filled + num_tiles, 2 * filled)
