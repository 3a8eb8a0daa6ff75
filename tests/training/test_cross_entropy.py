"""The loss that makes its own gradients is the loss that autograd would go back from."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import log_softmax

from training.cross_entropy import CHUNK_ROWS, SoftCrossEntropy


@pytest.mark.parametrize("learns_head", [True, False])
def test_it_is_cross_entropy_with_its_gradients(learns_head: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    count, hidden, vocab = CHUNK_ROWS + 17, 8, 30

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    outputs, head = made(count, hidden).requires_grad_(), made(vocab, hidden).requires_grad_(learns_head)
    wanted, weights = made(count, vocab).softmax(dim=-1), made(count).abs()
    plain = (-(wanted * log_softmax(outputs @ head.T, dim=-1)).sum(dim=-1) * weights).sum()
    leaves = [outputs, head][: 1 + learns_head]
    expected = torch.autograd.grad(3 * plain, leaves)
    found, likeliest = SoftCrossEntropy.apply(outputs, head, wanted, weights)
    gradients = torch.autograd.grad(3 * found, leaves)
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradients, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(likeliest, (outputs @ head.T).argmax(dim=-1))
    assert not likeliest.requires_grad
