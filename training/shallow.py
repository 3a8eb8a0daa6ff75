"""A shallow copy of the target, and the layer in it that starts by copying.

A model that keeps only a target's first layers has lost the induction heads that stood above them, and its few layers
are slow to learn them again. So the target's first layers and its last are joined by one whose attention is taught to
copy (`looking`): rows know their own token and, from the layers below, what came before it; what they find is added as
the target's own last states would tell it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from engine.models.heads.block import Block, within
from engine.rope import rope_rows
from kernels.norm import rms_norm
from training.attending import RootRows
from training.copying import Copying, slow_places
from training.fitting import Basis, chosen, least_squares
from training.kinds import Kind, source_layers
from training.looking import Lesson, teach
from training.network import linear_layer

# Numbers by which a row's token is brought, as a share of the stream.
_SHARE_BROUGHT = 1 / 3


@torch.no_grad()
def copying_layer(kind: Kind, basis: Basis) -> dict[str, torch.Tensor]:
    """The attention that copies, over the layers below it, and its layer's own outputs made small; nothing for a copy
    without such a layer. What is brought must tell in the target's stream.
    """
    block = kind.config.block
    sources = source_layers(basis.num_target_layers, block.num_layers)
    if None not in sources:
        return {}
    index, conversations = sources.index(None), basis.conversations
    rows = [_entering(kind, index, basis.tensors, one.embedded) for one in conversations]
    counts = [torch.cat([one.wanted[1:], one.wanted.new_zeros(1)]) for one in conversations]
    lessons = [
        Lesson(row[:-1], one.tokens[:-1], one.tokens[1:], count[:-1])
        for row, one, count in zip(rows, conversations, counts, strict=True)
        if len(row) > 1
    ]
    taught = teach(lessons, len(slow_places(block)), seed=basis.seed)
    clean = [one.last / basis.final_norm for one in conversations]
    # What the target had in mind before a token, from the row of that token.
    told, _ = least_squares(
        chosen([row[1:] for row in rows], [count[:-1] for count in counts]),
        chosen([one[:-1] for one in clean], [count[:-1] for count in counts]),
    )
    left, _, _ = torch.linalg.svd(told, full_matrices=False)
    value = left[:, : max(1, round(_SHARE_BROUGHT * block.hidden_size))].T @ told
    copying = Copying.taught(block, taught.query, taught.key, value)
    rope = rope_rows(block, max(len(row) for row in rows))
    inputs = [torch.cat([row, copying.found(row, rope[: len(row)])], dim=1) for row in rows]
    guess, _ = least_squares(chosen(inputs, counts), chosen(clean, counts) * basis.stream_size)
    found = _grouped(kind, copying.projections(guess[:, block.hidden_size :], block.num_kv_heads))
    prefix = f"model.layers.{index}."
    return basis.completed({f"{prefix}self_attn.{name}.weight": tensor for name, tensor in found.items()}, prefix)


def _entering(kind: Kind, index: int, tensors: Mapping[str, torch.Tensor], embedded: torch.Tensor) -> torch.Tensor:
    """Rows [L, hidden] as the attention of layer `index` reads them, its norm's weights being one."""
    block, x = kind.config.block, embedded
    rope, attend = rope_rows(block, len(x)), RootRows(1, index, block.windows).attend
    for layer in range(index):
        x = Block(block, layer, within(dict(tensors), f"model.layers.{layer}."), linear_layer)(x, rope, attend)
    return rms_norm(x, torch.ones(block.hidden_size), block.rms_eps)


def _grouped(kind: Kind, heads: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Heads for queries that share keys: all ask the same, and the first of each group passes on what was found."""
    block = kind.config.block
    groups, size = block.num_heads // block.num_kv_heads, block.head_dim
    query = heads["q_proj"].unflatten(0, (-1, size)).repeat_interleave(groups, dim=0).flatten(0, 1)
    output = torch.zeros(block.hidden_size, block.num_kv_heads, groups, size)
    output[:, :, 0] = heads["o_proj"].unflatten(1, (-1, size))
    return heads | {"q_proj": query, "o_proj": output.flatten(1)}
