"""From what the user named to a model's folder. Without torch, which a drafter of n-grams has not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from engine.embedded import ensure_embedded_model
from engine.weight_files import PICKLED_PATTERNS
from outrider.errors import StartupError
from outrider.model_name import may_be_hub_id

_HUB_PATTERNS = ("*.json", "*.jinja")
# Of a hub id: weights once more, as their maker has them, or other models beside.
_SECOND_COPIES = ["consolidated*", "*/*.safetensors"]


def resolve_model(
    model: str | Path | None, *, revision: str | None = None, flag: str = "--model-path",
    revision_flag: str = "--revision", load_format: str = "auto", trust_remote_code: bool = False,
) -> Path:  # fmt: skip
    """The local folder of a model: a folder as it is, a hub id fetched to the hub's cache, None the embedded default.

    Of a hub id only files that may be used are fetched: pickled ones for `pt`, no weights for `dummy`, code if trusted.
    A revision other than main is of a hub id. Raises StartupError when there is none, with the `flag` that named it.
    """
    path = None if model is None else Path(model).expanduser()
    if revision not in (None, "main") and (path is None or path.exists()):
        raise StartupError(f"{revision_flag} is of a hub id; the model is {path or 'the embedded one'}")
    if model is None or path is None:
        return ensure_embedded_model()
    if path.is_dir():
        return path.resolve()
    if path.exists():
        raise StartupError(f"{flag} is {str(model)!r}, a file; a Hugging Face folder is needed")
    name = str(model)
    if not may_be_hub_id(name):
        raise StartupError(f"{flag} is {str(model)!r}; there is no such folder, and it is no hub id")
    return _fetch(name, revision, _hub_patterns(load_format, trust_remote_code))


def _hub_patterns(load_format: str, trust_remote_code: bool) -> list[str]:
    """Names of the files of a hub id that may be used."""
    weights = {"pt": [*PICKLED_PATTERNS], "dummy": []}.get(load_format, ["*.safetensors"])
    return [*weights, *_HUB_PATTERNS, *(["*.py"] if trust_remote_code else [])]


def _fetch(hub_id: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    download = partial(
        snapshot_download, hub_id, revision=revision, allow_patterns=patterns, ignore_patterns=_SECOND_COPIES
    )
    return fetched(f"{hub_id!r} is no local folder", download)


def fetched(why: str, download: Callable[[], str]) -> Path:
    """The folder that a call of huggingface_hub downloads. StartupError, which `why` begins, where it cannot."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(download())
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise StartupError(f"{why} and could not be fetched from the model hub: {error}") from error
