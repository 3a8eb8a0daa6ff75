"""How a model's makers would have it sampled: generation_config.json's values, for fields that a request leaves out."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from gateway.schemas import SamplingFields
from outrider.telemetry import get_logger
from outrider.text_files import read_json

log = get_logger(__name__)

FILE = "generation_config.json"
_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
SamplingDefaults = Mapping[str, float]
OPENAI: SamplingDefaults = {}
FieldsT = TypeVar("FieldsT", bound=SamplingFields)


def read_defaults(*folders: Path) -> SamplingDefaults:
    """The defaults of the first folder that has the file, with a warning for a value that no request may have."""
    path = next((folder / FILE for folder in folders if os.access(folder / FILE, os.R_OK)), None)
    if path is None:
        return OPENAI
    config, found = read_json(path), dict[str, float]()
    for name in _NAMES:
        try:
            value = getattr(msgspec.convert({name: config.get(name)}, SamplingFields), name)
        except msgspec.ValidationError as error:
            log.warning("a sampling default is passed over", path=str(path), field=name, reason=str(error))
            continue
        if value is not None:
            found[name] = value
    return found


def with_defaults(fields: FieldsT, defaults: SamplingDefaults) -> FieldsT:
    """The fields with defaults where they say nothing."""
    missing = {name: value for name, value in defaults.items() if getattr(fields, name) is None}
    return msgspec.structs.replace(fields, **missing) if missing else fields
