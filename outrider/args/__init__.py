"""Settings of every process: a frozen dataclass each (outrider/flags.py makes the command line of it).

Flags that SGLang has keep its names, meanings and defaults.

Services:
    verify, draft, gateway, serve  the flags of a command each

Parts that several have:
    speculation                    drafting: `draft` and `serve`
    quantization                   names of --quantization
    links                          TLS and tokens
    observing                      metrics and traces

Other commands:
    tools                          `chat`, `convert`, `health`
    admin                          `drafters`
    top                            `top`
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
