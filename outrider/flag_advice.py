"""What an unknown flag was meant to be: another server's name for one of ours, or else the one spelt most alike."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Sequence

_WHOLE = "a model runs whole in one process, on one device"
# By their spelling some look like flags that mean something else.
_OTHERS = {
    # vLLM's
    "--model": "--model-path",
    "--tokenizer": "--tokenizer-path",
    "--max-model-len": "--context-length",
    "--max-num-seqs": "--max-running-requests",
    "--max-num-batched-tokens": "--chunked-prefill-size",
    "--gpu-memory-utilization": "--mem-fraction-static",
    "--block-size": "--page-size",
    "--enforce-eager": "--disable-cuda-graph",
    "--enable-prefix-caching": "prefixes are cached unless --disable-radix-cache is given",
    "--no-enable-prefix-caching": "--disable-radix-cache",
    "--speculative-config": "give --speculative-algorithm, --speculative-draft-model-path and --speculative-num-steps",
    # SGLang's
    "--speculative-ngram-max-trie-depth": "--speculative-ngram-branch-length",
    "--log-level": "set the variable OUTRIDER_LOG_LEVEL",
    # llama.cpp's
    "--ctx-size": "--context-length",
    # of several
    "--tensor-parallel-size": _WHOLE,
    "--tp-size": _WHOLE,
    "--tp": _WHOLE,
}


def meant(unknown: Sequence[str], flags: Collection[str]) -> str:
    """The end of a message about unknown words: which of a command's flags they may have meant; empty for none."""
    close: dict[str, None] = {}  # a set in order
    advice = ""
    for name in (word.partition("=")[0] for word in unknown if word.startswith("-")):
        ours = _OTHERS.get(name)
        if ours is None:
            close |= dict.fromkeys(difflib.get_close_matches(name, flags, n=1))
        elif set(re.findall(r"--[a-z-]+", ours)) <= set(flags):  # this command has what it names
            if ours in flags:
                close[ours] = None
            else:
                advice += f"; {name}: {ours}"
    return advice + (f"; did you mean {', '.join(close)}?" if close else "")
