"""A model and its pool, ready to run steps: segments in, logits out.

Knows nothing of sessions, sampling or scheduling. One thread at a time may call it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from engine.batch import Batch, BatchBuffers, Segment
from engine.config import FeatureSpec, ModelConfig, RopeScaling
from engine.fingerprint import numerics_id
from engine.kv_pool import KVPool
from engine.loader import compute_dtype, load_checkpoint
from engine.models.llama import TorchLlama
from engine.models.llama_native import NativeLlama, is_supported
from engine.models.llama_weights import LlamaWeights, tensor_shapes
from kernels.attention import torch_native
from kernels.native.build import CannotBuild, build_key
from kernels.native.library import open_library
from kernels.rope import rope_frequencies
from outrider import env
from outrider.errors import StartupError
from outrider.telemetry import get_logger

DEFAULT_MAX_BATCH_TOKENS = 4096

log = get_logger(__name__)


class Decoder(Protocol):
    """A forward pass over a pool."""

    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits, fp32 [len(batch.logit_rows), vocab]; keys, values and features are written at the rows' slots."""
        ...

    def timed_forward(self, batch: Batch) -> tuple[torch.Tensor, dict[str, float]]:
        """As forward, with the seconds that each part took."""
        ...


class ModelRunner:
    """A loaded model with its paged pool.

    slot_table: int32 [max_sessions, max_len], position -> slot, written by the scheduler, read by attention.
    """

    def __init__(
        self, config: ModelConfig, decoder: Decoder, pool: KVPool, slot_table: np.ndarray, buffers: BatchBuffers, *,
        dtype: torch.dtype, device: torch.device, model_path: Path, backend: str, numerics: str,
    ) -> None:  # fmt: skip
        self.config = config
        self.dtype = dtype
        self.device = device
        self.model_path = model_path
        self.backend = backend
        self.numerics_id = numerics
        self.pool = pool
        self.slot_table = slot_table
        self._buffers = buffers
        self._decoder = decoder

    @property
    def features(self) -> torch.Tensor | None:
        """The feature plane [num_slots, width]; forward writes the rows at the segments' slots."""
        return self.pool.features

    def forward(self, segments: Sequence[Segment]) -> torch.Tensor:
        """One step. Returns fp32 logits [sum of num_logits, vocab], rows in the segments' order.

        Raises ValueError for a segment whose numbers lie outside the model, the pool or the slot table; nothing is
        computed then.
        """
        batch = self._buffers.fill(segments)
        logits = self._decoder.forward(batch)
        self._buffers.remember(batch)
        return logits

    def timed_forward(self, segments: Sequence[Segment]) -> tuple[torch.Tensor, dict[str, float]]:
        """As forward, with the seconds that each part of the step took; which parts, the backend decides."""
        batch = self._buffers.fill(segments)
        logits, seconds = self._decoder.timed_forward(batch)
        self._buffers.remember(batch)
        return logits, seconds

    @classmethod
    def load(
        cls, model_path: Path, *, dtype: str = "auto", device: str = "cpu", num_slots: int, max_sessions: int,
        max_len: int, features: FeatureSpec | None = None, load_format: str = "auto",
        max_batch_tokens: int = DEFAULT_MAX_BATCH_TOKENS, threads: int | None = None,
    ) -> ModelRunner:  # fmt: skip
        """Reads a model folder and allocates its pool. Raises StartupError for a folder that is refused.

        dtype: auto, bfloat16, float16 or float32; device: auto, cpu, cuda or cuda:N; max_len: longest session, cut to
        the model's context; max_batch_tokens: most rows of one step; threads: of the CPU, default torch's.
        """
        if threads is not None:
            torch.set_num_threads(threads)
        features = features or FeatureSpec()
        config = ModelConfig.from_folder(model_path)
        place, torch_dtype = pick_device(device), compute_dtype(dtype, config)
        max_len = min(max_len, config.max_position)
        checkpoint, tensors = load_checkpoint(model_path, tensor_shapes(config), load_format=load_format)
        pool = KVPool(config, features, num_slots, torch_dtype, place)
        with torch.inference_mode():
            decoder, backend = _build_decoder(config, tensors, pool, features, max_len)
        slot_table = np.zeros((max_sessions, max_len), dtype=np.int32)
        buffers = BatchBuffers(
            slot_table, vocab_size=config.vocab_size, num_slots=num_slots, num_positions=max_len,
            max_tokens=max_batch_tokens,
        )  # fmt: skip
        return cls(
            config, decoder, pool, slot_table, buffers, dtype=torch_dtype, device=place, model_path=model_path,
            backend=backend, numerics=numerics_id(checkpoint.files, load_format, str(torch_dtype), "", backend),
        )  # fmt: skip


def _build_decoder(
    config: ModelConfig, tensors: Iterator[tuple[str, torch.Tensor]], pool: KVPool, features: FeatureSpec, max_len: int
) -> tuple[Decoder, str]:
    """The forward pass that suits the machine, and its name, which is part of numerics_id."""
    device, dtype, frequencies = pool.k.device, pool.k.dtype, _frequencies(config)
    library = _cpu_kernels(config, dtype) if device.type == "cpu" else None
    if library is not None:
        weights = LlamaWeights(config, tensors, None, device)
        threads = torch.get_num_threads()
        decoder = NativeLlama(config, weights, pool, features, max_len, frequencies, library, threads)
        return decoder, f"native {library.outrider_instructions().decode()} {build_key(library)}"
    weights = LlamaWeights(config, tensors, dtype, device)
    decoder = TorchLlama(config, weights, pool, features, torch_native.attention, max_len, frequencies)
    return decoder, f"torch {torch.__version__} {device.type} {torch.backends.cpu.get_cpu_capability()}"


def _cpu_kernels(config: ModelConfig, dtype: torch.dtype) -> ctypes.CDLL | None:
    """The C kernels, or None, saying why, where torch's operators have to do."""
    if not env.cpu_kernel():
        reason = "OUTRIDER_CPU_KERNEL is off"
    elif not is_supported(config, dtype):
        reason = f"no kernel for this model in {dtype}"
    else:
        try:
            return open_library(env.home() / "kernels")
        except (CannotBuild, OSError) as error:
            reason = str(error)
    log.warning("CPU kernels not used, decoding is slower", reason=reason)
    return None


def pick_device(name: str) -> torch.device:
    """auto: the first CUDA device where there is one. Raises StartupError for a device that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise StartupError(f"device {name!r} is unknown: {error}") from error
    if device.type not in {"cpu", "cuda"}:
        raise StartupError(f"device {name!r} is not supported; cpu and cuda are")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise StartupError(f"device {name!r} is not there; CUDA devices found: {torch.cuda.device_count()}")
    return device


def _frequencies(config: ModelConfig) -> torch.Tensor:
    scaling = config.rope_scaling or RopeScaling("default", 1.0)
    return rope_frequencies(
        config.head_dim, config.rope_theta, kind=scaling.kind, factor=scaling.factor,
        low_freq_factor=scaling.low_freq_factor, high_freq_factor=scaling.high_freq_factor,
        original_max_position=scaling.original_max_position,
    )  # fmt: skip
