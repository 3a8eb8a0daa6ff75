"""From --speculative-algorithm to a drafter; only what it needs is imported, torch for those with a model."""

from __future__ import annotations

from draft_service.drafters.base import Drafter
from outrider.args import HEAD_ALGORITHMS, DraftArgs
from outrider.errors import StartupError


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
        if args.disable_cuda_graph or args.cuda_graph_max_bs is not None:
            raise StartupError(
                "--disable-cuda-graph and --cuda-graph-max-bs are for draft models; --speculative-algorithm NGRAM has "
                "none"
            )
    return algorithm
