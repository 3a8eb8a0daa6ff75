"""One reference per session: transformers' answers cost more than ours."""

from __future__ import annotations

import pytest

from tests.e2e import reference

NUM_PROMPTS = 9
MAX_TOKENS = 40


@pytest.fixture(scope="session")
def greedy_answers() -> list[tuple[list[int], reference.Answer]]:
    """Prompt ids of MT-bench questions with transformers' fp32 greedy answers."""
    prompts = [reference.prompt_ids(text) for text in reference.questions(NUM_PROMPTS)]
    return [(prompt, reference.greedy(prompt, MAX_TOKENS)) for prompt in prompts]
