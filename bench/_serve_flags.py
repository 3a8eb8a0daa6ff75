"""`outrider serve`'s flags on the command line of a benchmark that starts it."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.args import ServeArgs
from outrider.errors import StartupError

_OWN_WORDS = ["--host=127.0.0.1", "--port=1"]  # that the server's are told from
_OWN = ("host", "port", "api_key", "api_key_file", "ssl_certfile")


def check_serve_flags(words: Sequence[str], *own: str) -> ServeArgs:
    """StartupError for flags that keep the benchmark from its server, are its `own`, or leave nothing to compare.

    Exits as `outrider serve` does for words that it refuses.
    """
    served, usual = (ServeArgs.parse([*_OWN_WORDS, *some]) for some in (words, ()))
    for name in (*_OWN, *own):
        if getattr(served, name) != getattr(usual, name):
            raise StartupError(
                f"--{name.replace('_', '-')} is not for this benchmark, which is its server's one client"
            )
    if not served.drafts:
        raise StartupError("--speculative-algorithm NONE leaves nothing to compare")
    return served
