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
from engine.config import ModelConfig, warn_of_stray_window
from engine.feature_spec import FeatureSpec
from engine.kv_pool import KVPool
from engine.models.long_rope import hold_long_factors
from engine.models.transformers_attention import NAME, PagedAttention, refuse
from kernels.transfer import to_device
from outrider.errors import StartupError

# Places in the vocabulary: its beginning and end are control tokens, of which models have learned little.
_PROBE = (0.3, 0.1, 0.5, 0.1, 0.7, 0.4)
# Of the logits' spread: far above what a dtype costs, far below another mask or scale. Where rounding carries logits
# further (large activations in bf16, quantised ones), so many times as far as that of the embedding alone does; but
# what is further away than the last is no rounding.
_PROBE_TOLERANCE = {torch.float32: 0.01, torch.float16: 0.05, torch.bfloat16: 0.1}
_ROUNDED_TOLERANCE = 0.15  # of quantised activations, which multiply what is a last bit before them
_PROBE_NOISE = 4.0
_PROBE_LIMIT = 0.7
# Families whose config has a window that transformers' masks leave out; only flash attention is handed it.
_WINDOW_UNREAD = frozenset({"moshi"})


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
        text = model.config.get_text_config()
        windows = windows_of(text, config)
        if not _reads(text, "sliding_window"):
            text.sliding_window = None  # OLMoE's layers would hand it on, though no mask of theirs has it
        _check_scales(text, config)
        self._far = hold_long_factors(model, config.architecture) if config.is_long else 0
        self._paged = PagedAttention(config.architecture, pool, attention, windows)
        for module in model.modules():
            module.outrider_attention = self._paged
        self._kept: dict[int, torch.Tensor] = {}
        self._head_rows: torch.Tensor | None = None
        """The rows that the output head is to read of all that come to it, while a step runs that keeps them."""
        self._keep_features()

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits, fp32 [len(batch.logit_rows), vocab]."""
        device = self.pool.k.device
        slots = to_device(batch.layout.slots, device).long()
        self._paged.begin(batch.layout, slots)
        rows = to_device(batch.logit_rows, device).long()
        keeps_last = self.features.kind == "last"
        self._kept.clear()
        self._head_rows = rows if keeps_last else None
        output = self._model(
            input_ids=to_device(batch.tokens, device).long()[None],
            position_ids=to_device(batch.layout.positions, device).long()[None],
            use_cache=False, logits_to_keep=0 if keeps_last else rows,
        )  # fmt: skip
        self._head_rows = None
        if self.pool.features is not None:
            self.pool.features.index_copy_(0, slots, self._features(self.pool.features.shape[1]))
        return output.logits[0].float()

    def timed_forward(self, batch: Batch) -> tuple[torch.Tensor, dict[str, float]]:
        """Runs forward, timed; its parts are not told apart."""
        start = time.perf_counter()
        return self.forward(batch), {"all": time.perf_counter() - start}

    @torch.inference_mode()
    def probe(self, folder: Path, *, rounds: bool = False) -> None:
        """Runs a few tokens. StartupError when this is no decoder with plain attention in every layer.

        rounds: activations are quantised.
        """
        tokens = np.array([int(place * self.config.vocab_size) for place in _PROBE], np.int32)
        tokens = tokens[: min(len(tokens), self.pool.num_slots // 2, self.config.max_position)]
        try:
            ours = self._in_two_steps(tokens)
        except StartupError:
            raise
        except Exception as error:  # attention of a kind that does not come to ours, or comes in another way
            self._by_transformers(tokens)  # which says so if it is the code itself that does not run
            refuse(self.config.architecture, f"its code does not run over the pool: {error!r}")
        layers = sorted(self._paged.seen)
        if not layers:
            refuse(self.config.architecture, "transformers' code for it takes no attention but its own")
        if len(layers) != len(set(layers)):
            refuse(self.config.architecture, "a layer of it attends more than once")
        if layers != list(range(self.config.num_layers)):
            refuse(
                self.config.architecture,
                f"{len(set(layers))} of the {self.config.num_layers} layers of {folder} attend to keys and values; the "
                "others keep a state of another kind, or share another layer's",
            )
        if self.pool.k.dtype.itemsize == 1:
            return  # keys and values in fp8 are another model than transformers'
        theirs = self._by_transformers(tokens)
        apart = _distance(ours, theirs)
        allowed = _ROUNDED_TOLERANCE if rounds else _PROBE_TOLERANCE[self.pool.k.dtype]
        if not apart < allowed:
            step = torch.finfo(torch.bfloat16 if rounds else self.pool.k.dtype).eps
            noise = _distance(self._by_transformers(tokens, nudge=step), theirs)
            allowed = max(allowed, min(_PROBE_NOISE * noise, _PROBE_LIMIT))
        if not apart < allowed:
            refuse(
                self.config.architecture,
                f"logits over the pool are {apart:.2f} of their spread away from transformers' own ({folder})",
            )

    def _by_transformers(self, tokens: np.ndarray, nudge: float = 0.0) -> torch.Tensor:
        """Logits [n, vocab], by transformers' own attention; nudge: how far embeddings are moved at random, of each.

        StartupError where that does not run.
        """
        inputs = torch.from_numpy(tokens).long().to(self.pool.k.device)[None]

        def moved(_module: Any, _args: Any, states: torch.Tensor) -> torch.Tensor:
            noise = torch.randn(states.shape, generator=torch.Generator().manual_seed(0)).to(states.device)
            return (states * (1 + nudge * noise)).to(states.dtype)

        hook = self._model.get_input_embeddings().register_forward_hook(moved) if nudge else None
        try:
            self._model.set_attn_implementation("eager")
            return self._model(input_ids=inputs, use_cache=False).logits[0].float()
        except Exception as error:
            refuse(self.config.architecture, f"transformers itself does not run it: {error!r}")
        finally:
            self._model.set_attn_implementation(NAME)
            if hook is not None:
                hook.remove()

    def _in_two_steps(self, tokens: np.ndarray) -> torch.Tensor:
        """Logits [n, vocab], one half of the tokens after the other, below the rows of another session.

        Models that count a call's rows for positions, and pass over those that they are given, go astray in it, and
        those whose angles depend on the farthest row.
        """
        count, far = len(tokens), self._far
        slots = np.zeros((2, far + count), dtype=np.int32)
        slots[0, :count], slots[1, far:] = np.arange(2 * count).reshape(2, count)
        buffers = BatchBuffers(
            slots, vocab_size=self.config.vocab_size, num_slots=2 * count, num_positions=far + count,
            max_tokens=2 * count,
        )  # fmt: skip
        half = (count + 1) // 2
        logits: list[torch.Tensor] = []
        for start, end in ((0, half), (half, count)) if half < count else ((0, count),):
            other = Segment(1, far + start, tokens[::-1][start:end], slots[1, far + start : far + end], num_logits=0)
            own = Segment(0, start, tokens[start:end], slots[0, start:end], num_logits=end - start)
            logits.append(self.forward(buffers.fill([other, own])))
        return torch.cat(logits)

    def _keep_features(self) -> None:
        """Hooks that note the states that features ask for."""
        if self.features.kind == "last":
            head = self._model.get_output_embeddings()
            if head is None:
                raise self._no_features("its output head is not found")
            head.register_forward_pre_hook(self._note_last)
        if self.features.kind != "aux":
            return
        layers = self._layers()
        for index in self.features.layers:
            if index < len(layers):
                layers[index].register_forward_pre_hook(partial(self._note_entering, index), with_kwargs=True)
            else:
                layers[-1].register_forward_hook(lambda _module, _args, output, at=index: self._note(at, output))

    def _note_last(self, _module: Any, args: tuple[Any, ...]) -> torch.Tensor:
        """All rows are noted, and those go on to the output head of which there are to be logits."""
        self._note(0, args[0])
        return args[0] if self._head_rows is None else args[0][:, self._head_rows]

    def _note_entering(self, place: int, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._note(place, args[0] if args else kwargs["hidden_states"])

    def _note(self, place: int, state: Any) -> None:
        tensor = state[0] if isinstance(state, tuple) else state
        self._kept[place] = tensor.view(-1, tensor.shape[-1])

    def _features(self, width: int) -> torch.Tensor:
        """The step's rows' features [T, width], in the pool's dtype."""
        states = [self._kept[key] for key in sorted(self._kept)]
        found = sum(state.shape[-1] for state in states)
        if found != width:
            raise self._no_features(f"{found} numbers a row come from its layers and output head, of {width}")
        assert self.pool.features is not None
        return torch.cat(states, dim=-1).to(self.pool.features.dtype)

    def _layers(self) -> Any:
        lists = [module for module in self._model.modules() if isinstance(module, torch.nn.ModuleList)]
        for layers in lists:
            if len(layers) == self.config.num_layers and all(map(_has_attention, layers, range(len(layers)))):
                return layers
        raise self._no_features("its layers are not found")

    def _no_features(self, reason: str) -> StartupError:
        return StartupError(f"{self.config.architecture}: features cannot be kept: {reason}")


def _has_attention(layer: torch.nn.Module, index: int) -> bool:
    """Whether it is the layer of that number: not an expert, or of a tower for images."""
    return any(getattr(module, "layer_idx", None) == index for module in layer.modules())


def _distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """How far apart rows of logits [n, vocab] are, as a share of their spread: a middle row's, since one may be far off
    where activations are large, and wrong attention is wrong in all rows of the second step."""
    rows = (ours - theirs).pow(2).mean(dim=-1).sqrt() / theirs.std()
    return float(rows.sort().values[len(rows) // 2])


def _check_scales(text: Any, config: ModelConfig) -> None:
    """StartupError for scales of Llama 4's kind, which begin at lengths that the probe does not reach."""
    if getattr(text, "attn_temperature_tuning", False) and not all(getattr(text, "no_rope_layers", ())):
        refuse(
            config.architecture,
            "with attn_temperature_tuning its layers without rope scale queries by a call's rows, taken for positions",
        )


def windows_of(text: Any, config: ModelConfig) -> tuple[int, ...]:
    """Each layer's sliding window by the config, for layers that do not say it themselves; 0: none. Empty: nowhere."""
    kinds = getattr(text, "layer_types", None)
    try:
        window = getattr(text, "sliding_window", None) or 0
    except RuntimeError:  # transformers' own, for a key of which there is no one value
        refuse(config.architecture, "per_layer_config gives its layers a sliding_window each")
    strange = sorted(set(kinds or ()) - {"full_attention", "sliding_attention"})
    if strange:
        refuse(config.architecture, f"it has layers of {', '.join(strange)}")
    if not (kinds and _reads(text, "layer_types")):
        # A family whose config has it as a field means every layer, some in their mask alone. Elsewhere no layer reads
        # it: a forward without a cache has no window. (The cache that `generate` makes does read it, and forgets.)
        is_off = _reads(text, "use_sliding_window") and not getattr(text, "use_sliding_window", True)
        if not window or is_off or text.model_type in _WINDOW_UNREAD:
            return ()
        if not hasattr(type(text), "sliding_window"):
            warn_of_stray_window(window)
            return ()
        return (window,) * config.num_layers
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _reads(text: Any, key: str) -> bool:
    """Whether the family's config has the key as a field: else it is a stray one of its file, which no layer reads."""
    kind = type(text)
    return hasattr(kind, key) or key in kind.attribute_map or not kind.__module__.startswith("transformers.")
