"""What a request or a flag may ask of a draft tree: how large it can be, and how large it may be wished."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.errors import InvalidArgument

if TYPE_CHECKING:
    from outrider.v1 import common_pb2

MAX_WISH = 4096  # steps, branches or nodes
WISHES = ("num_steps", "topk", "num_draft_tokens")


def most_nodes(num_steps: int, topk: int) -> int:
    """Nodes that a tree of so many steps and branches can have, the root aside."""
    return topk + (num_steps - 1) * topk**2


def check_wishes(params: common_pb2.SpeculativeParams, most: int) -> None:
    """InvalidArgument for a wish that no tree fulfils, or above `most`."""
    for name, least in zip(WISHES, (1, 1, 2), strict=True):  # the root is a draft token too
        value = getattr(params, name)
        if params.HasField(name) and not least <= value <= most:
            raise InvalidArgument(
                f"speculative.{name} is {value}; it must be from {least} to {most}", field=f"speculative.{name}"
            )
