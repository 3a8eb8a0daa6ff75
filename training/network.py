"""A draft network with parameters: the engine's own head, built anew from them for each step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch.nn.functional import linear

from engine.models.heads.base import Head, Rows, Vocabulary
from engine.models.heads.names import OUTPUT_HEAD
from training.kinds import Kind


class DraftNetwork(nn.Module):
    """Parameters in fp32, computed with in `dtype`.

    embedding [vocab, hidden] and head [n, hidden] are the target's and stay as they are; drafted int64 [n] are the ids
    of the head's rows: the tokens that the loss is over, and all that a kind with an output head of its own can draft.
    """

    embedding: torch.Tensor
    head: torch.Tensor
    drafted: torch.Tensor

    def __init__(
        self, kind: Kind, tensors: Mapping[str, torch.Tensor], embedding: torch.Tensor, head: torch.Tensor,
        drafted: torch.Tensor, *, max_len: int, dtype: torch.dtype, train_output_head: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        self.kind = kind
        self.max_len = max_len
        self.dtype = dtype
        self._names = {name: name.replace(".", "/") for name in tensors}
        self.tensors = nn.ParameterDict({self._names[name]: nn.Parameter(t.float()) for name, t in tensors.items()})
        if kind.has_output_head:
            self.tensors[self._names[OUTPUT_HEAD]].requires_grad_(train_output_head)
        self.register_buffer("embedding", embedding.to(dtype), persistent=False)
        self.register_buffer("head", head.to(dtype), persistent=False)
        self.register_buffer("drafted", drafted, persistent=False)

    def built(self) -> Head:
        """The network as it is now; gradients go to the parameters."""
        tensors = {name: self.tensors[key].to(self.dtype) for name, key in self._names.items()}
        head = tensors.pop(OUTPUT_HEAD) if self.kind.has_output_head else self.head
        vocabulary = Vocabulary(self.embedding, head, self.drafted)
        return self.kind.config.build(tensors, vocabulary, self.max_len, linear_layer)

    def built_for_loss(self) -> tuple[Head, torch.Tensor]:
        """The network with `logits` that gives the rows which its output head would read, and that output head."""
        tensors = {name: self.tensors[key].to(self.dtype) for name, key in self._names.items()}
        output_head = tensors.pop(OUTPUT_HEAD) if self.kind.has_output_head else self.head
        vocabulary = Vocabulary(self.embedding, output_head, self.drafted)

        def make_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Rows:
            return _as_they_are if weight is output_head else linear_layer(weight, bias)

        return self.kind.config.build(tensors, vocabulary, self.max_len, make_linear), output_head

    @contextmanager
    def using(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Computes with other values of the parameters for a while."""
        kept = {name: tensor.clone() for name, tensor in self.trained().items()}
        self.load(tensors)
        try:
            yield
        finally:
            self.load(kept)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Sets the parameters."""
        for name, key in self._names.items():
            self.tensors[key].copy_(tensors[name])

    def trained(self) -> dict[str, torch.Tensor]:
        """The parameters by the engine's names, detached."""
        return {name: self.tensors[key].detach() for name, key in self._names.items()}


def _as_they_are(rows: torch.Tensor) -> torch.Tensor:
    return rows


def linear_layer(weight: torch.Tensor, bias: torch.Tensor | None) -> Rows:
    """A product in torch, through which gradients go."""
    return partial(linear, weight=weight, bias=bias)
