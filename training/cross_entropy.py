"""Cross-entropy to a distribution over thousands of tokens, with its gradients computed on the way forward.

Logits are made, turned into gradients and dropped a few rows at a time, so that they stay in the cache; none is kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function

CHUNK_ROWS = 256


class SoftCrossEntropy(Function):
    """apply(outputs [n, hidden], head [v, hidden], wanted [n, v], weights fp32 [n]) -> (sum, likeliest).

    wanted: distributions, each with a sum of 1. sum: fp32, of -sum(wanted * log softmax(outputs @ head.T)) times the
    row's weight; likeliest: int64 [n], each row's likeliest token, without a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, outputs: torch.Tensor, head: torch.Tensor, wanted: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See the class."""
        for_head = ctx.needs_input_grad[1]
        d_outputs = torch.empty_like(outputs)
        d_head = torch.zeros_like(head) if for_head else None
        total, likeliest = weights.new_zeros(()), []
        for start in range(0, len(outputs), CHUNK_ROWS):
            rows = slice(start, start + CHUNK_ROWS)
            logits = outputs[rows] @ head.T
            gradient = torch.softmax(logits, dim=-1, dtype=torch.float32)
            largest, token = gradient.max(dim=-1)
            log_sum = logits.gather(1, token[:, None])[:, 0].float() - largest.log()
            expected = (wanted[rows] * logits).sum(dim=-1, dtype=torch.float32)
            total += ((log_sum - expected) * weights[rows]).sum()
            likeliest.append(token)
            scaled = gradient.sub_(wanted[rows]).mul_(weights[rows, None]).to(outputs.dtype)
            torch.mm(scaled, head, out=d_outputs[rows])
            if d_head is not None:
                d_head.addmm_(scaled.T, outputs[rows])
        ctx.save_for_backward(d_outputs, d_head)
        tokens = torch.cat(likeliest)
        ctx.mark_non_differentiable(tokens)
        return total, tokens

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradient of the sum; nothing else has one."""
        d_outputs, d_head = (
            saved if saved is None else saved * gradients[0].to(saved.dtype) for saved in ctx.saved_tensors
        )
        return d_outputs, d_head, None, None
