"""Shapes of models that transformers runs for us: any decoder that it knows, and with --trust-remote-code any other.

transformers is imported only when such a model is served.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

from engine.config import ModelConfig, end_ids, refuse_looking_ahead
from engine.fields import Fields
from engine.rope_config import ORIGINAL_LENGTH, stretched
from engine.stored_quantization import refuse_quantised
from outrider.errors import StartupError, reason_of
from outrider.telemetry import get_logger
from outrider.text_files import read_json

# Rotary tables of these change with the longest sequence of a step beyond this many positions, and with it would every
# other session's numbers.
_CHANGING_ROPE = frozenset({"dynamic", "longrope"})
_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")

log = get_logger(__name__)


def read_transformers_config(folder: Path, *, trust_remote_code: bool) -> ModelConfig:
    """The shape of a model that is not one of our own families. StartupError for one that cannot be served."""
    return model_config(folder, load_config(folder, trust_remote_code=trust_remote_code))


def load_config(folder: Path, *, trust_remote_code: bool) -> Any:
    """transformers' config of the folder. Without trust_remote_code nothing of the folder's code is run."""
    raw = read_json(folder / "config.json")
    try:
        import transformers
    except ImportError as error:
        names = ", ".join(map(str, raw.get("architectures") or ["an unnamed architecture"]))
        raise StartupError(
            f"{folder}: {names} is served through transformers, which is missing: "
            "in a checkout, pip install '.[models]'"
        ) from error
    refuse_quantised(Fields(folder / "config.json", raw))
    for part in (raw, raw.get("text_config")):
        if isinstance(part, dict):
            refuse_looking_ahead(Fields(folder / "config.json", part))
    if "auto_map" in raw and not trust_remote_code and not _is_known(raw):
        _fail(folder, "this model needs Python code of its own folder, which is run only with --trust-remote-code")
    try:
        config = transformers.AutoConfig.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:  # each model's code has its own
        reason = f"{_name(raw)} is left to transformers, which does not take it: {reason_of(error)}"
        raise StartupError(f"{folder / 'config.json'}: {reason}") from error
    if not _is_decoder(config, raw, trust_remote_code):
        _fail(folder, f"architecture {_name(raw)!r} is not supported: transformers has no causal language model for it")
    return config


def model_config(folder: Path, config: Any) -> ModelConfig:
    """The numbers of transformers' config, checked."""
    try:
        return _numbers(folder, config.get_text_config())
    except StartupError:
        raise
    except Exception as error:  # of a config whose layers have numbers of their own
        name = _name(read_json(folder / "config.json"))
        _fail(folder, f"architecture {name!r} is not supported: {reason_of(error)}")


def _numbers(folder: Path, text: Any) -> ModelConfig:
    name = _name(read_json(folder / "config.json"))
    absent = [key for key in _SIZES if getattr(text, key, None) is None]
    if absent:
        _fail(folder, f"architecture {name!r} is not supported: its config has no {absent[0]}, which the KV pool needs")
    sizes = {key: _count(folder, key, getattr(text, key, None)) for key in _SIZES}
    heads = sizes["num_attention_heads"]
    kv_heads = _count(folder, "num_key_value_heads", getattr(text, "num_key_value_heads", None) or heads)
    head_dim = _count(folder, "head_dim", getattr(text, "head_dim", None) or sizes["hidden_size"] // heads)
    ends = Fields(folder / "config.json", {"eos_token_id": text.eos_token_id})
    generation = read_json(folder / "generation_config.json", missing_ok=True)
    longest = sizes["max_position_embeddings"]
    max_position, changing_rope = _max_position(text, longest)
    return ModelConfig(
        architecture=name,
        vocab_size=sizes["vocab_size"],
        hidden_size=sizes["hidden_size"],
        intermediate_size=getattr(text, "intermediate_size", None) or 4 * sizes["hidden_size"],
        num_layers=sizes["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        rope_theta=0.0,
        rms_eps=0.0,
        tied_embeddings=bool(text.tie_word_embeddings),
        checkpoint_dtype=str(text.dtype or "float32").removeprefix("torch."),
        eos_token_ids=end_ids(ends, generation, sizes["vocab_size"]),
        is_native=False,
        changing_rope=changing_rope,
        long_position=longest if changing_rope == "longrope" else 0,
    )


def _is_known(raw: dict[str, Any]) -> bool:
    from transformers import CONFIG_MAPPING

    return raw.get("model_type") in CONFIG_MAPPING


def _is_decoder(config: Any, raw: dict[str, Any], trust_remote_code: bool) -> bool:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return True
    return trust_remote_code and "AutoModelForCausalLM" in (raw.get("auto_map") or {})


def _max_position(text: Any, limit: int) -> tuple[int, str | None]:
    """How many positions there are, and the rotary scaling that would change beyond them."""
    if getattr(text, "rope_parameters", None):
        # As a model does when it is built: only then the original length at the top counts before rotary scaling's own.
        text.standardize_rope_params()
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    if changing := [part for part in kinds if part.get("rope_type") in _CHANGING_ROPE]:
        shortest = min(int(part.get(ORIGINAL_LENGTH) or limit) for part in changing)
        kind = min(part["rope_type"] for part in changing)  # dynamic, where there are both
        if shortest < limit and kind != "longrope":  # of which more can be had (sizing.py)
            log.warning("context cut: rotary scaling changes beyond it", rope=kind, tokens=shortest)
        return min(limit, shortest), kind
    # By layers' types (Gemma 3) it is in the limit already.
    if rope.get("rope_type") == "linear" and not (rope.get(ORIGINAL_LENGTH) or getattr(text, ORIGINAL_LENGTH, None)):
        return stretched(limit, rope["factor"]), None
    return limit, None


def _name(raw: dict[str, Any]) -> str:
    names = raw.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else str(raw.get("model_type"))


def _count(folder: Path, key: str, value: object) -> int:
    return Fields(folder / "config.json", {key: value}).count(key)


def _fail(folder: Path, message: str) -> NoReturn:
    raise StartupError(f"{folder / 'config.json'}: {message}")
