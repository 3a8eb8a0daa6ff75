"""What drafting ahead goes along: where a session stands, paths of the tree that is being verified, and their ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from draft_service.drafters.features import Piece
from draft_service.drafters.kv import CacheRows
from draft_service.drafters.models import Tip
from outrider.wire import Ids


@dataclass(slots=True, eq=False)  # not frozen: there is one a session and round, and those take twice as long to make
class Behind:
    """A sequence's newest tokens, whose rows were not run: int32 [n].

    inputs: gives what a head goes on from, once: the target's rows [n, width], or states of its own [n, hidden].
    done: told the last row's tip.
    """

    words: Ids
    inputs: Callable[[], Piece | None]
    done: Callable[[Tip], None]
    are_states: bool = False


@dataclass(slots=True, eq=False)
class Start:
    """A session's rows; the newest committed one's tip, or what must be run to have it."""

    rows: CacheRows
    tip: Tip | None
    behind: Behind | None = None

    @property
    def num_behind(self) -> int:
        """Rows of committed tokens that were not run."""
        return 0 if self.behind is None else len(self.behind.words)


@dataclass(slots=True, eq=False)
class Trunk:
    """A path of request number `request`: its nodes, their rows on a fork, and tips by depth, the root's first."""

    request: int
    nodes: list[int]
    rows: CacheRows
    start: Start
    tips: list[Tip]

    @property
    def num_below(self) -> int:
        """Rows before the path's."""
        return self.start.rows.num_rows

    @property
    def num_run(self) -> int:
        """Nodes of the path that were run; -1 where the root was not."""
        return len(self.tips) - 1


@dataclass(slots=True, eq=False)
class End:
    """Where acceptance may end: at depth `depth` of a trunk, with `chance`."""

    trunk: Trunk
    depth: int
    chance: float


def trunks_of(paths: Sequence[list[int]], count: int) -> list[list[int]]:
    """At most `count` of the paths, likeliest first, that hold as many others as they can; each at its longest."""
    trunks: list[list[int]] = []
    for path in paths:
        for index, trunk in enumerate(trunks):
            shared = min(len(trunk), len(path))
            if trunk[:shared] == path[:shared]:
                trunks[index] = max(trunk, path, key=len)
                break
        else:
            if len(trunks) < count:
                trunks.append(path)
    return trunks
