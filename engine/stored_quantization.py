"""Whether the weights of a model's folder are quantised already: so they are refused, not read without their scales."""

from __future__ import annotations

from typing import Any

from engine.fields import Fields
from outrider.text_files import read_json

_KEYS = ("quantization_config", "compression_config")  # the second is the older one of compressed-tensors
_MODELOPT_NAME = "hf_quant_config.json"  # which leaves config.json as it was


def refuse_quantised(config: Fields) -> None:
    """StartupError where a config.json, or a file beside it, says that the weights are quantised already."""
    signs = [key for key in _KEYS if config.values.get(key) is not None]
    modelopt = config.path.with_name(_MODELOPT_NAME)
    if modelopt.is_file() and _quantises_weights(read_json(modelopt)):
        signs.append(_MODELOPT_NAME)
    if signs:
        config.fail(f"the checkpoint is quantised (`{signs[0]}`); give one in bf16, fp16 or fp32")


def _quantises_weights(said: dict[str, Any]) -> bool:
    """By ModelOpt's file, which is there too where keys and values alone are to be quantised."""
    settings = said.get("quantization")
    return not isinstance(settings, dict) or settings.get("quant_algo") is not None
