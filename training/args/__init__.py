"""Settings of `outrider train`'s commands. Imports no torch.

A file each:
    target                  the target, and where it runs
    data, head, evaluation  `train data`, `train head`, `train eval`
    export                  commands that write what was trained
"""

from training.args.data import DataArgs
from training.args.evaluation import EvalArgs
from training.args.export import ExportArgs, PackArgs, TokenMapArgs
from training.args.head import HeadArgs
from training.args.target import MT_BENCH, TargetArgs

__all__ = ["MT_BENCH", "DataArgs", "EvalArgs", "ExportArgs", "HeadArgs", "PackArgs", "TargetArgs", "TokenMapArgs"]
