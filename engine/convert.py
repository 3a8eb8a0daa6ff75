"""Draft heads, from the forms that they are published in to one that every server reads: SGLang's, in safetensors.

Reads EAGLE's own repositories (pytorch_model.bin, read with weights_only, or safetensors), speculators' format, and
SGLang's. Nothing is rounded or retrained: tensors are renamed, and config.json is written anew. The result is checked
by reading it back; it appears whole, or not at all.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine.model_folder import fetched
from engine.models.heads.config import RawConfig
from engine.models.heads.eagle import EagleConfig
from engine.models.heads.eagle3 import Eagle3Config
from engine.models.heads.load import HeadFolder, flattened, own_tokens, tensors_of
from engine.models.heads.names import DRAFT_TO_TARGET, TARGET_TO_DRAFT, published_name
from engine.models.heads.token_map import target_tokens
from engine.saving import save_tensors
from engine.weight_files import PICKLED_PATTERNS, WEIGHTS_KEY, pickled_files
from engine.whole import put_in_place, work_folder
from outrider.args import ConvertArgs
from outrider.errors import StartupError, Unfinished
from outrider.text_files import read_json

SOURCE_PATTERNS = ["*.safetensors", "*.bin", "*.json"]
# Of a source's config.json: what names its own format, and keys that are written anew.
_DROPPED = (
    "speculators_config", "speculators_model_type", "speculators_version", "auto_map", "architectures", "model_type",
    "eagle_config", "eagle_aux_hidden_state_layer_ids", "fusion_bias", "layernorms", WEIGHTS_KEY,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Converted:
    """What was written: the head's family, and how many tensors and bytes."""

    folder: Path
    family: str
    num_tensors: int
    num_bytes: int


def resolve_source(source: str | Path, *, revision: str | None = None) -> Path:
    """A local folder as it is; a hub id is fetched, pickled weights included. StartupError when there is none."""
    path = Path(source).expanduser()
    if path.is_dir():
        return path.resolve()
    if str(source).count("/") != 1 or path.exists():
        raise StartupError(f"{source} is neither a folder nor the id of a head on the model hub")
    from huggingface_hub import snapshot_download

    download = partial(snapshot_download, str(source), revision=revision, allow_patterns=SOURCE_PATTERNS)
    return fetched(f"{source!r} is no folder", download)


def convert_head(source: Path, destination: Path) -> Converted:
    """Writes the head in folder `source` to a new folder `destination`.

    Raises StartupError for a source that is no EAGLE or EAGLE-3 head, one that does not add up, a destination that
    exists, or a disk that is full.
    """
    if destination.exists():
        raise StartupError(f"{destination} exists; name a folder that does not")
    has_safetensors = any(source.glob("*.safetensors"))
    if not has_safetensors and not pickled_files(source):
        raise StartupError(f"{source} has no weights: neither .safetensors nor any of {', '.join(PICKLED_PATTERNS)}")
    opened = HeadFolder.open(source, load_format="safetensors" if has_safetensors else "pt")
    tensors = _published_tensors(opened)
    config = _published_config(opened)
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        with work_folder(destination.parent, f".{destination.name}.tmp-") as folder:
            work = folder / destination.name
            work.mkdir()
            save_tensors(tensors, work / "model.safetensors")
            (work / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            written = HeadFolder.open(work)
            if isinstance(written.config, Eagle3Config):
                own_tokens(written, written.config)
            num_bytes = sum(path.stat().st_size for path in work.iterdir())
            put_in_place(work, destination)
    except OSError as error:
        raise Unfinished(f"{destination} cannot be written: {error}") from error
    return Converted(destination, opened.config.family, len(tensors), num_bytes)


def _published_tensors(opened: HeadFolder) -> dict[str, torch.Tensor]:
    """The head's tensors by SGLang's names. Its EAGLE head always has a bias in fc: zero if the source has none."""
    config = opened.config
    if not isinstance(config, (EagleConfig, Eagle3Config)):
        raise StartupError(
            f"{opened.folder} holds {config.family} layers of a target; they are read where they are, so there is "
            "nothing to convert"
        )
    own = {name: tensor.contiguous() for name, tensor in tensors_of(opened).items()}
    if isinstance(config, EagleConfig) and not config.has_fc_bias:
        own["fc.bias"] = torch.zeros(config.block.hidden_size, dtype=own["fc.weight"].dtype)
    if DRAFT_TO_TARGET in own:
        vocab_size = config.block.vocab_size
        tokens = target_tokens(own[DRAFT_TO_TARGET], own.get(TARGET_TO_DRAFT), vocab_size, str(opened.folder))
        own[DRAFT_TO_TARGET] = own[DRAFT_TO_TARGET].long()
        own[TARGET_TO_DRAFT] = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, tokens, True)
    if config.block.num_layers > 1:
        return own
    return {published_name(config.family, name): tensor for name, tensor in own.items()}


def _published_config(opened: HeadFolder) -> dict[str, Any]:
    raw, config = flattened(read_json(opened.folder / "config.json")), opened.config
    kept = {key: value for key, value in raw.items() if key not in _DROPPED}
    like = RawConfig(opened.folder / "config.json", raw).layer_like(opened.names.stored)
    kept["model_type"] = like.removesuffix("ForCausalLM").lower()
    if isinstance(config, EagleConfig):
        return {"architectures": ["LlamaForCausalLMEagle"], **kept, "bias": True}
    if isinstance(config, Eagle3Config):
        kept["num_hidden_layers"] = config.block.num_layers
        eagle: dict[str, Any] = {"use_aux_hidden_state": config.reads_aux}
        if config.aux_layers is not None:
            eagle["eagle_aux_hidden_state_layer_ids"] = [layer - 1 for layer in config.aux_layers]
        return {"architectures": ["LlamaForCausalLMEagle3"], **kept, "eagle_config": eagle}
    return kept


def main(args: ConvertArgs) -> int:
    """`outrider convert`: converts, and says what was written."""
    assert args.source is not None
    assert args.destination is not None
    done = convert_head(resolve_source(args.source, revision=args.revision), Path(args.destination).expanduser())
    print(f"{done.folder}: {done.family} head, {done.num_tensors} tensors, {done.num_bytes / 2**20:.1f} MiB")
    return 0
