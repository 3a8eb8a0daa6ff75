"""Numbers on the wire: token arrays as little-endian int32, score bytes, limits.

Paths' probabilities travel as one byte per node (min(255, round(-16 ln p)); lower is likelier).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from outrider.errors import InvalidArgument

WIRE_VERSION = 1
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
MAX_ENTRIES = 16_384  # of a message: calls that are begun and given up, proposals, releases
MAX_GRAMMAR_BYTES = 64 * 1024  # of a request's JSON schema, regular expression or grammar
# White space of all JSON that grammars write: a small model that may write any writes nothing else.
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
INT31_MAX = 2**31 - 1
MAX_NAME_CHARS = 256  # of requests, corpora, scopes, salts, traces, drafters, hosts and services
MAX_CHOICES = 128  # of a request over HTTP; over gRPC unless --max-choices says otherwise
MAX_TOP_LOGPROBS = 20  # of a token
MAX_DETAIL_CHARS = 256  # of what a drafter is told of a refusal, or says of a release
ENLIST_TIMEOUT_S = 10.0  # for a drafter to say its first words, and for verify to answer them
INLINE_FEATURE_BYTES = 256 * 1024

_INT32 = np.dtype("<i4")
_FEW = 16
_NO_IDS = np.empty(0, np.int32)
_NO_IDS.flags.writeable = False
_LEAST_PROBABILITY = math.exp(-255 / 16)  # that a byte can say

Ids = NDArray[np.int32]


def pack_ids(ids: Sequence[int] | NDArray[np.integer]) -> bytes:
    """Token ids or indices as little-endian int32."""
    return np.asarray(ids, _INT32).tobytes()


def num_ids(data: bytes) -> int:
    """How many ids are packed."""
    return len(data) // _INT32.itemsize


def unpack_ids(data: bytes, *, field: str) -> Ids:
    """int32 array from `data`; InvalidArgument (naming `field`) when the length is no multiple of 4."""
    if not data:
        return _NO_IDS
    if len(data) % 4:
        raise InvalidArgument(f"{field}: {len(data)} bytes are no whole number of int32", field=field)
    return np.frombuffer(data, _INT32).astype(np.int32, copy=False)


def check_token_ids(ids: Ids, *, vocab_size: int, field: str) -> None:
    """InvalidArgument for the first id outside [0, vocab_size)."""
    if ids.size <= _FEW:
        few = ids.tolist()
        if not few or (min(few) >= 0 and max(few) < vocab_size):
            return
    # As unsigned, negative ids are above every vocabulary: one pass, for what is nearly always right.
    elif ids.dtype == np.int32 and (not ids.size or int(ids.view(np.uint32).max()) < vocab_size):
        return
    wrong = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if wrong.size:
        at = int(wrong[0])
        raise InvalidArgument(f"{field}[{at}] is {ids[at]}; token ids are from 0 to {vocab_size - 1}", field=field)


def pack_scores_of(trees: Sequence[NDArray[np.floating]]) -> list[bytes]:
    """pack_scores of each of many trees, in one pass."""
    if len(trees) == 1:
        return [pack_scores(trees[0])]
    packed = pack_scores(np.concatenate(trees)) if trees else b""
    ends = list(accumulate(map(len, trees)))
    return [packed[end - len(tree) : end] for tree, end in zip(trees, ends, strict=True)]


def pack_scores(probabilities: NDArray[np.floating]) -> bytes:
    """Path probabilities [n] as score bytes."""
    if len(probabilities) <= _FEW:  # sooner than numpy begins
        log, least = math.log, _LEAST_PROBABILITY
        return bytes([0 if p >= 1.0 else 255 if p <= least else round(-16.0 * log(p)) for p in probabilities.tolist()])
    cost = -16.0 * np.log(np.maximum(np.minimum(probabilities, 1.0), _LEAST_PROBABILITY))
    return np.minimum(255.0, np.rint(cost)).astype(np.uint8).tobytes()
