"""A model and its pool, ready to run steps: segments in, logits out.

Knows nothing of sessions, sampling or scheduling. One thread at a time may call it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol, Self

import numpy as np
import torch

from engine.attention import build_attention, check_fp8, check_heads, fused_rope
from engine.batch import Batch, BatchBuffers, DeviceRows, Segment, of_each_size
from engine.checkpoint import Checkpoint, open_checkpoint
from engine.config import ModelConfig
from engine.cpu_kernels import cpu_kernels, warn_without_kernels
from engine.devices import pick_device, take_device
from engine.execution import Execution
from engine.feature_spec import FeatureSpec
from engine.fingerprint import config_facts, numerics_id, torch_facts
from engine.graphs import usable_sizes, with_cuda_graphs
from engine.kv_pool import KVPool, kv_dtype
from engine.loader import compute_dtype, load_checkpoint
from engine.models.llama import TorchLlama
from engine.models.llama_native import NativeLlama, is_supported
from engine.models.llama_weights import LlamaWeights, tensor_shapes
from engine.quantization import check_quantization, warn_of_rounding
from engine.smoothing import SmoothedWeights
from engine.tensors import EMBEDDING
from kernels.native.build import build_key
from outrider.errors import StartupError

DEFAULT_MAX_BATCH_TOKENS = 4096


class Decoder(Protocol):
    """A forward pass over a pool.

    likeliest: of the last one's logits each row's highest, as ModelRunner gives it; None where that is not looked for.
    """

    likeliest: list[int] | None

    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits, fp32 [len(batch.logit_rows), outputs]; keys, values and features are written at the rows' slots."""
        ...

    def timed_forward(self, batch: Batch) -> tuple[torch.Tensor, dict[str, float]]:
        """Runs forward; also the seconds that each part took."""
        ...


class ModelRunner:
    """A loaded model with its paged pool.

    slot_table: int32 [max_sessions, max_len], position -> slot, written by the scheduler, read by attention.
    """

    def __init__(
        self, config: ModelConfig, decoder: Decoder, pool: KVPool, slot_table: np.ndarray, buffers: BatchBuffers, *,
        dtype: torch.dtype, device: torch.device, model_path: Path, backend: str, numerics: str,
        num_outputs: int | None = None, picked: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """num_outputs: width of the logits, by default the vocabulary's; picked: those of the decoder's that are given
        out, None: all.
        """
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
        self._picked = None if picked is None else picked.to(device)
        self.num_outputs = config.vocab_size if num_outputs is None else num_outputs

    @property
    def uses_kernels(self) -> bool:
        """Whether the C kernels compute the whole step, on threads of their own."""
        return self.backend.startswith("native")

    @property
    def features(self) -> torch.Tensor | None:
        """The feature plane [num_slots, width]; forward writes the rows at the segments' slots."""
        return self.pool.features

    @property
    def likeliest(self) -> list[int] | None:
        """Columns of the highest logit in each row of the last step's, the lower of equal ones; -1 where that is not
        finite, or one of them is NaN. None where the model does not look for it."""
        return self._decoder.likeliest if self._picked is None else None

    @property
    def takes_device_rows(self) -> bool:
        """Whether a step can run on tokens that only the device knows."""
        return self.config.is_native and not self.uses_kernels

    def forward(self, segments: Sequence[Segment], rows: DeviceRows | None = None) -> torch.Tensor:
        """One step. Returns fp32 logits [sum of num_logits, vocab or output_rows], rows in the segments' order.

        rows: in place of the segments' tokens and masks; only where takes_device_rows. Raises ValueError for a segment
        whose numbers lie outside the model, the pool or the slot table; nothing is computed then.
        """
        batch = self._buffers.fill(segments, rows)
        logits = self._decoder.forward(batch)
        self._buffers.remember(batch)
        return self._wanted(logits)

    def timed_forward(self, segments: Sequence[Segment]) -> tuple[torch.Tensor, dict[str, float]]:
        """Runs forward; also the seconds that each part of the step took; which parts, the backend decides."""
        batch = self._buffers.fill(segments)
        logits, seconds = self._decoder.timed_forward(batch)
        self._buffers.remember(batch)
        return self._wanted(logits), seconds

    def warmed(self) -> Self:
        """Itself, kernels compiled where that takes long: on a GPU."""
        if self.device.type == "cuda":
            self.run_each_size()
        return self

    def run_each_size(self) -> None:
        """Runs steps of all sizes, without graphs, on slots that nobody may use yet: compiles what they need."""
        max_len = self.slot_table.shape[1]
        for segment in of_each_size(min(self._buffers.max_tokens, self._buffers.num_slots, max_len), max_len):
            self.timed_forward([segment])

    def _wanted(self, logits: torch.Tensor) -> torch.Tensor:
        return logits if self._picked is None else logits[:, self._picked]

    @classmethod
    def load(
        cls, model_path: Path, *, dtype: str = "auto", device: str = "cpu", num_slots: int, max_sessions: int,
        max_len: int, features: FeatureSpec | None = None, load_format: str = "auto",
        max_batch_tokens: int = DEFAULT_MAX_BATCH_TOKENS, threads: int | None = None, quantization: str | None = None,
        execution: Execution | None = None, trust_remote_code: bool = False, output_rows: torch.Tensor | None = None,
        context_length: int | None = None,
    ) -> ModelRunner:  # fmt: skip
        """Reads a model folder and allocates its pool. Raises StartupError for a folder that is refused.

        dtype: auto, bfloat16, float16 or float32; device: auto, cpu, cuda or cuda:N; max_len: longest session, cut to
        the model's context; max_batch_tokens: most rows of one step; threads: of the CPU, default torch's;
        quantization: engine.quantization says which there are; execution: kernels, kept numbers, graphs, compiling;
        trust_remote_code: run code that comes in the folder, where the model needs it; output_rows: int64 [n]: the only
        ids that there are logits of, in this order; context_length: as asked for, which `longrope` goes by.
        """
        if threads is not None:
            torch.set_num_threads(threads)
        features = features or FeatureSpec()
        config = ModelConfig.from_folder(model_path, trust_remote_code=trust_remote_code).for_context(context_length)
        place, torch_dtype = pick_device(device), compute_dtype(dtype, config)
        take_device(place)
        max_len = min(max_len, config.max_position)
        config = config.for_length(max_len)
        quantization, execution = check_quantization(quantization, place), execution or Execution()
        kept = _kept_dtype(execution, torch_dtype, place)
        has_graphs = config.is_native and usable_sizes(execution, place) is not None
        pool = KVPool(config, features, num_slots, torch_dtype, place, kv=kept, with_padding=has_graphs)
        with torch.inference_mode():
            if config.is_native:
                shapes = tensor_shapes(config)
                checkpoint, tensors = load_checkpoint(model_path, shapes, load_format=load_format, dtype=torch_dtype)
                decoder, backend = _build_decoder(
                    config, tensors, pool, features, max_len, quantization, torch_dtype, execution, output_rows
                )
            else:
                decoder, backend, checkpoint = _transformers_decoder(
                    model_path, config, pool, features, quantization, torch_dtype, execution, load_format,
                    trust_remote_code,
                )  # fmt: skip
        warn_of_rounding(quantization, kept, place, backend)
        slot_table = np.zeros((max_sessions, max_len), dtype=np.int32)
        buffers = BatchBuffers(
            slot_table, vocab_size=config.vocab_size, num_slots=num_slots, num_positions=max_len,
            max_tokens=max_batch_tokens,
        )  # fmt: skip
        runner = cls(
            config, decoder, pool, slot_table, buffers, dtype=torch_dtype, device=place, model_path=model_path,
            backend=backend, num_outputs=None if output_rows is None else len(output_rows),
            picked=None if config.is_native else output_rows,
            numerics=numerics_id(
                checkpoint.files, config_facts(model_path), load_format, str(torch_dtype), quantization or "", backend
            ),
        )  # fmt: skip
        return runner.warmed()


def _build_decoder(
    config: ModelConfig, tensors: Iterator[tuple[str, torch.Tensor]], pool: KVPool, features: FeatureSpec, max_len: int,
    quantization: str | None, dtype: torch.dtype, execution: Execution, output_rows: torch.Tensor | None,
) -> tuple[Decoder, str]:  # fmt: skip
    """The forward pass that suits the machine, and its name, which is part of numerics_id."""
    if execution.compile_max_batch and quantization is not None:
        raise StartupError(
            "--enable-torch-compile does not go with --quantization: quantised products are kernels of their own, "
            "which torch.compile cannot see into; leave one of the two out"
        )
    device = pool.k.device
    library = None
    if device.type == "cpu":
        library = _cpu_kernels(config, dtype, quantization, _torch_only(execution))
    held = dtype if library is None else None
    weights = LlamaWeights(config, tensors, held, device, output_rows)
    if quantization == "int8_dynamic":
        weights = SmoothedWeights(config, tensors, held, device, output_rows)
    if library is not None:
        threads = torch.get_num_threads()
        decoder: Decoder = NativeLlama(config, weights, pool, features, max_len, library, threads, quantization, dtype)
        facts = [f"native {library.outrider_instructions().decode()} {build_key(library)}", str(pool.k.dtype)]
        return decoder, " ".join(facts + _digest(weights))
    check_heads(execution.attention, config, dtype, device)
    attention = build_attention(execution.attention, device, page_size=execution.page_size)
    decoder = TorchLlama(
        config, weights, pool, features, attention, max_len, quantization,
        compile_max_batch=execution.compile_max_batch,
        rope_and_store=fused_rope(execution.attention, device, pool.k.dtype),
    )  # fmt: skip
    sizes = usable_sizes(execution, device)
    facts = torch_facts(execution, quantization, device, pool.k.dtype)
    facts += ["compiled"] * bool(execution.compile_max_batch) + ["graphs"] * (sizes is not None)
    facts += _digest(weights)
    return decoder if sizes is None else with_cuda_graphs(decoder, sizes, pool, dtype), " ".join(facts)


def _digest(weights: LlamaWeights) -> list[str]:
    """Digest of what smoothing moved, once all layers have been read: another device or torch may measure otherwise."""
    return [f"smoothed {weights.digest}"] if isinstance(weights, SmoothedWeights) else []


def _transformers_decoder(
    folder: Path, config: ModelConfig, pool: KVPool, features: FeatureSpec, quantization: str | None,
    dtype: torch.dtype, execution: Execution, load_format: str, trust_remote_code: bool,
) -> tuple[Decoder, str, Checkpoint]:  # fmt: skip
    """The forward pass by transformers over our pool, its name, and the files that it was loaded from."""
    from transformers import __version__ as version

    from engine.models.transformers_decoder import TransformersDecoder
    from engine.models.transformers_loading import load_transformers_model

    if execution.compile_max_batch:
        raise StartupError(f"--enable-torch-compile is for our own decoders; {config.architecture} has none")
    if execution.graphs is not None and execution.graphs.required:
        raise StartupError(f"--cuda-graph-max-bs is for our own decoders; {config.architecture} has none")
    device = pool.k.device
    check_heads(execution.attention, config, dtype, device)
    attention = build_attention(execution.attention, device, page_size=execution.page_size)
    model, checkpoint = load_transformers_model(
        folder, dtype=dtype, device=device, load_format=load_format, quantization=quantization,
        trust_remote_code=trust_remote_code,
    )  # fmt: skip
    decoder = TransformersDecoder(model, config, pool, features, attention)
    decoder.probe(folder, rounds=quantization == "int8_dynamic")
    facts = [f"transformers {version}", *torch_facts(execution, quantization, device, pool.k.dtype)]
    facts += ["long factors"] * config.is_long
    return decoder, " ".join(facts), checkpoint


def model_shapes(folder: Path, config: ModelConfig, *, load_format: str) -> dict[str, tuple[int, ...]]:
    """The tensors that the model has, for its memory. StartupError for a damaged file."""
    if config.is_native:
        return tensor_shapes(config)
    if load_format == "dummy":
        layer = 4 * config.hidden_size * (config.q_size + config.intermediate_size)
        top = {EMBEDDING: (config.vocab_size, config.hidden_size)}
        return {**top, "layers": (config.num_layers, layer)}
    return dict(open_checkpoint(folder, load_format=load_format).shapes())


def _kept_dtype(execution: Execution, compute: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype that the pool keeps. StartupError where attention cannot read it."""
    execution.attention.resolved(device)
    kept = kv_dtype(execution.kv_cache_dtype, compute)
    if kept is not compute:
        check_fp8(execution.attention, kept, device)
    return kept


def _torch_only(execution: Execution) -> str | None:
    """Names the setting that the C kernels do not have; None: they have all."""
    if not execution.attention.is_open:
        return f"attention backend {execution.attention} is asked for"
    if execution.compile_max_batch:
        return "--enable-torch-compile compiles torch's operators"
    return None


def _cpu_kernels(
    config: ModelConfig, dtype: torch.dtype, quantization: str | None, torch_only: str | None
) -> ctypes.CDLL | None:
    """The C kernels, or None, saying why, where torch's operators have to do."""
    if torch_only is not None:
        reason = torch_only
    elif not is_supported(config, dtype, quantization):
        reason = f"no kernel for this model in {dtype}"
    else:
        return cpu_kernels()
    warn_without_kernels(reason)
    return None
