"""Philox4x32-10: random numbers as a function of where they are used.

A counter-based generator (Salmon, Moraes, Dror, Shaw: "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011) has no
state: the same seed and place give the same number in any batch, on any replica and after a resumption. The place of a
number is (choice index, output position, lane). The layout below is part of the promise that a seed repeats an answer,
so it never changes:

    key      seed's low word, seed's high word
    counter  output position, lane, choice index, 0

Lanes: 0 draws the token (or the acceptance coin), 1 the final draw of the threshold rule.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

COIN_LANE: Final = 0
FINAL_LANE: Final = 1

_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS: Final = (0x9E3779B9, 0xBB67AE85)
_ROUNDS: Final = 10
_MASK: Final = 0xFFFFFFFF
_UNIT: Final = 2.0**-53

Integers = int | npt.NDArray[np.integer]


def philox4x32(counter: npt.NDArray[np.uint32], key: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Ten rounds over `counter` uint32 [..., 4] with `key` uint32 [..., 2]; returns uint32 [..., 4]."""
    c0, c1, c2, c3 = (counter[..., i].astype(np.uint64) for i in range(4))
    k0, k1 = (key[..., i].astype(np.uint64) for i in range(2))
    mask, half = np.uint64(_MASK), np.uint64(32)
    for _ in range(_ROUNDS):
        left, right = c0 * np.uint64(_MULTIPLIERS[0]), c2 * np.uint64(_MULTIPLIERS[1])
        c0, c1, c2, c3 = (right >> half) ^ c1 ^ k0, right & mask, (left >> half) ^ c3 ^ k1, left & mask
        k0, k1 = (k0 + np.uint64(_KEY_STEPS[0])) & mask, (k1 + np.uint64(_KEY_STEPS[1])) & mask
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def uniform(seed: Integers, choice: Integers, position: Integers, lane: Integers) -> npt.NDArray[np.float64]:
    """Uniform numbers in [0, 1) with 53 bits, float64 [R]; the arguments are integers or arrays broadcast to [R].

    `seed` is a uint64, the others fit 32 bits; anything else is a ValueError.
    """
    words = np.broadcast_arrays(
        np.atleast_1d(_checked(position, "position", 32)),
        _checked(lane, "lane", 32),
        _checked(choice, "choice", 32),
        _checked(seed, "seed", 64),
    )
    position_word, lane_word, choice_word, seeds = words
    counter = np.stack([position_word, lane_word, choice_word, np.zeros_like(position_word)], axis=-1)
    key = np.stack([seeds & np.uint64(_MASK), seeds >> np.uint64(32)], axis=-1)
    out = philox4x32(counter.astype(np.uint32), key.astype(np.uint32)).astype(np.uint64)
    bits = ((out[..., 0] << np.uint64(32)) | out[..., 1]) >> np.uint64(11)
    return bits.astype(np.float64) * _UNIT


def uniform_one(seed: int, choice: int, position: int, lane: int) -> float:
    """`uniform` for one place in plain integers, equal to it bit for bit.

    Drawing one number is the common case (a token per visited tree node), and there it is ten times as quick as
    arrays of length one.
    """
    if not (0 <= seed < 1 << 64 and all(0 <= word <= _MASK for word in (choice, position, lane))):
        raise ValueError(f"out of range: seed {seed}, choice {choice}, position {position}, lane {lane}")
    c0, c1, c2, c3 = position, lane, choice, 0
    k0, k1 = seed & _MASK, seed >> 32
    for _ in range(_ROUNDS):
        left, right = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (right >> 32) ^ c1 ^ k0, right & _MASK, (left >> 32) ^ c3 ^ k1, left & _MASK
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return ((c0 << 32 | c1) >> 11) * _UNIT


def _checked(value: Integers, name: str, bits: int) -> npt.NDArray[np.uint64]:
    array = np.asarray(value)
    if array.dtype.kind not in "iu" or (array.size and (int(array.min()) < 0 or int(array.max()) >> bits)):
        raise ValueError(f"{name} must be integers of {bits} bits, got {value!r}")
    return array.astype(np.uint64)
