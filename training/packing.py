"""`outrider train pack`: from a published head to the file that is shipped."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors import SafetensorError

from engine.model_folder import resolve_model
from engine.shipped import SHIPPED, pack
from outrider.errors import StartupError
from outrider.telemetry import announce
from training.args import PackArgs
from training.exported import algorithm_of


def main(args: PackArgs) -> int:
    """Writes the file, the model card beside it, and says how large it is."""
    target = resolve_model(args.model_path, revision=args.revision)
    output = (
        SHIPPED / f"{target.name}-{args.algorithm.lower()}.safetensors" if args.output is None else Path(args.output)
    )
    if (found := algorithm_of(Path(args.head))) != args.algorithm:
        raise StartupError(f"{args.head} is {found}, and --algorithm is {args.algorithm}; give the one that it is")
    try:
        size = pack(Path(args.head), args.algorithm, target, output)
        card = Path(args.head) / "README.md"
        if card.is_file():
            shutil.copyfile(card, output.with_suffix(".md"))
    except (OSError, ValueError, SafetensorError) as error:
        raise StartupError(f"{args.head} cannot be packed into {output}: {error}") from error
    announce(f"{output}: {size / 2**20:.1f} MiB")
    return 0
