"""Whether the weights of a model's folder are quantised already: so they are refused, not read without their scales."""

from __future__ import annotations

from engine.fields import Fields

_KEYS = ("quantization_config", "compression_config")  # the second is the older one of compressed-tensors
_MODELOPT_NAME = "hf_quant_config.json"  # which leaves config.json as it was


def refuse_quantised(config: Fields) -> None:
    """StartupError where a config.json, or a file beside it, says that the weights are quantised already."""
    signs = [key for key in _KEYS if config.values.get(key) is not None]
    if config.path.with_name(_MODELOPT_NAME).is_file():
        signs.append(_MODELOPT_NAME)
    if signs:
        config.fail(f"the checkpoint is quantised (`{signs[0]}`); give one in bf16, fp16 or fp32")
