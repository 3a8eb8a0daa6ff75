"""The greedy answers of `transformers` to MT-bench prompts, and how close each choice was."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.model_folder import resolve_model
from training.args import MT_BENCH

# A matrix product's last bits depend on how many rows go together: a first difference is excused where the reference
# saw the two likeliest tokens this close, and at most once in this many tokens.
EXCUSED_MARGIN = 1e-5
TOKENS_PER_EXCUSE = 10_000


def questions(count: int) -> list[str]:
    """First turns of MT-bench, spread over the categories."""
    turns = [json.loads(line)["turns"][0] for line in MT_BENCH.read_text(encoding="utf-8").splitlines()]
    return turns[:: len(turns) // count][:count]


@functools.cache
def tokenizer():
    """The embedded model's tokenizer, by transformers."""
    return AutoTokenizer.from_pretrained(resolve_model(None), local_files_only=True)


@functools.cache
def model() -> Any:
    """The embedded model in fp32, by transformers."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(resolve_model(None), dtype=torch.float32, local_files_only=True)
    return loaded.eval()


def prompt_ids(text: str) -> list[int]:
    """Ids of one user turn through the chat template."""
    ids = tokenizer().apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=True, return_dict=True
    )
    return list(ids["input_ids"])


@dataclass(frozen=True)
class Answer:
    """A greedy answer: its ids, with the end id, and the gap between the two largest logits at each."""

    ids: list[int]
    margins: list[float]


def greedy(prompt: list[int], max_tokens: int) -> Answer:
    """The answer of transformers' own greedy `generate` in fp32."""
    with torch.inference_mode():
        output = model().generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False, max_new_tokens=max_tokens, output_logits=True, return_dict_in_generate=True,
            pad_token_id=tokenizer().eos_token_id,
        )  # fmt: skip
    tops = [logits[0].topk(2).values for logits in output.logits]
    return Answer(output.sequences[0, len(prompt) :].tolist(), [float(top[0] - top[1]) for top in tops])


class Comparison:
    """The count of tokens and of excused differences over a whole test."""

    def __init__(self) -> None:
        self.tokens = 0
        self.excused = 0

    def check(self, ours: list[int], reference: Answer) -> None:
        """Compares token for token; excuses a first difference only at a recorded tie."""
        self.tokens += len(ours)
        first = next((i for i, pair in enumerate(zip(ours, reference.ids, strict=False)) if pair[0] != pair[1]), None)
        if first is None:
            assert len(ours) == len(reference.ids)
            return
        margin = reference.margins[first]
        assert margin < EXCUSED_MARGIN, f"token {first} is {ours[first]}, not {reference.ids[first]}; margin {margin}"
        self.excused += 1

    def finish(self) -> None:
        """Fails where too many differences were excused."""
        assert self.excused <= self.tokens / TOKENS_PER_EXCUSE, f"{self.excused} in {self.tokens} tokens"
