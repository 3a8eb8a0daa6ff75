"""Settings of `outrider train`'s commands. Imports no torch."""

from training.args.data import DataArgs
from training.args.evaluation import EvalArgs
from training.args.export import ExportArgs, PackArgs, TokenMapArgs
from training.args.head import HeadArgs
from training.args.target import MT_BENCH, TargetArgs

__all__ = ["MT_BENCH", "DataArgs", "EvalArgs", "ExportArgs", "HeadArgs", "PackArgs", "TargetArgs", "TokenMapArgs"]
