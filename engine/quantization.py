"""Quantisation of a model's weights at load: which methods there are, and the linear layers that they make.

Quantised are the matrices of the decoder layers and the output head; embedding, norms and biases stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.cpu_kernels import cpu_kernels
from kernels.linear import Linear
from kernels.native.build import build_key
from kernels.native_linear import NativeLinear, ProductTeam, fits
from kernels.quantized_linear import Float8Linear, Int4Linear, Int8DynamicLinear, Int8Linear
from outrider.args.quantization import DRAFT_QUANTIZATION, QUANTIZATION, quantization_method
from outrider.errors import StartupError
from outrider.telemetry import get_logger

log = get_logger(__name__)

# Of CUDA devices, as (major, minor): Ada Lovelace is the first that multiplies fp8.
_FLOAT8_CAPABILITY = (8, 9)

MakeLinear = Callable[[torch.Tensor, torch.Tensor | None], Callable[[torch.Tensor], torch.Tensor]]
"""A weight [out, in] and a bias [out] or None -> a function of rows [T, in]."""
_PLAIN: dict[str | None, MakeLinear] = {
    None: Linear, "int8": Int8Linear, "int8_dynamic": Int8DynamicLinear, "int4": Int4Linear, "fp8": Float8Linear,
}  # fmt: skip


def check_quantization(name: str | None, device: torch.device, flag: str = QUANTIZATION) -> str | None:
    """The method by its own name; None for none. StartupError, with the `flag` that it comes from, for one that is
    unknown or cannot run here."""
    if name is None:
        return None
    method = quantization_method(name, flag)
    if method != "fp8":
        return method
    if device.type != "cuda":
        raise StartupError(f"{flag} fp8 needs a CUDA device; this one is {device}: use int8 or int8_dynamic")
    if torch.cuda.get_device_capability(device) < _FLOAT8_CAPABILITY:
        raise StartupError(f"{flag} fp8 needs compute capability 8.9; {device} is older: use int8")
    return method


def warn_of_rounding(method: str | None, kept: torch.dtype, device: torch.device, backend: str) -> None:
    """Says that results depend on what else is in a step, where activations, or the keys and values that are `kept`,
    are rounded from what torch's operators give: those have other last bits for another number of rows."""
    if backend.startswith("native"):
        return
    if kept.itemsize == 2 and method != "int8_dynamic":
        log.warning(
            "16 bits without the C decoder: near-equal choices, and many draws of a seed, may come out otherwise with "
            "speculation or beside other sessions; --dtype float32 keeps them", backend=backend.split()[0],
        )  # fmt: skip
    if kept.itemsize == 1:
        log.warning(
            "keys and values in fp8 without the C decoder: speculation and batches change some answers",
            kept=str(kept), backend=backend.split()[0],
        )  # fmt: skip
    if method == "int8_dynamic" and device.type == "cpu":
        log.warning(
            "int8_dynamic without the C decoder: speculation and batches change answers; take int8, or what the C "
            "decoder runs", backend=backend.split()[0],
        )  # fmt: skip


def draft_quantization(
    draft: str | None, target: str | None, device: torch.device, *, stored: str | None = None
) -> str | None:
    """The method of a draft model: the target's, unless told otherwise; `unquant` is none (SGLang's rule).

    stored: what its weights are rounded to already; to compute with more would take time and give nothing.
    StartupError as check_quantization's.
    """
    if draft == "unquant":
        return None
    return check_quantization(draft or target or stored, device, DRAFT_QUANTIZATION if draft else QUANTIZATION)


def linear_maker(method: str | None) -> MakeLinear:
    """Makes the linear layers of a model quantised so, for any device: weight [out, in], bias [out] or None."""
    return Linear if method is None else KernelLinears(method)


def head_method(method: str | None) -> str | None:
    """The method of the output head of a model quantised by `method`: 8 bits, for it chooses between near-equal
    logits; of activations too only where every product has them so."""
    return method if method in {None, "int8_dynamic"} else "int8"


def head_maker(method: str | None) -> MakeLinear:
    """Makes layers as linear_maker does, for the output head."""
    return linear_maker(head_method(method))


def kernels_used(method: str | None, device: torch.device) -> str:
    """Names the kernels of layers that linear_maker makes on a device, for numerics_id; empty: torch."""
    library = cpu_kernels() if method is not None and device.type == "cpu" else None
    return "" if library is None else f"products {library.outrider_instructions().decode()} {build_key(library)}"


class KernelLinears:
    """Makes linear layers by the C kernels where they can be had and a weight suits them, else by torch's operators.

    method: None or one of METHODS; num_threads: default torch's. All layers share the threads: one at a time may be
    called.
    """

    def __init__(self, method: str | None, num_threads: int | None = None) -> None:
        self._method = method
        self._num_threads = num_threads
        self._team: ProductTeam | None = None

    def __call__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
        """A layer of weight [out, in] and bias [out] or None."""
        library = cpu_kernels() if fits(weight) else None
        if library is None:
            return _PLAIN[self._method](weight, bias)
        self._team = self._team or ProductTeam(library, self._num_threads or torch.get_num_threads())
        return NativeLinear(self._team, weight, bias, self._method)
