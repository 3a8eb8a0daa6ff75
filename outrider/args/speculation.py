"""Flags of speculation, which `draft` and `serve` take."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from outrider.args.quantization import DRAFT_QUANTIZATION, quantization_method
from outrider.errors import StartupError
from outrider.flags import Args, arg, at_least, at_most, flag_named, flag_of
from outrider.tiers import candidates, read_tiers
from outrider.tree_limits import MAX_WISH, most_nodes


@dataclass(frozen=True, kw_only=True)
class SpeculativeArgs(Args):
    """Flags of speculation, named as SGLang names them."""

    speculative_algorithm: str | None = arg(
        None,
        "speculation",
        "NGRAM, STANDALONE, EAGLE, EAGLE3, NEXTN (the same as EAGLE), or none for no speculation. "
        "Default: as `serve` says.",
    )
    speculative_num_steps: int | None = arg(
        None, "speculation", "Depth of a drafted tree. Default: as suits the algorithm and the target; set all three."
    )
    speculative_eagle_topk: int | None = arg(None, "speculation", "Branches of each node that a tree is grown from.")
    speculative_num_draft_tokens: int | None = arg(
        None, "speculation",
        "Nodes verified in one step, root included. NGRAM: 12; with a draft model it goes with the two before.",
    )  # fmt: skip
    speculative_draft_model_path: str | None = arg(
        None, "speculation: draft model", "Folder or hub id of the draft model or head. Default: the target's own.",
        aliases=("--speculative-draft-model",),
    )  # fmt: skip
    speculative_draft_model_revision: str | None = arg(None, "speculation: draft model", "Revision of its hub id.")
    speculative_draft_load_format: Literal["auto", "safetensors", "pt", "dummy"] | None = arg(
        None, "speculation: draft model", "As --load-format. Default: the target's."
    )
    speculative_draft_attention_backend: str | None = arg(
        None, "speculation: draft model", "As --attention-backend. Default: as suits the device; `serve`: the target's."
    )
    speculative_draft_model_quantization: str | None = arg(
        None, "speculation: draft model", "As --quantization, or unquant for none. Default: as --quantization."
    )
    speculative_moe_runner_backend: str | None = arg(
        None, "speculation: draft model", "What runs a draft model's experts: auto (torch's grouped products)."
    )
    speculative_moe_a2a_backend: str | None = arg(
        None, "speculation: draft model", "What moves rows between experts on several devices: none (they are on one)."
    )
    speculative_token_map: str | None = arg(
        None, "speculation: draft model", "File with the token ids that may be drafted (FR-Spec)."
    )
    speculative_copy_tokens: int | None = arg(
        None, "speculation: draft model",
        "Most tokens that are copied at once from where a session's own text repeats itself, in place of the draft "
        "model's tree; 0: never. Default: 16, and 0 where trees are fixed by flags.",
    )  # fmt: skip
    enable_multi_layer_eagle: bool = arg(
        False, "speculation: draft model", "Require a head with a layer for each step; one that has them is used so."
    )
    speculative_adaptive: bool = arg(
        False, "speculation: draft model",
        "Steps follow accepted drafts by SGLang's rule: EAGLE and EAGLE3, one branch. Without it, and with no tree "
        "fixed, Outrider's own planner chooses.",
    )  # fmt: skip
    speculative_adaptive_config: str | None = arg(
        None, "speculation: draft model", "JSON file with the candidates of each batch size. Default: SGLang's."
    )
    enable_dp_attention: bool = arg(
        False, "speculation", "SGLang's; refused: replicas of the verify service take the place of data parallelism."
    )
    speculative_ngram_min_match_window_size: int = arg(1, "speculation: NGRAM", "Shortest suffix that is looked up.")
    speculative_ngram_max_match_window_size: int = arg(12, "speculation: NGRAM", "Longest suffix that is looked up.")
    speculative_ngram_min_bfs_breadth: int = arg(1, "speculation: NGRAM", "Fewest branches followed at a node.")
    speculative_ngram_max_bfs_breadth: int = arg(10, "speculation: NGRAM", "Most branches followed at a node.")
    speculative_ngram_match_type: Literal["BFS", "PROB"] = arg(
        "BFS", "speculation: NGRAM", "Which continuations are taken: the most recent (BFS) or most frequent (PROB)."
    )
    speculative_ngram_branch_length: int = arg(18, "speculation: NGRAM", "Depth of the trie.")
    speculative_ngram_capacity: int = arg(10_000_000, "speculation: NGRAM", "Nodes of the trie, least used go first.")
    speculative_ngram_scope: Literal["global", "session"] = arg(
        "global", "speculation: NGRAM", "Whether requests draw drafts from one another's text."
    )

    def check(self) -> None:
        """StartupError for trees, or an n-gram cache of SGLang's, that are out of range."""
        super().check()
        # SGLang's candidates may be 0: no speculation until larger steps pay.
        at_least(self, 0 if self.speculative_adaptive else 1, "speculative_num_steps")
        at_least(self, 1, "speculative_eagle_topk")
        # As one request may ask for at most.
        at_most(self, MAX_WISH, "speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
        at_least(self, 0, "speculative_copy_tokens")
        at_most(self, MAX_WISH, "speculative_copy_tokens")
        at_least(self, 2, "speculative_num_draft_tokens")
        self._check_ngram_cache()
        if self.speculative_draft_model_quantization not in (None, "", "unquant"):
            quantization_method(self.speculative_draft_model_quantization, DRAFT_QUANTIZATION)
        for name, value, there in _MOE_BACKENDS:
            given = getattr(self, name)
            if given not in (None, value):
                raise StartupError(
                    f"{flag_named(name)} is {given!r}, which is not offered here; {value!r}, {there}, is"
                )
        algorithm = (self.speculative_algorithm or "").upper()
        if self.enable_dp_attention:
            with_it = f" with {algorithm}" if algorithm not in ("", "NONE") else ""
            raise StartupError(
                f"--enable-dp-attention is not supported{with_it}: run several verify services (--verify-address "
                "may be repeated) instead of data-parallel attention in one"
            )
        self._check_adaptive(algorithm)
        if self.enable_multi_layer_eagle and algorithm and algorithm not in HEAD_ALGORITHMS:
            raise StartupError(
                f"--enable-multi-layer-eagle is for EAGLE's heads; --speculative-algorithm is {algorithm}"
            )
        if algorithm not in ("", "NGRAM"):
            self.refuse_ngram_flags(algorithm)
        if algorithm in ("NGRAM", "NONE"):
            self.refuse_draft_model_flags()
        elif algorithm:
            self.check_tree()

    def _check_ngram_cache(self) -> None:
        at_least(self, 2, "speculative_ngram_branch_length")
        at_least(self, 1, "speculative_ngram_min_match_window_size", "speculative_ngram_min_bfs_breadth")
        low, high = self.speculative_ngram_min_match_window_size, self.speculative_ngram_max_match_window_size
        if high < low:
            raise StartupError(f"--speculative-ngram-max-match-window-size is {high}, below the minimum window, {low}")
        if high >= self.speculative_ngram_branch_length:
            raise StartupError(
                f"--speculative-ngram-max-match-window-size is {high}; it must be below "
                f"--speculative-ngram-branch-length, {self.speculative_ngram_branch_length}"
            )
        low, high = self.speculative_ngram_min_bfs_breadth, self.speculative_ngram_max_bfs_breadth
        if high < low:
            raise StartupError(f"--speculative-ngram-max-bfs-breadth is {high}, below the minimum breadth, {low}")
        at_least(self, self.speculative_ngram_branch_length + 1, "speculative_ngram_capacity")

    def check_tree(self) -> None:
        """StartupError for a draft model's tree that is fixed in part (SGLang's rule), or cannot have as many nodes."""
        steps, topk, tokens = (getattr(self, name) for name in _TREE)
        if self.speculative_adaptive or steps is topk is tokens is None:
            return
        missing = [name for name in _TREE if getattr(self, name) is None]
        if missing and (topk != 1 or steps is None):  # a chain's nodes follow its steps
            given = [f"{flag_named(name)} {getattr(self, name)}" for name in _TREE if name not in missing]
            needs = f"need{'s' if len(given) == 1 else ''} {' and '.join(map(flag_named, missing))} too"
            raise StartupError(
                f"{' and '.join(given)} {needs}: of a draft model's tree all three are set or none (for a chain: "
                "--speculative-eagle-topk 1)"
            )
        most = most_nodes(steps, topk) + 1
        if topk > 1 and tokens > most:
            raise StartupError(
                f"--speculative-num-draft-tokens is {tokens}; {steps} steps of {topk} branches give at most {most} "
                "nodes, root included: lower it, or raise --speculative-num-steps or --speculative-eagle-topk"
            )

    @property
    def fixes_tree(self) -> bool:
        """Whether the flags fix a draft model's tree: it is verified whole then, whether or not it pays."""
        steps, topk, tokens = (getattr(self, name) for name in _TREE)
        return not (self.speculative_adaptive or steps is None or topk is None) and (tokens is not None or topk == 1)

    def find_most_nodes(self) -> tuple[str, int]:
        """The field by which a draft has most nodes, the root aside, and how many; 0 where none says.

        Reads the configuration of adaptive steps, if there is one; StartupError where it cannot.
        """
        steps, topk, tokens = (getattr(self, name) for name in _TREE)
        copies = "speculative_copy_tokens", self.speculative_copy_tokens or 0
        if self.speculative_adaptive:
            file = self.speculative_adaptive_config
            asking = "speculative_adaptive" if file is None else "speculative_adaptive_config"
            tree = asking, candidates(read_tiers(file))[-1]
        elif topk == 1:  # a chain's nodes follow its steps
            tree = _TREE[0], steps or 0
        else:
            tree = _TREE[2], (tokens or 1) - 1
        return max(tree, copies, key=lambda found: found[1])

    def _check_adaptive(self, algorithm: str) -> None:
        if not self.speculative_adaptive:
            if self.speculative_adaptive_config is not None:
                raise StartupError("--speculative-adaptive-config needs --speculative-adaptive")
            return
        if algorithm and algorithm not in HEAD_ALGORITHMS:
            raise StartupError(
                f"--speculative-adaptive is for EAGLE and EAGLE3; --speculative-algorithm is {algorithm}"
            )
        if self.speculative_eagle_topk not in (None, 1):
            raise StartupError(
                f"--speculative-adaptive drafts chains; --speculative-eagle-topk is {self.speculative_eagle_topk}"
            )
        if self.enable_multi_layer_eagle:
            raise StartupError("--speculative-adaptive and --enable-multi-layer-eagle exclude each other")

    def refuse_ngram_flags(self, algorithm: str) -> None:
        """StartupError for a flag that only n-gram drafts have, but for the scope: others share no text at all."""
        for spec in dataclasses.fields(self):
            is_ngrams = spec.metadata["group"] == "speculation: NGRAM" and spec.name != "speculative_ngram_scope"
            if is_ngrams and getattr(self, spec.name) != spec.default:
                raise StartupError(
                    f"{flag_of(spec)} is for n-gram drafts, and drafts are {algorithm} here: add "
                    "--speculative-algorithm NGRAM"
                )

    def refuse_draft_model_flags(self) -> None:
        """StartupError for a flag that only draft models have."""
        for spec in dataclasses.fields(self):
            needs_model = spec.metadata["group"] == "speculation: draft model" or spec.name in _TREE_FLAGS
            if needs_model and getattr(self, spec.name) not in (spec.default, ""):
                if self.speculative_algorithm is None:
                    raise StartupError(
                        f"{flag_of(spec)} is for draft models: add --speculative-algorithm STANDALONE, EAGLE, EAGLE3 "
                        "or NEXTN; without it drafts are n-grams"
                    )
                algorithm = self.speculative_algorithm.upper()
                raise StartupError(f"{flag_of(spec)} is for draft models; --speculative-algorithm {algorithm} has none")


_TREE = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
_TREE_FLAGS = _TREE[:2]  # NGRAM has the third too
# NEXTN is EAGLE's other name in SGLang's flags: which kind of head it is, its checkpoint says.
HEAD_ALGORITHMS = ("EAGLE", "EAGLE3", "NEXTN")
DRAFTED = ("NGRAM", "STANDALONE", *HEAD_ALGORITHMS)
ALGORITHMS = (*DRAFTED, "NONE")
# SGLang has many; of each, this one is there.
_MOE_BACKENDS = (
    ("speculative_moe_runner_backend", "auto", "torch's own operators"),
    ("speculative_moe_a2a_backend", "none", "all experts on one device"),
)


def check_algorithm(name: str | None, among: tuple[str, ...] = ALGORITHMS) -> None:
    """StartupError for a --speculative-algorithm that there is not."""
    if name is not None and name.upper() not in among:
        raise StartupError(f"--speculative-algorithm is {name!r}; it must be one of {', '.join(among)}")
