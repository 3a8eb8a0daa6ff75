"""Which of the target's tokens a head can draft: EAGLE-3's d2t, and FR-Spec's map of frequent ones (Zhao et al., 2025).

A map is checked when it is read: an id that is out of range or named twice would propose the wrong token for ever.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from engine.model_folder import fetched
from outrider.errors import StartupError, reason_of

TENSOR_NAME = "token_map"
# Types that d2t may be stored in; floating-point ones hold whole numbers in some files.
_WHOLE = frozenset({
    torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bfloat16, torch.float16, torch.float32,
    torch.float64,
})  # fmt: skip


def load_token_map(path: str, vocab_size: int) -> torch.Tensor:
    """int64 [n]: the target's ids that may be drafted, from a file, or `owner/repository/file` on the model hub.

    A safetensors file with a tensor `token_map`, or FR-Spec's: a list or tensor by torch.save, read with weights_only.
    """
    local = Path(path).expanduser()
    if not local.is_file():
        local = _fetch(path)
    values = _from_safetensors(local) if local.suffix == ".safetensors" else _from_pickle(local)
    if values.ndim != 1 or values.is_floating_point() or values.dtype is torch.bool:
        raise StartupError(f"token map {path} holds {values.dtype} {list(values.shape)}; a list of token ids is needed")
    return check_tokens(values.long(), vocab_size, f"token map {path}")


def target_tokens(d2t: torch.Tensor, t2d: torch.Tensor | None, vocab_size: int, where: str) -> torch.Tensor:
    """int64 [n] from EAGLE-3's tensors: d2t [n] holds target id - draft id; t2d bool [vocab] marks the target ids."""
    if d2t.ndim != 1 or d2t.dtype not in _WHOLE or not torch.equal(d2t, d2t.round()):
        raise StartupError(f"{where}: d2t is {d2t.dtype} {list(d2t.shape)}; a list of whole numbers is needed")
    tokens = check_tokens(d2t.long() + torch.arange(len(d2t)), vocab_size, f"{where}: d2t")
    if t2d is None:
        return tokens
    if t2d.shape != (vocab_size,):
        raise StartupError(f"{where}: t2d is {list(t2d.shape)}; the target's vocabulary has {vocab_size} tokens")
    marked = t2d.bool().nonzero().flatten()
    if not torch.equal(marked, tokens.sort().values):
        raise StartupError(
            f"{where}: d2t names {len(tokens)} tokens and t2d marks {len(marked)}; they are not the same"
        )
    return tokens


def check_tokens(tokens: torch.Tensor, vocab_size: int, what: str) -> torch.Tensor:
    """`tokens` int64 [n]; StartupError unless there are any, each within the vocabulary and named once."""
    outside = ((tokens < 0) | (tokens >= vocab_size)).nonzero().flatten()
    if len(tokens) == 0 or len(outside):
        found = f"entry {int(outside[0])} is token {int(tokens[outside[0]])}" if len(outside) else "it is empty"
        raise StartupError(f"{what}: {found}; the target's token ids are from 0 to {vocab_size - 1}")
    values, counts = tokens.unique(return_counts=True)
    if len(values) != len(tokens):
        raise StartupError(f"{what}: token {int(values[counts > 1][0])} is named {int(counts.max())} times")
    return tokens


def _from_safetensors(path: Path) -> torch.Tensor:
    try:
        with safe_open(path, framework="pt") as file:
            return file.get_tensor(TENSOR_NAME)
    except (SafetensorError, OSError) as error:
        raise StartupError(f"token map {path} cannot be read: {error}") from error


def _from_pickle(path: Path) -> torch.Tensor:
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
        return loaded if isinstance(loaded, torch.Tensor) else torch.tensor(loaded)
    except OSError as error:
        raise StartupError(f"token map {path} cannot be read: {reason_of(error)}") from error
    except Exception as error:  # damaged pickles raise whatever their bytes happen to mean
        raise StartupError(
            f"token map {path} cannot be read as a list of token ids; it must be a .safetensors file with a tensor "
            f"`{TENSOR_NAME}`, or a list or tensor of ids that torch.save wrote"
        ) from error


def _fetch(path: str) -> Path:
    """`owner/repository/file` from the hub."""
    repository, _, name = path.rpartition("/")
    if repository.count("/") != 1 or path.startswith(("/", ".", "~")):
        raise StartupError(f"token map {path} does not exist")
    from huggingface_hub import hf_hub_download

    return fetched(f"token map {path} is no local file", partial(hf_hub_download, repository, name))
