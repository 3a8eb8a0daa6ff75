"""`longrope` (Phi-3, Phi-4) has two tables of angles, for short sessions and for long ones, and transformers takes one
or the other for all rows of a step, by the farthest of them. Keys are in the cache, and rows of other sessions in the
step, so here one table holds for every session: the second where longer ones are to be served, as in vLLM.
"""

from __future__ import annotations

from typing import Any

import torch

from engine.models.transformers_attention import refuse
from engine.rope_config import ORIGINAL_LENGTH


def hold_long_factors(model: Any, architecture: str) -> int:
    """Has a model of transformers take the second table everywhere; returns the position from which it would itself.

    StartupError for one that keeps its tables in another way.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    begins = 0
    for module in model.modules():
        for layer_type, parameters in _tables(module).items():
            own, of_layer = int(parameters[ORIGINAL_LENGTH]), {"layer_type": layer_type} if layer_type else {}
            begins = max(begins, own)
            inv_freq, _ = ROPE_INIT_FUNCTIONS["longrope"](module.config, None, seq_len=own + 1, **of_layer)
            short = getattr(module, f"{layer_type}_original_inv_freq" if layer_type else "original_inv_freq", None)
            if isinstance(short, torch.Tensor) and short.shape == inv_freq.shape:
                short.copy_(inv_freq)  # if it is not what the module goes by, the decoder's probe fails
    if not begins:
        refuse(architecture, "its longrope tables are not where transformers keeps them; leave --context-length out")
    return begins


def _tables(module: torch.nn.Module) -> dict[str, dict[str, Any]]:
    """The settings of a module's `longrope` tables by the layers' type, which is empty where all have one."""
    kinds, config = getattr(module, "rope_type", None), getattr(module, "config", None)
    parameters: Any = getattr(config, "rope_parameters", None) or {}
    if isinstance(kinds, dict):
        return {layer_type: parameters[layer_type] for layer_type, kind in kinds.items() if kind == "longrope"}
    return {"": parameters} if kinds == "longrope" else {}
