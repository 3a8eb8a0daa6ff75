"""Heads once more, from the papers' equations: whole sequences, dense attention, no cache, tensors by their own names.

Shares no code with engine/models/heads. A sequence is rows (token i + 1, state of position i) at positions 0, 1, ...
"""

from __future__ import annotations

import torch

from tests.engine.heads.make import CONFIG, HEAD_DIM, HEADS, KV_HEADS, Tensors, Written


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + CONFIG["rms_norm_eps"]).sqrt() * weight


def rotate(x: torch.Tensor) -> torch.Tensor:
    """x [T, heads, d]: pair (j, j + d/2) of row p turns by p * theta ** (-2 j / d)."""
    half = x.shape[-1] // 2
    angle = torch.arange(len(x))[:, None] * CONFIG["rope_theta"] ** (-torch.arange(half) / half)
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]
    turned = torch.complex(x[..., :half], x[..., half:]) * turn
    return torch.cat([turned.real, turned.imag], dim=-1)


def attend(x: torch.Tensor, w: Tensors) -> torch.Tensor:
    """Causal attention of rows x."""

    def heads(name: str, count: int) -> torch.Tensor:
        y = x @ w[f"self_attn.{name}_proj.weight"].T + w.get(f"self_attn.{name}_proj.bias", 0.0)
        y = y.view(len(x), count, HEAD_DIM)
        return rms(y, w[f"self_attn.{name}_norm.weight"]) if f"self_attn.{name}_norm.weight" in w else y

    q, k, v = rotate(heads("q", HEADS)), rotate(heads("k", KV_HEADS)), heads("v", KV_HEADS)
    out = []
    for head in range(HEADS):
        group = head // (HEADS // KV_HEADS)
        scores = q[:, head] @ k[:, group].T / HEAD_DIM**0.5
        hidden = torch.ones_like(scores).triu(1).bool()
        out.append(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v[:, group])
    return torch.cat(out, dim=-1) @ w["self_attn.o_proj.weight"].T


def mlp(x: torch.Tensor, w: Tensors, norm: str = "post_attention_layernorm.weight") -> torch.Tensor:
    y = rms(x, w[norm])
    gate = y @ w["mlp.gate_proj.weight"].T
    return x + (gate * gate.sigmoid() * (y @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T


def block(x: torch.Tensor, w: Tensors, norm: str = "post_attention_layernorm.weight") -> torch.Tensor:
    """A whole decoder layer."""
    return mlp(x + attend(rms(x, w["input_layernorm.weight"]), w), w, norm)


def part(written: Written, prefix: str) -> Tensors:
    return {k.removeprefix(prefix): v for k, v in written.tensors.items() if k.startswith(prefix)}


class Reference:
    """rows(tokens [T], states [T, H]) -> outputs [T, H]; logits(outputs); fuse(features); carried(outputs)."""

    def __init__(self, written: Written, target: Written) -> None:
        self.w = written.tensors
        self.written = written
        shared = target.tensors
        self.embedding = shared["model.embed_tokens.weight"]
        self.target_head = shared.get("lm_head.weight", self.embedding)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        return features

    def rows(self, tokens: torch.Tensor, states: torch.Tensor, stage: int = 0) -> torch.Tensor:
        raise AssertionError

    def carried(self, outputs: torch.Tensor) -> torch.Tensor:
        return outputs

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        return outputs @ self.target_head.T

    def token(self, index: int) -> int:
        """The target's id of a logit's index."""
        return index

    def next_logits(self, tokens: list[int], features: torch.Tensor, drafted: list[int]) -> torch.Tensor:
        """Logits [len(drafted) + 1, drafted vocab]: what the head says after `tokens`, then after each draft.

        features [len(tokens) - 1, width]: of positions 0 to len(tokens) - 2. Everything is computed again each time.
        """
        states = self.fuse(features)
        outputs = self.rows(torch.tensor(tokens[1:]), states)
        said = [self.logits(outputs[-1])]
        for count in range(1, len(drafted) + 1):
            states = torch.cat([states, self.carried(outputs[-1:])])
            outputs = self.rows(torch.tensor(tokens[1:] + drafted[:count]), states)
            said.append(self.logits(outputs[-1]))
        return torch.stack(said)


class Eagle(Reference):
    def rows(self, tokens: torch.Tensor, states: torch.Tensor, stage: int = 0) -> torch.Tensor:
        x = torch.cat([self.embedding[tokens], states], -1) @ self.w["fc.weight"].T + self.w.get("fc.bias", 0.0)
        first = part(self.written, "layers.0.")
        x = mlp(x + attend(x, first), first)
        for index in range(1, self.written.config["num_hidden_layers"]):
            x = block(x, part(self.written, f"layers.{index}."))
        return x


class Eagle3(Reference):
    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        if "input_norm.weight" in self.w:
            features = rms(features, self.w["input_norm.weight"])
        if "fc_norm.0.weight" in self.w:
            width = self.embedding.shape[1]
            pieces = [
                rms(features[:, i * width : (i + 1) * width], self.w[f"fc_norm.{i}.weight"])
                for i in range(features.shape[1] // width)
            ]
            features = torch.cat(pieces, -1)
        return features @ self.w["fc.weight"].T + self.w.get("fc.bias", 0.0)

    def rows(self, tokens: torch.Tensor, states: torch.Tensor, stage: int = 0) -> torch.Tensor:
        first = part(self.written, "midlayer.") or part(self.written, "layers.0.")
        hidden = rms(states, first["hidden_norm.weight"])
        both = torch.cat([rms(self.embedding[tokens], first["input_layernorm.weight"]), hidden], -1)
        residual = hidden if self.written.config.get("norm_before_residual") else states
        x = mlp(residual + attend(both, first), first)
        for index in range(1, self.written.config["num_hidden_layers"]):
            x = block(x, part(self.written, f"layers.{index}."))
        return x

    def carried(self, outputs: torch.Tensor) -> torch.Tensor:
        return rms(outputs, self.w["norm.weight"]) if self.written.config.get("norm_output") else outputs

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        return rms(outputs, self.w["norm.weight"]) @ self.w.get("lm_head.weight", self.target_head).T

    def token(self, index: int) -> int:
        return index + int(self.w["d2t"][index]) if "d2t" in self.w else index


class NextN(Reference):
    prefix = f"model.layers.{8}."

    def rows(self, tokens: torch.Tensor, states: torch.Tensor, stage: int = 0) -> torch.Tensor:
        w = part(self.written, self.prefix)
        pair = [rms(self.embedding[tokens], w["enorm.weight"]), rms(states, w["hnorm.weight"])]
        return rms(block(torch.cat(pair, -1) @ w["eh_proj.weight"].T, w), w["shared_head.norm.weight"])


class Mimo(Reference):
    def rows(self, tokens: torch.Tensor, states: torch.Tensor, stage: int = 0) -> torch.Tensor:
        w = part(self.written, "model.mtp_layers.0.")
        embedded = self.embedding[tokens]
        embedded = torch.cat([torch.zeros_like(embedded[:1]), embedded[1:]])
        pair = [rms(states, w["hidden_layernorm.weight"]), rms(embedded, w["token_layernorm.weight"])]
        return rms(block(torch.cat(pair, -1) @ w["input_proj.weight"].T, w), w["final_layernorm.weight"])


class MultiLayer(Reference):
    def rows(self, tokens: torch.Tensor, states: torch.Tensor, stage: int = 0) -> torch.Tensor:
        w = part(self.written, f"model.mtp.layers.{stage}.")
        pair = [rms(self.embedding[tokens], w["enorm.weight"]), rms(states, w["hnorm.weight"])]
        x = torch.cat(pair, -1) @ w["eh_proj.weight"].T
        return rms(block(x, w, "pre_mlp_layernorm.weight"), w["final_layernorm.weight"])

    def chain(self, tokens: list[int], features: torch.Tensor, num_stages: int) -> list[int]:
        """The greedy drafts: stage i reads the tokens shifted by i + 1, the drafts so far at their end."""
        words, drafted = tokens[1:], []
        for stage in range(num_stages):
            logits = self.logits(self.rows(torch.tensor(words), features, stage)[-1])
            drafted.append(int(logits.argmax()))
            words = [*words[1:], drafted[-1]]
        return drafted
