"""Which linear layers a draft head is made of."""

from __future__ import annotations

import torch

from engine.models.heads.base import MakeLinear, Rows
from engine.quantization import check_quantization, linear_maker
from kernels.native.build import CannotBuild
from kernels.native.library import open_library
from kernels.native_linear import NativeLinear, ProductTeam, fits
from outrider import env
from outrider.telemetry import get_logger

log = get_logger(__name__)


def head_linears(device: torch.device, quantization: str | None, num_threads: int) -> MakeLinear:
    """On CPU the C kernels on `num_threads` threads, where they can be had and a weight suits; else torch's operators.

    quantization: as --quantization. StartupError for a method that cannot run on the device.
    """
    method = check_quantization(quantization, device)
    by_torch = linear_maker(method)
    if device.type != "cpu" or not env.cpu_kernel():
        return by_torch
    try:
        team = ProductTeam(open_library(env.home() / "kernels"), num_threads)
    except (CannotBuild, OSError) as error:
        log.warning("CPU kernels not used, drafting is slower", reason=str(error))
        return by_torch

    def make(weight: torch.Tensor, bias: torch.Tensor | None) -> Rows:
        return NativeLinear(team, weight, bias, method) if fits(weight) else by_torch(weight, bias)

    return make
