"""What a model is: the shapes in its config.json, checked.

Knows no tensors. Anything that would change the arithmetic and is not understood here is refused, not ignored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from engine.fields import LIMITS, Fields
from engine.models.heads.names import family_named
from engine.stored_quantization import refuse_quantised
from outrider.errors import StartupError
from outrider.telemetry import get_logger
from outrider.text_files import read_json

log = get_logger(__name__)

ORIGINAL_LENGTH = "original_max_position_embeddings"
_LAYER_TYPES = ("sliding_attention", "full_attention")
# Those that our own decoders have; any other is for transformers (engine/models/transformers_config.py).
ARCHITECTURES = (
    "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MiMoForCausalLM",
)  # fmt: skip
# Biases on q, k and v, whatever `attention_bias` says, and none on the output. MiMo-7B is Qwen2 with layers for
# multi-token prediction beside it, which are a drafter's.
_QWEN2_LIKE = frozenset({"Qwen2ForCausalLM", "MiMoForCausalLM"})
# What transformers' classes take for a key that config.json leaves out; null is a value of its own.
_QWEN_LEFT_OUT = {"max_position_embeddings": 32_768, "num_key_value_heads": 32, "sliding_window": 4096}
_LEFT_OUT = {
    "LlamaForCausalLM": {"max_position_embeddings": 2048},
    "MistralForCausalLM": {"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096},
    "Qwen2ForCausalLM": _QWEN_LEFT_OUT,
    "Qwen3ForCausalLM": {**_QWEN_LEFT_OUT, "head_dim": 128},
    "MiMoForCausalLM": _QWEN_LEFT_OUT,
}


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Stretching of rotary frequencies: `linear` divides all by factor; `llama3` and `yarn` only the slow ones.

    attention_factor: what cos and sin are multiplied by; truncate: yarn's bounds are rounded to whole pairs.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    attention_factor: float = 1.0
    truncate: bool = True


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

    def kv_bytes_per_token(self, element_size: int) -> int:
        """Bytes of KV that one position takes in all layers, `element_size` bytes per number."""
        return 2 * self.num_layers * self.kv_size * element_size

    @classmethod
    def from_folder(cls, folder: Path, *, trust_remote_code: bool = False) -> ModelConfig:
        """Reads config.json, and the end ids from generation_config.json. Raises StartupError naming what is wrong."""
        raw = read_json(folder / "config.json")
        _refuse_head(folder, raw)
        if _architecture(folder / "config.json", raw) not in ARCHITECTURES:
            return _by_transformers(folder, trust_remote_code)
        generation = read_json(folder / "generation_config.json", missing_ok=True)
        try:
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


def _by_transformers(folder: Path, trust_remote_code: bool) -> ModelConfig:
    from engine.models.transformers_config import read_transformers_config

    return read_transformers_config(folder, trust_remote_code=trust_remote_code)


def _architecture(path: Path, raw: dict[str, Any]) -> str:
    names = raw.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise StartupError(f"{path}: `architectures` must name the model's class")
    return names[0]


class NotOursError(StartupError):
    """A model of one of our families with something that our decoders do not have."""


def read_config(path: Path, raw: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
    """Reads config.json of a model of one of ARCHITECTURES, and its generation_config.json."""
    architecture = _architecture(path, raw)
    return _Reader(path, {**_LEFT_OUT[architecture], **raw}).config(architecture, generation)


class _Reader(Fields):
    def config(self, architecture: str, generation: dict[str, Any]) -> ModelConfig:
        self._refuse_what_changes_the_arithmetic()
        num_heads = self.count("num_attention_heads")
        hidden_size = self.count("hidden_size")
        num_kv_heads = self.count("num_key_value_heads", num_heads)
        head_dim = self.count("head_dim", hidden_size // num_heads)
        if num_heads % num_kv_heads:
            self.fail(f"num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}")
        if head_dim % 2:
            self.fail(f"head_dim {head_dim} is odd; rotary embedding needs pairs")
        attention_bias = self._attention_bias(architecture)
        theta, scaling = self._rope()
        return ModelConfig(
            architecture=architecture,
            vocab_size=self.count("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=self.count("intermediate_size"),
            num_layers=self.count("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position=self._max_position(scaling),
            rope_theta=theta,
            rms_eps=self.number("rms_norm_eps", 1e-6),
            tied_embeddings=self.flag("tie_word_embeddings", False),
            qkv_bias=attention_bias,
            output_bias=attention_bias and architecture not in _QWEN2_LIKE,
            qk_norm=architecture == "Qwen3ForCausalLM",
            rope_scaling=scaling,
            checkpoint_dtype=str(self.values.get("dtype") or self.values.get("torch_dtype") or "float32"),
            eos_token_ids=self._eos_token_ids(generation),
            windows=self._windows(architecture),
        )

    def _attention_bias(self, architecture: str) -> bool:
        """Qwen2 always has biases on q, k and v; Mistral never; the others as `attention_bias` says, o included."""
        if architecture in _QWEN2_LIKE or architecture == "MistralForCausalLM":
            return architecture in _QWEN2_LIKE
        return self.flag("attention_bias", False)

    def _refuse_what_changes_the_arithmetic(self) -> None:
        refuse_quantised(self)
        if self.values.get("hidden_act", "silu") != "silu":
            self._leave(f"hidden_act {self.values['hidden_act']!r} is not supported; only silu is")
        if self.flag("mlp_bias", False):
            self._leave("mlp_bias is not supported")
        if self.number("partial_rotary_factor", 1.0) != 1.0:
            self._leave("partial_rotary_factor other than 1 is not supported")

    def _windows(self, architecture: str) -> tuple[int, ...]:
        """Mistral's window holds in every layer; Qwen's in those that `layer_types` or `max_window_layers` names."""
        is_mistral, num_layers = architecture == "MistralForCausalLM", self.count("num_hidden_layers")
        if architecture == "LlamaForCausalLM" or self.values.get("sliding_window") is None:
            return ()
        window = self.count("sliding_window")
        if is_mistral:
            if self.values.get("layer_types") is not None:
                self._leave("layer_types make a Ministral of a Mistral")
            return (window,) * num_layers
        if not self.flag("use_sliding_window", False):
            return ()
        kinds = self.values.get("layer_types")
        if kinds is None:
            full = self.values.get("max_window_layers", 28)
            if type(full) is not int or full < 0:
                self.fail(f"max_window_layers is {full!r}; it must be a whole number")
            return tuple(0 if layer < full else window for layer in range(num_layers))
        if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in _LAYER_TYPES for kind in kinds):
            self.fail(f"layer_types must name {' or '.join(_LAYER_TYPES)} for each of {num_layers} layers")
        return tuple(window if kind == _LAYER_TYPES[0] else 0 for kind in kinds)

    def _rope(self) -> tuple[float, RopeScaling | None]:
        """theta and scaling, from `rope_parameters` (newer files) or `rope_theta` and `rope_scaling`.

        As transformers has it: of both objects the older one holds, and the original length at the top before its own.
        """
        newer = self.values.get("rope_parameters") or {}
        values = self.values.get("rope_scaling") or newer
        if not isinstance(values, dict) or not isinstance(newer, dict):
            self.fail("rope_parameters and rope_scaling must be objects")
        if any(isinstance(value, dict) for value in values.values()):
            self._leave("rotary settings by the layers' types are not supported")
        rope = Fields(self.path, values)
        theta = rope.number("rope_theta", self.number("rope_theta", 10000.0))
        if "rope_theta" not in values and newer.get("rope_theta", theta) != theta:
            log.warning(
                "rope_scaling is read instead of rope_parameters, its rope_theta too; name that in rope_scaling",
                path=str(self.path), read=theta, passed_over=newer["rope_theta"],
            )  # fmt: skip
        kind = values.get("rope_type") or values.get("type") or "default"
        if not isinstance(kind, str):
            self.fail(f"rope_type is {kind!r}; it must be a name")
        if kind == "default":
            return theta, None
        if kind not in {"linear", "llama3", "yarn"}:
            self._leave(f"rope scaling {kind!r} is not supported; linear, llama3 and yarn are")
        if rope.number("partial_rotary_factor", 1.0) != 1.0:
            self._leave("partial_rotary_factor other than 1 is not supported")
        if kind == "linear":
            return theta, RopeScaling("linear", rope.number("factor"))
        longest = self.count("max_position_embeddings")
        original = self.number(ORIGINAL_LENGTH, rope.number(ORIGINAL_LENGTH, longest))
        if kind == "yarn":
            return theta, _yarn(rope, theta, original, longest)
        low, high = _bounds(rope, ("low_freq_factor", 1.0), ("high_freq_factor", 4.0))
        return theta, RopeScaling("llama3", rope.number("factor"), low, high, int(original))

    def _max_position(self, scaling: RopeScaling | None) -> int:
        limit = self.count("max_position_embeddings")
        rope = self.values.get("rope_scaling") or self.values.get("rope_parameters") or {}
        if scaling is None or scaling.kind != "linear" or rope.get(ORIGINAL_LENGTH) or self.values.get(ORIGINAL_LENGTH):
            return limit
        return stretched(limit, scaling.factor)

    def _eos_token_ids(self, generation: dict[str, Any]) -> tuple[int, ...]:
        """End ids: generation_config.json's where it has any, else config.json's; one id or a list."""
        for path, source in ((self.path.with_name("generation_config.json"), generation), (self.path, self.values)):
            value = source.get("eos_token_id")
            if value is not None:
                items = value if isinstance(value, list) else [value]
                ids = [_token_id(item, "eos_token_id", path) for item in items]
                return possible_ends(ids, self.count("vocab_size"), path)
        return ()

    def _leave(self, message: str) -> NoReturn:
        raise NotOursError(f"{self.path}: {message}")


def stretched(limit: int, factor: float) -> int:
    """Positions of a model with `linear` rotary scaling that does not name the length before it (SGLang's rule)."""
    return int(min(limit * max(factor, 1.0), LIMITS["max_position_embeddings"]))


def _yarn(rope: Fields, theta: float, original: float, longest: int) -> RopeScaling:
    """YaRN as transformers has it; `original` and `longest` are numbers of positions."""
    if theta <= 1:
        rope.fail(f"rope_theta is {theta}; with yarn it must be above 1")
    factor = rope.number("factor", longest / original)
    low, high = _bounds(rope, ("beta_slow", 1.0), ("beta_fast", 32.0))
    # Either of these may be 0, which is as if it were left out.
    both = [rope.number(name) for name in ("mscale", "mscale_all_dim") if rope.values.get(name)]
    steepness = both if len(both) == 2 else [1.0, 0.0]
    above, below = (0.1 * each * math.log(max(factor, 1.0)) + 1.0 for each in steepness)
    attention = rope.number("attention_factor", above / below)
    return RopeScaling("yarn", factor, low, high, int(original), attention, rope.flag("truncate", True))


def _bounds(rope: Fields, slow: tuple[str, float], fast: tuple[str, float]) -> tuple[float, float]:
    """Turns over the original length: pairs below the first are stretched, those above the second are not."""
    low, high = rope.number(*slow), rope.number(*fast)
    if high <= low:
        rope.fail(f"rope scaling: {fast[0]} {high} must be above {slow[0]} {low}")
    return low, high


def _token_id(value: object, key: str, path: Path) -> int:
    if type(value) is not int or not 0 <= value < LIMITS["vocab_size"]:
        raise StartupError(f"{path}: {key} is {value!r}; it must be a token id")
    return value


def possible_ends(ids: list[int], vocab_size: int, path: Path) -> tuple[int, ...]:
    """The end ids that the model can say; others, which some folders name, are left out with a warning."""
    beyond = [each for each in ids if not 0 <= each < vocab_size]
    if beyond:
        log.warning("end ids outside the vocabulary are left out", path=str(path), ids=beyond, vocab_size=vocab_size)
    return tuple(each for each in ids if each not in beyond)
