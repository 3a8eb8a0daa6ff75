"""The forward pass of models that we have no decoder for, by transformers over our pool.

The step's rows go through the model as one sequence of a batch of one, each with its own position; who sees whom is
attention's business, and that is ours (transformers_attention.py). A short run at load shows whether the model is of
that kind: every layer must come to attention once, and the result must be what transformers computes by itself, also
behind another session's rows and in a second step.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.attention import Attention
from engine.batch import Batch, BatchBuffers, Segment
from engine.config import ModelConfig
from engine.feature_spec import FeatureSpec
from engine.kv_pool import KVPool
from engine.models.transformers_attention import NAME, PagedAttention, refuse
from kernels.transfer import to_device
from outrider.errors import StartupError

_PROBE = (3, 1, 2, 1, 4, 2)
# Of the logits' spread; far above what bf16 and quantised activations cost, far below another mask or scale.
_PROBE_TOLERANCE = 0.15


class TransformersDecoder:
    """A whole decoder over a pool."""

    likeliest: list[int] | None = None

    def __init__(
        self, model: Any, config: ModelConfig, pool: KVPool, features: FeatureSpec, attention: Attention
    ) -> None:
        self.config = config
        self.pool = pool
        self.features = features
        self._model = model
        windows = windows_of(model.config.get_text_config(), config)
        self._paged = PagedAttention(config.architecture, pool, attention, windows)
        for module in model.modules():
            module.outrider_attention = self._paged
        self._kept: dict[int, torch.Tensor] = {}
        self._keep_features()

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits, fp32 [len(batch.logit_rows), vocab]."""
        device = self.pool.k.device
        slots = to_device(batch.layout.slots, device).long()
        self._paged.begin(batch.layout, slots)
        rows = to_device(batch.logit_rows, device).long()
        output = self._model(
            input_ids=to_device(batch.tokens, device).long()[None],
            position_ids=to_device(batch.layout.positions, device).long()[None],
            use_cache=False, logits_to_keep=rows,
        )  # fmt: skip
        if self.pool.features is not None:
            kept = torch.cat([self._kept[key] for key in sorted(self._kept)], dim=-1)
            self.pool.features.index_copy_(0, slots, kept.to(self.pool.features.dtype))
        return output.logits[0].float()

    def timed_forward(self, batch: Batch) -> tuple[torch.Tensor, dict[str, float]]:
        """As forward; its parts are not told apart."""
        start = time.perf_counter()
        return self.forward(batch), {"all": time.perf_counter() - start}

    @torch.inference_mode()
    def probe(self, folder: Path) -> None:
        """Runs a few tokens. StartupError when this is no decoder with plain attention in every layer."""
        tokens = np.array([token % self.config.vocab_size for token in _PROBE], np.int32)
        tokens = tokens[: min(len(tokens), self.pool.num_slots // 2, self.config.max_position)]
        try:
            ours = self._in_two_steps(tokens)
        except StartupError:
            raise
        except Exception as error:  # attention of a kind that does not come to ours, or comes in another way
            refuse(self.config.architecture, f"its code does not run over the pool: {error!r}")
        layers = sorted(self._paged.seen)
        if layers != list(range(self.config.num_layers)):
            refuse(
                self.config.architecture,
                f"{len(set(layers))} of the {self.config.num_layers} layers of {folder} attend to keys and values; the "
                "others keep a state of another kind, or share another layer's",
            )
        self._model.set_attn_implementation("eager")
        inputs = torch.from_numpy(tokens).long().to(self.pool.k.device)[None]
        theirs = self._model(input_ids=inputs, use_cache=False).logits[0].float()
        self._model.set_attn_implementation(NAME)
        if self.pool.k.dtype.itemsize == 1:
            return  # keys and values in fp8 are another model than transformers'
        apart = float((ours - theirs).abs().max() / theirs.std())
        if not apart < _PROBE_TOLERANCE:
            refuse(
                self.config.architecture,
                f"logits over the pool are {apart:.2f} of their spread away from transformers' own ({folder})",
            )

    def _in_two_steps(self, tokens: np.ndarray) -> torch.Tensor:
        """Logits [n, vocab], one half of the tokens after the other, below the rows of another session.

        Models that count a call's rows for positions, and pass over those that they are given, go astray in it.
        """
        count = len(tokens)
        slots = np.arange(2 * count, dtype=np.int32).reshape(2, count)
        buffers = BatchBuffers(
            slots, vocab_size=self.config.vocab_size, num_slots=2 * count, num_positions=count, max_tokens=2 * count
        )
        half = (count + 1) // 2
        logits: list[torch.Tensor] = []
        for start, end in ((0, half), (half, count)) if half < count else ((0, count),):
            other = Segment(1, start, tokens[::-1][start:end], slots[1, start:end], num_logits=0)
            own = Segment(0, start, tokens[start:end], slots[0, start:end], num_logits=end - start)
            logits.append(self.forward(buffers.fill([other, own])))
        return torch.cat(logits)

    def _keep_features(self) -> None:
        """Hooks that note the states that features ask for."""
        if self.features.kind == "last":
            self._model.base_model.register_forward_hook(lambda _module, _args, output: self._note(0, output[0]))
        if self.features.kind != "aux":
            return
        layers = self._layers()
        for index in self.features.layers:
            if index < len(layers):
                layers[index].register_forward_pre_hook(partial(self._note_entering, index), with_kwargs=True)
            else:
                layers[-1].register_forward_hook(lambda _module, _args, output, at=index: self._note(at, output))

    def _note_entering(self, place: int, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._note(place, args[0] if args else kwargs["hidden_states"])

    def _note(self, place: int, state: Any) -> None:
        tensor = state[0] if isinstance(state, tuple) else state
        self._kept[place] = tensor.view(-1, tensor.shape[-1])

    def _layers(self) -> Any:
        for module in self._model.base_model.children():
            if isinstance(module, torch.nn.ModuleList) and len(module) == self.config.num_layers:
                return module
        raise StartupError(f"{self.config.architecture}: its layers are not found, so --features cannot be kept")


def windows_of(text: Any, config: ModelConfig) -> tuple[int, ...]:
    """Each layer's sliding window by the config, for layers that do not say it themselves; 0: none. Empty: nowhere."""
    kinds = getattr(text, "layer_types", None)
    window = getattr(text, "sliding_window", None) or 0
    if not kinds:
        # A family whose config has it as a field means every layer, some in their mask alone; elsewhere it is a stray
        # key of config.json that nothing reads.
        is_read = hasattr(type(text), "sliding_window") and getattr(text, "use_sliding_window", True)
        return (window,) * config.num_layers if window and is_read else ()
    strange = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if strange:
        refuse(config.architecture, f"it has layers of {', '.join(strange)}")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
