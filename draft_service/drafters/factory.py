"""From --speculative-algorithm to a drafter; only what it needs is imported, torch for those with a model."""

from __future__ import annotations

from draft_service.drafters.base import Drafter
from outrider.args import HEAD_ALGORITHMS, DraftArgs
from outrider.args.draft import OF_DRAFT_MODELS
from outrider.errors import StartupError
from outrider.flags import flag_named


def describe_drafter(args: DraftArgs) -> dict[str, str]:
    """What the drafter needs of verify: algorithm, and features as --features takes them. No weights are read."""
    algorithm = _algorithm(args)
    features = "none"
    if algorithm in HEAD_ALGORITHMS:
        from draft_service.drafters import heads

        features = str(heads.features_needed(args))
    return {"algorithm": algorithm, "features": features}


def make_drafter(args: DraftArgs) -> Drafter:
    """The drafter that the flags ask for, loaded. StartupError naming the flag, or both sides, when it cannot be."""
    algorithm = _algorithm(args)
    if algorithm == "NGRAM":
        from draft_service.drafters.ngram import NgramDrafter

        return NgramDrafter.from_args(args)
    if algorithm == "STANDALONE":
        from draft_service.drafters import standalone

        return standalone.make_drafter(args)
    from draft_service.drafters import heads

    return heads.make_drafter(args)


def _algorithm(args: DraftArgs) -> str:
    algorithm = (args.speculative_algorithm or "NGRAM").upper()
    if algorithm == "NGRAM":
        args.refuse_draft_model_flags()
        for name in OF_DRAFT_MODELS:
            if getattr(args, name) != getattr(DraftArgs, name):
                raise StartupError(f"{flag_named(name)} is for draft models; --speculative-algorithm NGRAM has none")
    return algorithm
