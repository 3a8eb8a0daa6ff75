"""A model of transformers with its weights, ready to be run over our pool.

Files are checked by our own rules first; what is missing, extra, quantised or not finite is told, never made up.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint import Checkpoint, DummyCheckpoint, check_numbers, open_checkpoint
from engine.loader import warn_of_unused
from engine.models.transformers_attention import NAME, attend, refuse
from engine.models.transformers_config import load_config
from engine.quantization import head_maker, linear_maker
from engine.tensors import refuse_tensors
from outrider.errors import StartupError, reason_of


def load_transformers_model(
    folder: Path, *, dtype: torch.dtype, device: torch.device, load_format: str, quantization: str | None,
    trust_remote_code: bool,
) -> tuple[Any, Checkpoint]:  # fmt: skip
    """The model, in eval mode on its device, its linear layers ours; and the files that it came from."""
    import transformers
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # what is missing is told below, in one line
    config = load_config(folder, trust_remote_code=trust_remote_code)
    config.use_cache, config.return_dict = False, True
    with warnings.catch_warnings():
        # What transformers has to say about its own defaults is no news to who serves the model.
        warnings.simplefilter("ignore")
        try:
            if load_format == "dummy":
                model, checkpoint = _dummy(config, dtype, trust_remote_code)
            else:
                checkpoint = open_checkpoint(folder, load_format=load_format)
                loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
                    folder, config=config, dtype=dtype, attn_implementation=NAME, trust_remote_code=trust_remote_code,
                    use_safetensors=load_format != "pt", weights_only=True, local_files_only=True,
                    output_loading_info=True, ignore_mismatched_sizes=True,  # _check_loaded names them
                )  # fmt: skip
                model, found = loaded
                _check_loaded(folder, model, checkpoint, found)
        except StartupError:
            raise
        except KeyError as error:
            if error.args == (NAME,):  # code that looks its attention up in a table of its own
                names = getattr(config, "architectures", None) or [type(config).__name__]
                refuse(str(names[0]), "transformers' code for it takes no attention but its own")
            raise StartupError(f"{folder}: transformers cannot load it: {reason_of(error)}") from error
        except Exception as error:  # each model's code has its own
            reason = reason_of(error).partition(" For details look at")[0]  # at its report, which is not shown
            raise StartupError(f"{folder}: transformers cannot load it: {reason}") from error
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            check_numbers(f"{folder}: tensor {name}, in {dtype},", parameter)
    model = model.to(device).eval().requires_grad_(False)
    _replace_linears(folder, model, quantization)
    return model, checkpoint


class _Rows(torch.nn.Module):
    """A linear layer of ours where transformers has its own. Of `weight` only dtype and shape can be asked."""

    def __init__(self, run: Callable[[torch.Tensor], torch.Tensor], weight: torch.Tensor) -> None:
        super().__init__()
        self._run = run
        self.weight = weight.to("meta")  # routers look at its dtype; its numbers are kept once, packed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]"""
        y = self._run(x.reshape(-1, x.shape[-1]))
        return y.view(*x.shape[:-1], y.shape[-1])


def _replace_linears(folder: Path, model: Any, quantization: str | None) -> None:
    """Packed or quantised, the head as in our own decoders. StartupError where not all matrices would be quantised."""
    from transformers.pytorch_utils import Conv1D  # GPT-2's linear layer, its weight [in, out]

    linears = {name: module for name, module in model.named_modules() if type(module) in (torch.nn.Linear, Conv1D)}
    if quantization is not None:
        _refuse_other_matrices(folder, model, linears.values())
    head, make_linear, make_head = model.get_output_embeddings(), linear_maker(quantization), head_maker(quantization)
    for name, module in linears.items():
        make = make_head if module is head else make_linear
        bias = None if module.bias is None else module.bias.detach()
        weight = module.weight.detach()
        made = make(weight.T.contiguous() if type(module) is Conv1D else weight, bias)
        model.set_submodule(name, _Rows(made, weight))


def _refuse_other_matrices(folder: Path, model: Any, linears: Iterable[Any]) -> None:
    embeddings = (module for module in model.modules() if isinstance(module, torch.nn.Embedding))
    covered = {id(module.weight) for module in (*linears, *embeddings)}
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and id(parameter) not in covered:
            raise StartupError(
                f"{folder}: --quantization does not cover {name} {list(parameter.shape)}, as in mixtures of experts; "
                "leave it out, or for a draft model give --speculative-draft-model-quantization unquant"
            )


def _check_loaded(folder: Path, model: Any, checkpoint: Checkpoint, found: dict[str, Any]) -> None:
    unused: list[str] = sorted(found.get("unexpected_keys") or ())
    _check_dtypes(model, checkpoint, unused)
    refuse_tensors(folder, sorted(found.get("missing_keys") or ()), f"are missing{_by_type(model)}")
    wrong = [
        f"{name} is {list(stored)}, config.json calls for {list(shape)}"
        for name, stored, shape in sorted(found.get("mismatched_keys") or [])
    ]
    refuse_tensors(folder, wrong, "have the wrong shape")
    warn_of_unused(folder, unused)


def _by_type(model: Any) -> str:
    """What to say of tensors that are missing where the network is not the one that `architectures` names."""
    named, own = getattr(model.config, "architectures", None), type(model).__name__
    if not named or named[0] == own:
        return ""
    return f" (by model_type {model.config.model_type!r} it is a {own}, by architectures a {named[0]})"


def _check_dtypes(model: Any, checkpoint: Checkpoint, unused: list[str]) -> None:
    """StartupError for a weight of 8 bits or an integer: transformers casts it and does not know of its scales."""
    # Old files store masks and positions too.
    no_weights = {*unused, *(name for name, _ in model.named_buffers())}
    patterns = model._keys_to_ignore_on_load_unexpected or ()
    for name in checkpoint.shapes():
        in_model = {name, f"{model.base_model_prefix}.{name}"}  # files of a base model leave its prefix out
        if in_model.isdisjoint(no_weights) and not any(re.search(pattern, name) for pattern in patterns):
            checkpoint.check_dtype(name)


def _dummy(config: Any, dtype: torch.dtype, trust_remote_code: bool) -> tuple[Any, Checkpoint]:
    import transformers

    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=dtype, attn_implementation=NAME, trust_remote_code=trust_remote_code
    )
    checkpoint = DummyCheckpoint({name: tuple(parameter.shape) for name, parameter in model.named_parameters()})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(checkpoint.tensor(name))
    return model, checkpoint
