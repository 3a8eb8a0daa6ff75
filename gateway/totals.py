"""What a request's answers add up to, kept as they grow: to tell it costs the same however many choices there are."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.speculation_count import SpeculationCount


@dataclass(slots=True)
class Totals:
    """Counts of all choices of all prompts of a request so far."""

    prompt_tokens: int = 0  # each prompt once, whatever its number of choices
    predicted_tokens: int | None = None  # once for each choice; None where nothing was predicted
    cached_tokens: int = 0
    completion_tokens: int = 0
    accepted_prediction_tokens: int = 0
    speculation: SpeculationCount = field(default_factory=SpeculationCount)
