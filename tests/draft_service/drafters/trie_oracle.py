"""The n-gram trie's rules on plain dictionaries: slow, obvious, and what the compiled one must equal."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from draft_service.drafters.trie import MatchRules

Path = tuple[int, ...]  # root first, then tokens


@dataclass
class Oracle:
    """`uses` holds every path but the roots, newest first; `children` the tokens below a path, most recent first."""

    capacity: int
    branch_length: int
    min_match: int
    freq: dict[Path, int] = field(default_factory=dict)
    uses: list[Path] = field(default_factory=list)
    children: dict[Path, list[int]] = field(default_factory=dict)
    roots: set[int] = field(default_factory=set)
    kept: set[int] = field(default_factory=set)

    @property
    def num_nodes(self) -> int:
        return len(self.uses) + len(self.roots)

    def add_root(self, root: int, *, kept: bool) -> None:
        self._evict(1)
        self.roots.add(root)
        if kept:
            self.kept.add(root)

    def drop(self, root: int) -> None:
        self.roots.discard(root)
        self.kept.discard(root)
        for path in [path for path in self.uses if path[0] == root]:
            self.uses.remove(path)
            del self.freq[path]
            self.children.pop(path, None)
        self.children.pop((root,), None)

    def insert(self, root: int, tokens: list[int], counted: int) -> None:
        for start in range(max(0, counted - self.branch_length + 1), len(tokens) - self.min_match):
            end = min(start + self.branch_length, len(tokens))
            known = counted if start + self.min_match < counted else start
            paths = [(root, *tokens[start : at + 1]) for at in range(start, end)]
            present = [path for path in paths if path in self.freq]
            for at, path in enumerate(present, start=start):
                self.freq[path] += at >= known
            self._refresh(present)
            self._evict(len(paths) - len(present))
            for path in paths[len(present) :]:
                self.freq[path] = 1
            self._refresh(paths)

    def _refresh(self, paths: list[Path]) -> None:
        for path in reversed(paths):
            if path in self.uses:
                self.uses.remove(path)
            self.uses.insert(0, path)
            siblings = self.children.setdefault(path[:-1], [])
            if path[-1] in siblings:
                siblings.remove(path[-1])
            siblings.insert(0, path[-1])

    def _evict(self, num_free: int) -> None:
        while self.capacity - self.num_nodes < num_free:
            path = next(path for path in reversed(self.uses) if path[0] not in self.kept)
            self.uses.remove(path)
            assert not self.children.get(path), "only leaves are evicted"
            del self.freq[path]
            self.children[path[:-1]].remove(path[-1])

    def match(
        self, roots: list[int], suffix: list[int], rules: MatchRules, num_nodes: int, max_depth: int
    ) -> tuple[list[int], list[int], list[int]]:
        """Tokens, parents and sources, level by level."""
        tree: dict[Path, int] = {(): 0}  # path below the tree's root -> sources; in order of arrival
        scale = (rules.max_breadth - rules.min_breadth) / (rules.max_match - rules.min_match + 1)
        for width in range(min(len(suffix), rules.max_match), rules.min_match - 1, -1):
            for index, root in enumerate(roots):
                anchor = (root, *suffix[len(suffix) - width :])
                if anchor not in self.freq:
                    continue
                if rules.match_type == "PROB":
                    self._frequent(tree, anchor, 1 << index, rules.max_breadth, num_nodes, max_depth)
                else:
                    breadth = (rules.max_match - width) * scale + rules.min_breadth
                    self._recent(tree, anchor, 1 << index, breadth, scale, num_nodes, max_depth)
        return level_order(tree)

    def _recent(
        self, tree: dict[Path, int], anchor: Path, source: int, breadth: float, scale: float, budget: int, deep: int
    ) -> None:
        queue: list[Path] = [()]
        while queue and len(tree) <= budget:
            path = queue.pop(0)
            if len(path) >= deep:
                continue
            for token in self.children.get(anchor + path, [])[: max(1, int(breadth - scale * len(path)))]:
                if len(tree) > budget:
                    break
                tree[*path, token] = tree.get((*path, token), 0) | source
                queue.append((*path, token))

    def _frequent(self, tree: dict[Path, int], anchor: Path, source: int, breadth: int, budget: int, deep: int) -> None:
        heap: list[tuple[float, int, Path]] = [(-1.0, 0, ())]
        arrivals = 0
        while heap and len(tree) <= budget:
            cost, _, path = heapq.heappop(heap)
            if path:
                tree[path] = tree.get(path, 0) | source
            if len(path) >= deep:
                continue
            children = self.children.get(anchor + path, [])
            best = sorted(children, key=lambda token: (-self.freq[*anchor, *path, token], token))[:breadth]
            total = sum(self.freq[*anchor, *path, token] for token in best)
            for token in best:
                arrivals += 1
                heapq.heappush(heap, (cost * self.freq[*anchor, *path, token] / total, arrivals, (*path, token)))


def level_order(tree: dict[Path, int]) -> tuple[list[int], list[int], list[int]]:
    """Tokens, parents (-1: the root) and sources of the nodes, breadth first in order of arrival."""
    order: list[Path] = [()]
    for path in order:
        order += [kid for kid in tree if kid and kid[:-1] == path]
    index = {path: at - 1 for at, path in enumerate(order)}
    below = order[1:]
    return [path[-1] for path in below], [index[path[:-1]] for path in below], [tree[path] for path in below]
