"""Settings of every process: a frozen dataclass each (outrider/flags.py makes the command line of it).

Flags that SGLang has keep its names, meanings and defaults.
"""

from outrider.args.draft import DraftArgs
from outrider.args.gateway import GatewayArgs
from outrider.args.serve import ServeArgs
from outrider.args.speculation import ALGORITHMS, HEAD_ALGORITHMS
from outrider.args.tools import ChatArgs, ConvertArgs, HealthArgs
from outrider.args.verify import VerifyArgs

__all__ = [
    "ALGORITHMS", "HEAD_ALGORITHMS", "ChatArgs", "ConvertArgs", "DraftArgs", "GatewayArgs", "HealthArgs", "ServeArgs",
    "VerifyArgs",
]  # fmt: skip
