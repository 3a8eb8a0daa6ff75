"""What a route calls the fields of a request, so that complaints name what its caller sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Names:
    """What a route calls its fields: `renamed` has its names of SamplingFields and `max_tokens` where they differ;
    `inside` is the path, with its dot, of the object in the body that these stand in."""

    renamed: Mapping[str, str] = field(default_factory=dict)
    inside: str = ""

    def word(self, name: str) -> str:
        """A field's name as messages have it."""
        return self.renamed.get(name, name)

    def path(self, name: str) -> str:
        """A field's name as `param` has it; `name` may go on with an index."""
        bare, bracket, index = name.partition("[")
        return f"{self.inside}{self.word(bare)}{bracket}{index}"
