"""What all our Triton kernels share."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs

jit: Any = triton.jit  # what it says of its result's type differs from version to version
_OPERANDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def operand(dtype: torch.dtype) -> tl.dtype:
    """The dtype that tensor cores multiply in. The interpreter would multiply bf16 as integers, so there it is fp32."""
    if knobs.runtime.interpret and dtype is torch.bfloat16:
        return tl.float32
    return _OPERANDS[dtype]
