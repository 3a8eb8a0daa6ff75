"""Where a head's training starts: the best linear guess at the target's next state, in place of a layer that must first
find out what its inputs are for.

Least squares tell the next state from the token's embedding e and the state s before it: s' = A e + B s. EAGLE's and
NextN's first matrices are that guess. EAGLE-3's layer makes it in its attention, where rows attend to themselves above
all. What heads that copy bring (`copying`) is part of what is fitted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import torch

from engine.config import ModelConfig
from engine.models.heads.names import OUTPUT_HEAD
from engine.rope import rope_rows
from engine.tensors import EMBEDDING
from kernels.norm import rms_norm
from training.batches import Batch
from training.copying import Carried, Copying, marks_beside, slow_places
from training.kinds import EAGLE, Kind
from training.looking import Lesson, teach
from training.target_states import States, TargetStates, tensor_of

FITTED_TOKENS = 100_000
_RIDGE = 1e-3
# Logit of a row's attention to itself, about 0 for others.
_OWN_LOGIT = 14.0
# Of what the layer adds beside the guess.
LAYER_SHARE = 0.1


class Conversation(NamedTuple):
    """A conversation as the target reads it, fp32."""

    tokens: torch.Tensor
    """int64 [L]"""
    embedded: torch.Tensor
    """[L, hidden]: rows of its embedding."""
    features: torch.Tensor
    """[L, width]: what a head reads of its states."""
    last: torch.Tensor
    """[L, hidden]: states before the output head."""
    wanted: torch.Tensor
    """bool [L]: tokens that the target wrote."""

    @property
    def counted(self) -> torch.Tensor:
        """bool [L - 1]: row s, of state s and token s + 1, tells of state s + 1; counts where the target wrote that."""
        return self.wanted[1:]


class Basis:
    """Data that a kind's tensors are fitted to. tensors: those that it has without, fp32; all is on the CPU.

    stream_size: of the target's stream before its final norm (root mean square).
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], target: TargetStates, batches: Iterable[tuple[Batch, States]], *,
        stream_size: float, seed: int,
    ) -> None:  # fmt: skip
        self.tensors, self.stream_size, self.seed = tensors, stream_size, seed
        self.num_target_layers = target.config.num_layers
        self._target, self._batches = target, batches

    @cached_property
    def conversations(self) -> list[Conversation]:
        """Conversations of the first batches, which the target reads only when this is asked for."""
        return list(conversations_of(self._batches, self._target.vocabulary_rows(EMBEDDING)))

    @cached_property
    def final_norm(self) -> torch.Tensor:
        """[hidden]: the target's."""
        return tensor_of(self._target.folder, "model.norm.weight", self._target.load_format).float()

    def completed(self, found: dict[str, torch.Tensor], prefix: str = "") -> dict[str, torch.Tensor]:
        """Adds the other outputs of the layers whose names begin so, made small beside what was found."""
        outputs = ("o_proj.weight", "down_proj.weight")
        small = [name for name in self.tensors if name.startswith(prefix) and name.endswith(outputs)]
        return {name: self.tensors[name] * LAYER_SHARE for name in small} | found


@torch.no_grad()
def fitted(kind: Kind, basis: Basis) -> dict[str, torch.Tensor]:
    """Tensors of a head, fp32, and its layer's own outputs made small."""
    return basis.completed((_beside if kind.has_output_head else _joined)(kind, basis))


def _joined(kind: Kind, basis: Basis) -> dict[str, torch.Tensor]:
    """EAGLE's and NextN's: the first matrix joins embedding and state, and makes the guess and the row's marks."""
    conversations, final_norm, seed = basis.conversations, basis.final_norm, basis.seed
    block, counted = kind.config.block, [one.counted for one in conversations]
    is_eagle = kind.algorithm == EAGLE
    normed = [_normed(kind, one.embedded) for one in conversations]
    embedded = [one.embedded for one in conversations] if is_eagle else normed
    before = [one.features if is_eagle else _normed(kind, one.features) for one in conversations]
    clean = [one.last if is_eagle else one.last / final_norm for one in conversations]
    pairs = [torch.cat([e[1:], s[:-1]], dim=1) for e, s in zip(embedded, before, strict=True)]
    after = chosen([one[1:] for one in clean], counted)
    prefix, joins = ("layers.0.", "fc.weight") if is_eagle else ("0.", "0.eh_proj.weight")
    if not kind.num_copying:
        join, share = least_squares(chosen(pairs, counted), after)
        return {joins: join} | ({} if is_eagle else {"0.norm.weight": final_norm * share})
    size = min(len(slow_places(block)), block.hidden_size // 4)
    taught = teach(_lessons(pairs, conversations), size, seed=seed)
    carried = Carried.choose(taught, chosen(pairs, counted), chosen([one[:-1] for one in clean], counted))
    guess, _ = least_squares(chosen(pairs, counted), carried.without(after))
    join = guess + carried.directions @ carried.made
    streams = [one @ join.T for one in pairs]
    stream = chosen(streams, counted)
    rows = streams
    if not is_eagle:
        rows = [_normed(kind, one) for one in streams]
        carried = carried.scaled(float(stream.square().mean(dim=1).sqrt().mean()))
    attention, added = _attention(kind, Copying.within(block, carried), rows, counted, after - stream, seed)
    found = {joins: join} | {f"{prefix}self_attn.{name}.weight": tensor for name, tensor in attention.items()}
    if is_eagle:
        return found
    one = torch.ones_like(final_norm)
    return found | {"0.input_layernorm.weight": one, "0.norm.weight": final_norm * _cosine(stream + added, after)}


def _lessons(pairs: list[torch.Tensor], conversations: list[Conversation]) -> list[Lesson]:
    """Row s brings token s + 1 and wants token s + 2."""
    return [
        Lesson(rows[:-1], one.tokens[1:-1], one.tokens[2:], one.wanted[2:])
        for rows, one in zip(pairs, conversations, strict=True)
        if len(rows) > 2
    ]


def _beside(kind: Kind, basis: Basis) -> dict[str, torch.Tensor]:
    """EAGLE-3's: the attention makes the guess. The final norm's weights go into the output head's rows, which do not
    see marks either: the head's outputs carry those on to the rows drafted next.
    """
    conversations, final_norm, seed = basis.conversations, basis.final_norm, basis.seed
    block, counted = kind.config.block, [one.counted for one in conversations]
    embedded = [_normed(kind, one.embedded) for one in conversations]
    features = [one.features for one in conversations]
    if "fc_norm.0.weight" in kind.config.shapes():
        features = [_normed(kind, one.unflatten(1, (-1, block.hidden_size))).flatten(1) for one in features]
    clean = [one.last / final_norm for one in conversations]
    wanted, marks, heads = clean, None, basis.tensors[OUTPUT_HEAD] * final_norm
    if kind.num_copying:
        marks = marks_beside(block, torch.cat(embedded), torch.cat(clean), seed)
        wanted = [marks.marked(*pair) for pair in zip(clean, embedded, strict=True)]
        heads = marks.without(heads)
    # A conversation's first state is like no other.
    narrow, _ = least_squares(torch.cat([one[1:] for one in features]), torch.cat([one[1:] for one in wanted]))
    states = [one @ narrow.T for one in features]
    rows = [torch.cat([e[1:], _normed(kind, s[:-1])], dim=1) for e, s in zip(embedded, states, strict=True)]
    state = chosen([one[:-1] for one in states], counted)
    target = chosen([one[1:] for one in wanted], counted) - state
    copying = None if marks is None else Copying.beside(block, marks)
    attention, added = _attention(kind, copying, rows, counted, target, seed)
    guess, after = state + added, chosen([one[1:] for one in clean], counted)
    share = _cosine(guess if marks is None else marks.without(guess), after)
    return {
        "fc.weight": narrow, "layers.0.hidden_norm.weight": torch.ones_like(final_norm),
        "norm.weight": torch.full_like(final_norm, share), OUTPUT_HEAD: heads,
    } | {f"layers.0.self_attn.{name}.weight": tensor for name, tensor in attention.items()}  # fmt: skip


def _attention(
    kind: Kind, copying: Copying | None, rows: list[torch.Tensor], counted: list[torch.Tensor],
    wanted: torch.Tensor, seed: int,
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:  # fmt: skip
    """Projections that add `wanted` to the rows that count as well as they can, and what they add.

    rows: what the attention reads, by conversation.
    """
    block, width = kind.config.block, rows[0].shape[1]
    inputs = rows
    if copying is not None:
        rope = rope_rows(block, max(len(one) for one in rows))
        inputs = [torch.cat([one, copying.found(one, rope[: len(one)])], dim=1) for one in rows]
    counting = chosen(inputs, counted)
    matrix, _ = least_squares(counting, wanted)
    parts = [_own_rows(block, matrix[:, :width], block.num_heads - kind.num_copying, torch.cat(rows), seed)]
    if copying is not None:
        parts.append(copying.projections(matrix[:, width:], kind.num_copying))
    joined = {name: torch.cat([part[name] for part in parts], dim=int(name == "o_proj")) for name in parts[0]}
    return joined, counting @ matrix.T


def conversations_of(batches: Iterable[tuple[Batch, States]], embedding: torch.Tensor) -> Iterator[Conversation]:
    """Cuts batches into conversations until FITTED_TOKENS tokens are the target's own. embedding: [vocab, hidden]."""
    count = 0
    for batch, states in batches:
        for row, length in enumerate(batch.lengths.tolist()):
            tokens, wanted = batch.tokens[row, :length].cpu(), batch.wanted[row, :length].cpu()
            features, last = states.features[row, :length].cpu().float(), states.last[row, :length].cpu().float()
            yield Conversation(tokens, embedding[tokens].float(), features, last, wanted)
            count += int(wanted.sum())
        if count >= FITTED_TOKENS:
            return


def chosen(parts: Sequence[torch.Tensor], masks: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows [T, width] of conversations' parts that their masks let pass."""
    return torch.cat([part[mask] for part, mask in zip(parts, masks, strict=True)])


def _normed(kind: Kind, rows: torch.Tensor) -> torch.Tensor:
    return rms_norm(rows, torch.ones(rows.shape[-1]), kind.config.block.rms_eps)


def least_squares(inputs: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, float]:
    """The matrix [outputs, inputs] that guesses `wanted` best, and the cosine of its guesses with it."""
    gram = inputs.T @ inputs
    gram.diagonal().add_(_RIDGE * gram.diagonal().mean())
    matrix = torch.linalg.solve(gram, inputs.T @ wanted).T.contiguous()
    return matrix, _cosine(inputs @ matrix.T, wanted)


def _cosine(guess: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((guess * wanted).sum() / guess.norm() / wanted.norm())


def _own_rows(
    block: ModelConfig, added: torch.Tensor, num_heads: int, rows: torch.Tensor, seed: int
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Projections of the first `num_heads` heads, which make `added` of a row's own numbers.

    Queries and keys are one random projection of what begins the rows [T, width], so each row is most like itself.
    """
    hidden, size = block.hidden_size, block.head_dim
    groups = block.num_heads // block.num_kv_heads
    num_kv_heads = num_heads // groups
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randn((num_kv_heads * size, hidden), generator=generator)
    mean = rows[:, :hidden].mean(dim=0)
    shared -= torch.outer(shared @ mean, mean) / mean.dot(mean)
    length = (rows[:, :hidden] @ shared.T).square().sum(dim=1).mean() / num_kv_heads
    shared *= (_OWN_LOGIT * size**0.5 / length) ** 0.5
    keys = torch.nn.functional.pad(shared, (0, rows.shape[1] - hidden))
    left, sizes, right = torch.linalg.svd(added, full_matrices=False)
    rank = min(len(sizes), num_kv_heads * size)
    values = torch.zeros_like(keys)
    values[:rank] = sizes[:rank, None].sqrt() * right[:rank]
    columns = torch.zeros(hidden, num_kv_heads * size)
    columns[:, :rank] = left[:, :rank] * sizes[:rank].sqrt()
    # Heads that share values: the first of them passes them on.
    output = torch.zeros(hidden, num_kv_heads, groups, size)
    output[:, :, 0] = columns.unflatten(1, (num_kv_heads, size))
    queries = keys.unflatten(0, (num_kv_heads, size)).repeat_interleave(groups, dim=0).flatten(0, 1)
    return {"q_proj": queries, "k_proj": keys, "v_proj": values, "o_proj": output.flatten(1)}
