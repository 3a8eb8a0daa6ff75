"""What transformers knows of a target whose files call sizes and tensors otherwise than most: GPT-2's `n_embd`.

transformers is imported only when such a target is met, and no code of its folder is run.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

from engine.config import ModelConfig
from engine.models.transformers_config import load_config, model_config
from engine.tensors import EMBEDDING, OUTPUT_HEAD
from outrider.errors import StartupError, reason_of


def sizes_by_transformers(folder: Path) -> ModelConfig:
    """The target's sizes. StartupError where transformers cannot tell them."""
    return model_config(folder, _config(folder))


def names_by_transformers(folder: Path) -> dict[str, str]:
    """EMBEDDING and OUTPUT_HEAD -> the names of these in files of the family, without the base model's prefix.

    A tied model's head is its embedding. StartupError where transformers cannot tell them.
    """
    config = _config(folder)
    from transformers import AutoModelForCausalLM

    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it has to say about its defaults is no news here
        try:
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
            embedding = _name_in_files(model, model.get_input_embeddings())
            is_tied = config.get_text_config().tie_word_embeddings
            head = embedding if is_tied else _name_in_files(model, model.get_output_embeddings())
        except Exception as error:  # each model's code has its own
            raise StartupError(f"{folder}: its embedding and output head are not found: {reason_of(error)}") from error
    return {EMBEDDING: embedding, OUTPUT_HEAD: head}


def _name_in_files(model: Any, part: Any) -> str:
    """The name of a part's weight as files have it: transformers renames some as it loads them."""
    from transformers.core_model_loading import revert_weight_conversion

    name = next(name for name, module in model.named_modules() if module is part)
    (stored,) = revert_weight_conversion(model, {f"{name}.weight": part.weight})
    return stored.removeprefix(f"{model.base_model_prefix}.")


def _config(folder: Path) -> Any:
    try:
        return load_config(folder, trust_remote_code=False)
    except StartupError as error:
        raise StartupError(
            f"a head needs sizes and tensors of its target, which {folder} calls otherwise than most; transformers, "
            f"without code of that folder, does not know them: {error}"
        ) from error
