"""`outrider serve`'s flags on the command line of a benchmark that starts it."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Sequence

from outrider.args import ServeArgs
from outrider.errors import StartupError
from outrider.flags import flag_named, flag_of, parser_for

_OWN = ("host", "port", "api_key", "api_key_file", "ssl_certfile")


def check_serve_flags(words: Sequence[str], *own: str) -> ServeArgs:
    """StartupError for flags that keep the benchmark from its server, are its `own`, or leave nothing to compare.

    Exits as `outrider serve` does for words that it refuses.
    """
    served = ServeArgs.parse(list(words))
    not_given = object()  # no default takes the place of what is there
    given = Namespace(**dict.fromkeys((*_OWN, *own), not_given))
    parser_for(ServeArgs).parse_known_args(words, given)
    for name in (*_OWN, *own):
        if getattr(given, name) is not not_given:
            why = "sets it itself" if name in own else "is its server's one client"
            raise StartupError(f"{flag_named(name)} is not for this benchmark, which {why}")
    if not served.drafts:
        raise StartupError("--speculative-algorithm NONE leaves nothing to compare")
    return served


def without_drafts(words: Sequence[str]) -> list[str]:
    """The flags, with their values, that go with --speculative-algorithm NONE too."""
    of_drafts = {
        flag
        for spec in dataclasses.fields(ServeArgs)
        if spec.metadata["group"].startswith("speculation: ") or spec.name.startswith("speculative_")
        for flag in (flag_of(spec), *spec.metadata["aliases"])
    } | {flag_named(name) for name in ("colocate", "core_placement", "max_sessions")}
    kept: list[str] = []
    is_kept = True
    for word in words:
        if word.startswith("--"):
            is_kept = word.partition("=")[0] not in of_drafts
        kept += [word] * is_kept
    return kept
