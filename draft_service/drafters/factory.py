"""From --speculative-algorithm to a drafter; only what it needs is imported, torch for those with a model."""

from __future__ import annotations

from draft_service.drafters.base import Drafter
from outrider.args import DraftArgs
from outrider.errors import StartupError

# NEXTN is EAGLE's other name in SGLang's flags: which kind of head it is, its checkpoint says.
HEAD_ALGORITHMS = ("EAGLE", "EAGLE3", "NEXTN")


def make_drafter(args: DraftArgs) -> Drafter:
    """The drafter that the flags ask for, loaded. StartupError naming the flag, or both sides, when it cannot be."""
    algorithm = (args.speculative_algorithm or "NGRAM").upper()
    if algorithm == "NGRAM":
        from draft_service.drafters.ngram import NgramDrafter

        return NgramDrafter.from_args(args)
    if algorithm == "STANDALONE":
        from draft_service.drafters import standalone

        return standalone.make_drafter(args)
    if algorithm in HEAD_ALGORITHMS:
        from draft_service.drafters import heads

        return heads.make_drafter(args)
    known = ", ".join(("NGRAM", "STANDALONE", *HEAD_ALGORITHMS))
    raise StartupError(f"--speculative-algorithm is {args.speculative_algorithm!r}; it must be one of {known}")
