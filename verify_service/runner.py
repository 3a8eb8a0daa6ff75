"""What the engine's loop needs of a model: logits for a step's rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batch import Segment


class Runner(Protocol):
    """The forward pass (engine.runner.ModelRunner, or a fake of it)."""

    slot_table: NDArray[np.int32]

    @property
    def likeliest(self) -> list[int] | None:
        """The index of each row's highest logit in the last step, the lower of equal ones.

        -1 where that is not finite, or the row has a NaN. None where the model does not look for it.
        """
        ...

    @property
    def features(self) -> torch.Tensor | None:
        """The feature plane [num_slots, width]."""
        ...

    def forward(self, segments: Sequence[Segment]) -> torch.Tensor:
        """Logits float32 [sum of num_logits, vocab]; KV and features go to the segments' slots."""
        ...
