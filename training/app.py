"""`outrider train COMMAND`: what makes a draft head, step by step."""

from __future__ import annotations

import importlib
import sys

from outrider.flags import Args
from outrider.telemetry import configure_logging
from training.args import DataArgs, EvalArgs, ExportArgs, HeadArgs, PackArgs, TokenMapArgs

COMMANDS: dict[str, tuple[type[Args], str]] = {
    "data": (DataArgs, "training.data.build"),
    "head": (HeadArgs, "training.loop"),
    "eval": (EvalArgs, "training.evaluate"),
    "export": (ExportArgs, "training.export"),
    "pack": (PackArgs, "training.packing"),
    "token-map": (TokenMapArgs, "training.frequencies"),
}


def main(words: list[str]) -> int:
    """Runs one command; returns the exit code."""
    if not words or words[0] in {"-h", "--help"} or words[0] not in COMMANDS:
        wrong = bool(words) and words[0] not in {"-h", "--help"}
        lines = [f"outrider train: there is no command {words[0]!r}"] if wrong else []
        lines += ["usage: outrider train COMMAND [FLAGS]", ""]
        lines += [f"  {name:<10} {settings.summary}" for name, (settings, _) in COMMANDS.items()]
        print("\n".join(lines), file=sys.stderr if wrong else sys.stdout)
        return 2 if wrong else 0
    settings, module = COMMANDS[words[0]]
    args = settings.parse(words[1:])
    configure_logging("train")
    return importlib.import_module(module).main(args)
