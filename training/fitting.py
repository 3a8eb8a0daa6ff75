"""Where a head's training starts: the best linear guess at the target's next state, in place of a layer that must first
find out what its inputs are for.

From the token's embedding e and the state s before it, least squares tell the next state: s' = A e + B s. EAGLE's and
NextN's first matrices are that guess. EAGLE-3's layer makes it in its attention: queries and keys are one projection of
the embedding, so that each row attends to itself above all, and values and output matrix are A and B.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from engine.config import ModelConfig
from kernels.norm import rms_norm
from training.batches import Batch
from training.kinds import EAGLE, EAGLE3, Kind
from training.target_states import States

FITTED_TOKENS = 30_000
_RIDGE = 1e-3
# Logit of a row's attention to itself, about 0 for others.
_OWN_LOGIT = 10.0
# Of what the layer adds beside the guess.
LAYER_SHARE = 0.1


@torch.no_grad()
def fitted(
    kind: Kind, batches: Iterable[tuple[Batch, States]], embedding: torch.Tensor, final_norm: torch.Tensor, *, seed: int
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Tensors of a head of `kind`, fp32, fitted to at most FITTED_TOKENS tokens of the target's answers.

    embedding [vocab, hidden], final_norm [hidden]: the target's, on the CPU, where all of this is computed.
    """
    embedded, features, before, after = _rows(kind, batches, embedding)
    eps = kind.config.block.rms_eps
    if kind.algorithm == EAGLE:
        guess, _ = _least_squares(torch.cat([embedded, features], dim=1), after)
        return {"fc.weight": guess}
    one = torch.ones_like(final_norm)
    embedded = rms_norm(embedded, one, eps)
    after = after / final_norm
    if kind.algorithm != EAGLE3:
        guess, share = _least_squares(torch.cat([embedded, rms_norm(features, one, eps)], dim=1), after)
        return {"0.eh_proj.weight": guess, "0.norm.weight": final_norm * share}
    if "fc_norm.0.weight" in kind.config.shapes():
        features = rms_norm(features.unflatten(1, (-1, len(one))), one, eps).flatten(1)
    narrow, _ = _least_squares(features, before / final_norm)
    states = features @ narrow.T
    inputs = torch.cat([embedded, rms_norm(states, one, eps)], dim=1)
    added, _ = _least_squares(inputs, after - states)
    guess = states + inputs @ added.T
    share = float((guess * after).sum() / guess.norm() / after.norm())
    own = _attention(kind.config.block, added, seed)
    return {"fc.weight": narrow, "norm.weight": final_norm * share} | {
        f"layers.0.self_attn.{name}.weight": tensor for name, tensor in own.items()
    }


def _rows(
    kind: Kind, batches: Iterable[tuple[Batch, States]], embedding: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of tokens in answers: their embeddings, the features before them, and the last states before and at them."""
    found: list[list[torch.Tensor]] = []
    count = 0
    for batch, states in batches:
        # A conversation's last token has no state.
        there = batch.wanted & (
            torch.arange(batch.tokens.shape[1], device=batch.tokens.device) < batch.lengths[:, None] - 1
        )
        feature, last = states.features.roll(1, dims=1)[there], states.last.roll(1, dims=1)[there]
        found.append([embedding[batch.tokens[there].cpu()], feature.cpu(), last.cpu(), states.last[there].cpu()])
        count += len(last)
        if count >= FITTED_TOKENS:
            break
    embedded, features, before, after = (torch.cat(parts).float() for parts in zip(*found, strict=True))
    return embedded, features, before, after


def _least_squares(inputs: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, float]:
    """The matrix [outputs, inputs] that guesses `wanted` best, and the cosine of its guesses with it."""
    gram = inputs.T @ inputs
    gram.diagonal().add_(_RIDGE * gram.diagonal().mean())
    matrix = torch.linalg.solve(gram, inputs.T @ wanted).T.contiguous()
    guess = inputs @ matrix.T
    return matrix, float((guess * wanted).sum() / guess.norm() / wanted.norm())


def _attention(block: ModelConfig, added: torch.Tensor, seed: int) -> dict[str, torch.Tensor]:
    """Projections [.., 2 * hidden] that make `added` of a row's own [embedding, state]."""
    hidden, size = block.hidden_size, block.head_dim
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randn((block.num_kv_heads, size, hidden), generator=generator)
    # Rows of normed embeddings, hidden in squared length: shared @ e has size * hidden.
    shared *= (_OWN_LOGIT * size**0.5 / (size * hidden)) ** 0.5
    groups = block.num_heads // block.num_kv_heads
    queries = shared.repeat_interleave(groups, dim=0).flatten(0, 1)
    zeros = torch.zeros_like(queries)
    left, sizes, right = torch.linalg.svd(added, full_matrices=False)
    rank = min(len(sizes), block.num_kv_heads * size)
    values = torch.zeros(block.num_kv_heads * size, 2 * hidden)
    values[:rank] = sizes[:rank, None].sqrt() * right[:rank]
    columns = torch.zeros(hidden, block.num_kv_heads * size)
    columns[:, :rank] = left[:, :rank] * sizes[:rank].sqrt()
    # Heads that share values: the first of them passes them on.
    output = torch.zeros(hidden, block.num_kv_heads, groups, size)
    output[:, :, 0] = columns.unflatten(1, (block.num_kv_heads, size))
    return {
        "q_proj": torch.cat([queries, zeros], dim=1),
        "k_proj": torch.cat([shared.flatten(0, 1), zeros[: shared.shape[0] * size]], dim=1),
        "v_proj": values,
        "o_proj": output.flatten(1),
    }
