"""Whether the weights of a model's folder are quantised already: so they are refused, not read without their scales."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outrider.errors import StartupError

_KEYS = ("quantization_config", "compression_config")  # the second is the older one of compressed-tensors
_MODELOPT_NAME = "hf_quant_config.json"  # which leaves config.json as it was


def refuse_quantised(folder: Path, raw: dict[str, Any]) -> None:
    """StartupError where `raw`, the folder's config.json, or a file beside it says that the weights are quantised."""
    found = [key for key in _KEYS if raw.get(key) is not None]
    if (folder / _MODELOPT_NAME).is_file():
        found.append(_MODELOPT_NAME)
    if found:
        raise StartupError(
            f"{folder / 'config.json'}: the checkpoint is quantised (`{found[0]}`); give one in bf16, fp16 or fp32"
        )
