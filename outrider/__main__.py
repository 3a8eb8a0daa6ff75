"""The process of the command `outrider`, and of `python -m outrider`."""

from __future__ import annotations

import sys


def main() -> int:
    """Runs this process's command line; returns the exit code. Interrupted while it loads, it goes in silence too."""
    try:
        from outrider import cli

        return cli.main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
