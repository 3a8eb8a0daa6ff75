"""Names of models: in the API unless `--served-model-name` gives another, and on the model hub."""

from __future__ import annotations

import re
from pathlib import Path

from outrider.v1 import verify_pb2

EMBEDDED = "SmolLM2-135M-Instruct"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def default_model_name(info: verify_pb2.VerifyServiceGetServerInfoResponse) -> str:
    """The embedded model's own name, a hub id as it was given, else the model folder's name."""
    folder = Path(info.model.model_path)
    asked = info.arguments.get("model-path")
    if asked == "None":
        return EMBEDDED
    if asked is not None and _HUB_ID.fullmatch(asked) and not Path(asked).is_absolute() and folder.name not in asked:
        return asked
    return folder.name


def may_be_hub_id(name: str) -> bool:
    """Whether a name may be that of a model on the hub: OWNER/NAME. A folder of that name goes before."""
    return name.count("/") == 1 and not name.startswith(("/", ".", "~"))
