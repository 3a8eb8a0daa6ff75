"""What a model is: the shapes in its config.json, checked.

Knows no tensors. Anything that would change the arithmetic and is not understood here is refused, not ignored.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from engine.fields import Fields, NotOursError
from engine.models.heads.names import family_named
from engine.rope_config import RopeScaling, read_rope
from engine.stored_quantization import refuse_quantised
from outrider.errors import StartupError
from outrider.telemetry import get_logger
from outrider.text_files import read_json

log = get_logger(__name__)

_LAYER_TYPES = ("sliding_attention", "full_attention")


@dataclass(frozen=True, slots=True)
class _Family:
    """What one architecture does not share with the others."""

    model_type: str
    """What config.json calls it. By another name transformers takes another class, whatever the architecture is."""
    left_out: dict[str, int]
    """What transformers' class takes for a key that config.json leaves out; null is a value of its own."""
    qkv_bias: bool | None = None
    """Whether q, k and v have biases, and the output none; None: as `attention_bias` says, the output too."""
    qk_norm: bool = False
    windowed: Literal["none", "all", "some"] = "none"
    """Layers that `sliding_window` holds in; some: those that `layer_types` or `max_window_layers` names."""


_QWEN_LEFT_OUT = {"max_position_embeddings": 32_768, "num_key_value_heads": 32, "sliding_window": 4096}
_QWEN2 = _Family("qwen2", _QWEN_LEFT_OUT, qkv_bias=True, windowed="some")
# Those that our own decoders have; any other is for transformers (engine/models/transformers_config.py).
_FAMILIES = {
    "LlamaForCausalLM": _Family("llama", {"max_position_embeddings": 2048}),
    "MistralForCausalLM": _Family(
        "mistral", {"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096},
        qkv_bias=False, windowed="all",
    ),
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen3ForCausalLM": _Family("qwen3", {**_QWEN_LEFT_OUT, "head_dim": 128}, qk_norm=True, windowed="some"),
    # MiMo-7B is Qwen2 with layers for multi-token prediction beside it, which are a drafter's.
    "MiMoForCausalLM": replace(_QWEN2, model_type="mimo"),
}  # fmt: skip
ARCHITECTURES = tuple(_FAMILIES)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shapes and constants of a Llama-family decoder."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rope_theta: float
    rms_eps: float
    tied_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    rope_scaling: RopeScaling | None = None
    checkpoint_dtype: str = "bfloat16"
    eos_token_ids: tuple[int, ...] = ()
    is_native: bool = True
    """Whether our own decoders have it; rope and eps mean nothing otherwise."""
    changing_rope: str | None = None
    """The rotary scaling that ends at max_position, since its angles change with a session's length beyond."""
    long_position: int = 0
    """How many positions there are with `longrope`'s factors for long sessions; 0: it has none."""
    is_long: bool = False
    """Whether those factors hold, for sessions of every length."""
    windows: tuple[int, ...] = ()
    """Each layer's window: a row sees keys less than so many positions back, 0: all. Empty: all layers see all."""

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together; values have the same."""
        return self.num_kv_heads * self.head_dim

    def for_length(self, max_len: int) -> ModelConfig:
        """The config without windows, where none is shorter than the longest session."""
        return self if any(0 < window < max_len for window in self.windows) else replace(self, windows=())

    def for_context(self, length: int | None) -> ModelConfig:
        """The config with those rotary factors that a context of so many positions needs (vLLM's rule)."""
        if length is None or not self.max_position < length <= self.long_position:
            return self
        return replace(self, max_position=self.long_position, changing_rope=None, is_long=True)

    def kv_bytes_per_token(self, element_size: int) -> int:
        """Bytes of KV that one position takes in all layers, `element_size` bytes per number."""
        return 2 * self.num_layers * self.kv_size * element_size

    @classmethod
    def from_folder(cls, folder: Path, *, trust_remote_code: bool = False) -> ModelConfig:
        """Reads config.json, and the end ids from generation_config.json. Raises StartupError naming what is wrong."""
        raw = read_json(folder / "config.json")
        _refuse_head(folder, raw)
        _refuse_other_configs(Fields(folder / "config.json", raw))
        if _architecture(folder / "config.json", raw) not in ARCHITECTURES:
            return _by_transformers(folder, trust_remote_code)
        generation = read_json(folder / "generation_config.json", missing_ok=True)
        try:
            _leave_other_types(Fields(folder / "config.json", raw))
            return read_config(folder / "config.json", raw, generation)
        except NotOursError as reason:
            try:
                return _by_transformers(folder, trust_remote_code)
            except StartupError as error:
                raise StartupError(f"{reason}; {error}") from error


def _refuse_head(folder: Path, raw: dict[str, Any]) -> None:
    family = family_named(raw)
    if family in ("eagle", "eagle3") and "vision_config" not in raw:  # some models that see are called Eagle too
        raise StartupError(f"{folder} is no model but a draft head, for --speculative-algorithm {family.upper()}")


def _refuse_other_configs(config: Fields) -> None:
    if config.values.get("configuration_files") is not None:  # by transformers' version; the checks here read one file
        config.fail("configuration_files names other files to read in its place; give a folder with config.json alone")


def refuse_looking_ahead(config: Fields) -> None:
    """StartupError unless is_causal is true or left out: null is no default of transformers' masks."""
    value = config.values.get("is_causal", True)
    if value is None or not config.flag("is_causal", True):
        config.fail(f"is_causal is {json.dumps(value)}; a model that looks ahead cannot decode")


def _leave_other_types(config: Fields) -> None:
    architecture, named = _architecture(config.path, config.values), config.values.get("model_type")
    if named not in (None, _FAMILIES[architecture].model_type):
        config.leave(f"model_type is {named!r}, of which {architecture!r} is not the architecture")


def _by_transformers(folder: Path, trust_remote_code: bool) -> ModelConfig:
    from engine.models.transformers_config import read_transformers_config

    return read_transformers_config(folder, trust_remote_code=trust_remote_code)


def _architecture(path: Path, raw: dict[str, Any]) -> str:
    names = raw.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise StartupError(f"{path}: `architectures` must name the model's class")
    return names[0]


def read_config(path: Path, raw: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
    """Reads config.json of a model of one of ARCHITECTURES, and its generation_config.json."""
    architecture = _architecture(path, raw)
    family = _FAMILIES[architecture]
    return _Reader(path, {**family.left_out, **raw}).config(architecture, family, generation)


class _Reader(Fields):
    def config(self, architecture: str, family: _Family, generation: dict[str, Any]) -> ModelConfig:
        self._refuse_what_changes_the_arithmetic()
        num_heads = self.count("num_attention_heads")
        hidden_size = self.count("hidden_size")
        num_kv_heads = self.count("num_key_value_heads", num_heads)
        head_dim = self.count("head_dim", hidden_size // num_heads)
        if num_heads % num_kv_heads:
            self.fail(f"num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}")
        if head_dim % 2:
            self.fail(f"head_dim {head_dim} is odd; rotary embedding needs pairs")
        has_bias = self.flag("attention_bias", False) if family.qkv_bias is None else family.qkv_bias
        rope = read_rope(self)
        vocab_size = self.count("vocab_size")
        return ModelConfig(
            architecture=architecture,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=self.count("intermediate_size"),
            num_layers=self.count("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position=rope.max_position,
            rope_theta=rope.theta,
            rms_eps=self.number("rms_norm_eps", 1e-6),
            tied_embeddings=self.flag("tie_word_embeddings", False),
            qkv_bias=has_bias,
            output_bias=has_bias and family.qkv_bias is None,
            qk_norm=family.qk_norm,
            rope_scaling=rope.scaling,
            checkpoint_dtype=str(self.values.get("dtype") or self.values.get("torch_dtype") or "float32"),
            eos_token_ids=end_ids(self, generation, vocab_size),
            windows=self._windows(family),
        )

    def _refuse_what_changes_the_arithmetic(self) -> None:
        refuse_quantised(self)
        refuse_looking_ahead(self)
        if self.values.get("per_layer_config") is not None:
            self.leave("per_layer_config is not supported")
        if self.values.get("hidden_act", "silu") != "silu":
            self.leave(f"hidden_act {self.values['hidden_act']!r} is not supported; only silu is")
        if self.flag("mlp_bias", False):
            self.leave("mlp_bias is not supported")

    def _windows(self, family: _Family) -> tuple[int, ...]:
        if family.windowed == "none":
            if self.values.get("sliding_window") is not None and self.values.get("use_sliding_window", True):
                warn_of_stray_window(self.values["sliding_window"])
            return ()
        kinds, num_layers = self.values.get("layer_types"), self.count("num_hidden_layers")
        if (reason := self._why_without_windows(family)) is not None:
            if isinstance(kinds, list) and _LAYER_TYPES[0] in kinds:
                self.fail(f"layer_types names {_LAYER_TYPES[0]}, but {reason}; transformers does not run it either")
            return ()
        window = self.count("sliding_window")
        if family.windowed == "all":
            if kinds is not None:
                self.leave("layer_types make a Ministral of a Mistral")
            return (window,) * num_layers
        if kinds is None:
            full = self.values.get("max_window_layers", 28)
            if type(full) is not int or full < 0:
                self.fail(f"max_window_layers is {full!r}; it must be a whole number")
            return tuple(0 if layer < full else window for layer in range(num_layers))
        if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in _LAYER_TYPES for kind in kinds):
            self.fail(f"layer_types must name {' or '.join(_LAYER_TYPES)} for each of {num_layers} layers")
        return tuple(window if kind == _LAYER_TYPES[0] else 0 for kind in kinds)

    def _why_without_windows(self, family: _Family) -> str | None:
        if self.values.get("sliding_window") is None:
            return "sliding_window is null"
        if family.windowed == "some" and not self.flag("use_sliding_window", False):
            return "use_sliding_window is false"
        return None


def warn_of_stray_window(window: object) -> None:
    """Says that a window is not used: transformers' `generate` drops what is outside it, which its forward does not."""
    log.warning("sliding_window not used: this family's layers attend to everything", sliding_window=window)


def end_ids(config: Fields, generation: dict[str, Any], vocab_size: int) -> tuple[int, ...]:
    """End ids that the model can say: generation_config.json's where it has any, else config.json's; one id or a list.

    Those outside the vocabulary, which some folders name, are left out with a warning.
    """
    path, value = config.path.with_name("generation_config.json"), generation.get("eos_token_id")
    if value is None:
        path, value = config.path, config.values.get("eos_token_id")
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    for each in ids:
        if type(each) is not int:
            raise StartupError(f"{path}: eos_token_id is {each!r}; it must be a token id")
    within = range(vocab_size)
    if beyond := [each for each in ids if each not in within]:
        log.warning("end ids outside the vocabulary are left out", path=str(path), ids=beyond, vocab_size=vocab_size)
    return tuple(each for each in ids if each in within)
