"""The target's hidden states for whole conversations, computed on the fly through the engine's own forward pass.

Every state that any kind of head needs comes from one pass: those entering the layers asked for, and the last one,
which the final norm turns into what feeds the output head.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from engine.batch import Segment
from engine.checkpoint import DummyCheckpoint, open_checkpoint
from engine.config import ModelConfig
from engine.feature_spec import FeatureSpec
from engine.fingerprint import numerics_id
from engine.models.heads.target import TargetShape, shared_tensor
from engine.models.llama_weights import tensor_shapes
from engine.runner import ModelRunner
from kernels.norm import rms_norm
from outrider.errors import StartupError


class States(NamedTuple):
    """States of a padded batch; padding rows are zero."""

    features: torch.Tensor
    """[B, L, feature width]: what a head goes on from."""
    last: torch.Tensor
    """[B, L, hidden]: what feeds the target's output head; row i tells the distribution of token i + 1."""


class TargetStates:
    """A target, for batches of at most max_tokens tokens in conversations of at most max_len.

    more_layers: layers whose entering states are kept beside those that `features` names.
    """

    def __init__(
        self, model_path: Path, features: FeatureSpec, *, dtype: str, device: str, load_format: str, max_tokens: int,
        max_len: int, threads: int | None, quantization: str | None = None, more_layers: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self.folder = model_path
        self.config = trainable_config(model_path)
        self.features = features
        self.load_format = load_format
        layers = features.layers if features.kind == "aux" else ()
        self._feature_layers = layers
        self.kept_layers = tuple(sorted({*layers, *more_layers, self.config.num_layers}))
        kept = FeatureSpec("aux", self.kept_layers)
        self.runner = ModelRunner.load(
            model_path, dtype=dtype, device=device, num_slots=max_tokens, max_sessions=max_tokens, max_len=max_len,
            features=kept, load_format=load_format, max_batch_tokens=max_tokens, threads=threads,
            quantization=quantization,
        )  # fmt: skip
        self.device = self.runner.device
        self._final_norm = tensor_of(model_path, "model.norm.weight", load_format).to(self.device, self.runner.dtype)

    @property
    def row_width(self) -> int:
        """Numbers kept of a token."""
        return self.config.hidden_size * len(self.kept_layers)

    def vocabulary_rows(self, name: str) -> torch.Tensor:
        """The target's embedding or output head [vocab, hidden], by engine.models.heads.target's names, as stored."""
        return shared_tensor(TargetShape.from_folder(self.folder), name, load_format=self.load_format)

    @torch.no_grad()
    def __call__(self, conversations: Sequence[np.ndarray]) -> States:
        """States of conversations int64 [n_i], padded to the longest."""
        return self.of_rows(self.rows(conversations))

    @torch.no_grad()
    def of_rows(self, rows: torch.Tensor) -> States:
        """The states in kept rows [B, L, row_width]."""
        hidden = self.config.hidden_size
        last = rms_norm(rows[..., -hidden:], self._final_norm, self.config.rms_eps)
        if not self._feature_layers:
            return States(last, last)
        parts = rows.split(hidden, dim=-1)
        wanted = [parts[self.kept_layers.index(layer)] for layer in self._feature_layers]
        return States(torch.cat(wanted, dim=-1), last)

    @torch.no_grad()
    def size_of_stream(self, conversations: Sequence[np.ndarray]) -> tuple[float, float]:
        """Medians over tokens of the root mean squares of the last state, before the final norm and after it."""
        alone = [self.rows([conversation])[0] for conversation in conversations]  # a step holds no more than a batch
        rows = torch.cat(alone)[:, -self.config.hidden_size :].float()
        normed = rms_norm(rows, self._final_norm.float(), self.config.rms_eps)
        before, after = (float(x.square().mean(dim=-1).sqrt().median()) for x in (rows, normed))
        return before, after

    @torch.no_grad()
    def rows(self, conversations: Sequence[np.ndarray]) -> torch.Tensor:
        """All kept states side by side [B, L, row_width], the last one behind the others, in the target's dtype."""
        segments, start = [], 0
        for row, tokens in enumerate(conversations):
            slots = np.arange(start, start + len(tokens), dtype=np.int32)
            self.runner.slot_table[row, : len(tokens)] = slots
            segments.append(Segment(row, 0, tokens.astype(np.int32), slots, num_logits=0))
            start += len(tokens)
        with torch.inference_mode():
            self.runner.forward(segments)
        assert self.runner.features is not None
        # Copied outside inference mode: autograd keeps it.
        flat = self.runner.features[:start].clone()
        there = self._places(conversations)
        rows = flat.new_zeros((*there.shape, flat.shape[1]))
        rows[there] = flat
        return rows

    def _places(self, conversations: Sequence[np.ndarray]) -> torch.Tensor:
        """bool [B, L]: where a conversation has a token."""
        lengths = torch.tensor([len(tokens) for tokens in conversations], device=self.device)
        return torch.arange(int(lengths.max()), device=self.device) < lengths[:, None]


def trainable_config(model_path: Path) -> ModelConfig:
    """A target's. StartupError where the engine has no code of its own for it: only that knows the last norm."""
    config = ModelConfig.from_folder(model_path)
    if not config.is_native:
        raise StartupError(
            f"{model_path} is a {config.architecture}, which runs by transformers' code; heads are trained "
            "for architectures that the engine has code of its own for"
        )
    return config


def target_id(model_path: Path, load_format: str) -> str:
    """The name of a target in data and checkpoints: its weight files' id, or `dummy`."""
    if load_format == "dummy":
        return "dummy"
    return numerics_id(open_checkpoint(model_path, load_format=load_format).files)


def tensor_of(model_path: Path, name: str, load_format: str) -> torch.Tensor:
    """One tensor of a checkpoint, as stored."""
    if load_format == "dummy":
        return DummyCheckpoint(tensor_shapes(ModelConfig.from_folder(model_path))).tensor(name)
    return open_checkpoint(model_path, load_format=load_format).tensor(name)
