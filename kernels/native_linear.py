"""Linear layers by the C kernels, on a team of threads of their own: for draft heads on CPU.

torch's operators share their work out by OpenMP, whose barriers stand still whenever another process (verify, next
door) has one of the cores; the team does not. A row's result is the same whatever rows go with it.
"""

from __future__ import annotations

import ctypes
import weakref

import torch

from kernels.linear import pack_tiles
from kernels.native.library import WIDTH_UNIT, CMatrix, address
from kernels.native.memory import Arena
from kernels.quantize import FORMATS, pack_quantized

# linear.h's formats of matrices that are not quantised.
BF16, FP32 = range(2)


class ProductTeam:
    """Threads that do one product after another; the calling thread is one of them."""

    def __init__(self, library: ctypes.CDLL, num_threads: int) -> None:
        self.library = library
        self.num_threads = num_threads
        self.handle: int = library.outrider_product_team(num_threads)
        if not self.handle:
            raise MemoryError("no memory for a team of threads")
        self.arena = Arena()
        weakref.finalize(self, library.outrider_team_destroy, self.handle)

    def multiply(
        self, matrix: CMatrix, x: torch.Tensor, y: torch.Tensor, *, wide: bool, narrow: bool,
        norms: torch.Tensor | None = None, eps: float = 0.0,
    ) -> None:  # fmt: skip
        """y [T, out] = x [T, in] Wᵀ + b: outrider_product (product.c), which says what the others are. MemoryError."""
        done = self.library.outrider_product(
            self.handle, ctypes.byref(matrix), x.data_ptr(), wide, len(x), address(norms),
            0 if norms is None else len(norms), eps, narrow, y.data_ptr(),
        )  # fmt: skip
        if not done:
            raise MemoryError(f"no memory for a product of {len(x)} rows")


class NativeLinear:
    """A weight [out, in], in a multiple of WIDTH_UNIT, and an optional bias [out]; quantization: None or of FORMATS."""

    def __init__(
        self, team: ProductTeam, weight: torch.Tensor, bias: torch.Tensor | None, quantization: str | None = None
    ) -> None:
        self._team = team
        self._num_outputs = len(weight)
        packed, layout = _packed(weight, quantization)
        self._data = team.arena.place(packed)
        self._bias = None if bias is None else bias.float().contiguous()
        self.matrix = CMatrix(address(self._data), address(self._bias), weight.shape[0], weight.shape[1], layout)
        takes_narrow = layout == BF16 and bool(team.library.outrider_has_bf16_dot())
        self._rows_dtype = torch.bfloat16 if takes_narrow and weight.dtype is torch.bfloat16 else torch.float32

    @property
    def team(self) -> ProductTeam:
        """The threads that compute it."""
        return self._team

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] -> [T, out] in x's dtype."""
        return self.wide(x).to(x.dtype)

    def wide(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] -> fp32 [T, out], as it was summed."""
        return self._product(x.to(self._rows_dtype).contiguous(), None, 0.0)

    def of_normed(self, x: torch.Tensor, norms: torch.Tensor, eps: float) -> torch.Tensor:
        """[T, in] -> [T, out] in x's dtype, of rows whose parts each had a norm; norms: fp32 [parts, in / parts].

        x is bf16 or fp32; a part's width is a multiple of WIDTH_UNIT.
        """
        return self._product(x.contiguous(), norms, eps).to(x.dtype)

    def _product(self, rows: torch.Tensor, norms: torch.Tensor | None, eps: float) -> torch.Tensor:
        y = torch.empty(len(rows), self._num_outputs)
        self._team.multiply(
            self.matrix, rows, y, wide=rows.dtype is torch.float32, narrow=self._rows_dtype is not torch.float32,
            norms=norms, eps=eps,
        )  # fmt: skip
        return y


def fits(weight: torch.Tensor) -> bool:
    """Whether the kernels take this weight."""
    return (
        weight.device.type == "cpu"
        and weight.shape[1] % WIDTH_UNIT == 0
        and weight.dtype in (torch.bfloat16, torch.float32)
    )


def _packed(weight: torch.Tensor, quantization: str | None) -> tuple[torch.Tensor, int]:
    if quantization is None:
        return pack_tiles(weight), BF16 if weight.dtype is torch.bfloat16 else FP32
    return pack_quantized(weight, quantization), FORMATS[quantization]
