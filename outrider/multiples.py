"""How hard `multipleOf` is for a grammar: llguidance goes through the remainders that digits can leave, all of them."""

from __future__ import annotations

import math
import re
from decimal import Decimal

MOST_REMAINDERS = 10_000  # of all values of a grammar together, which may come to meet in one number: about 0.1 s
_KEY = re.compile(r'"multipleOf"\s*:\s*(-?[0-9][-+.0-9eE]*)')
_ESCAPED = re.compile(r"\\u00([0-7][0-9a-fA-F])")


def remainders(value: str) -> int:
    """How many remainders a grammar for multiples of `value` has to tell apart; 1 for what is no number above 0, which
    is refused anyway."""
    try:
        digits = Decimal(value).normalize().as_tuple().digits
    except ArithmeticError:
        return 1
    return int("".join(map(str, digits)) or 1) or 1  # infinity has the digit 0, NaN none


def remainders_of(source: str) -> int:
    """How many remainders all `multipleOf` of a schema, or of a grammar with schemas in it, have to tell apart."""
    return math.lcm(*map(remainders, _KEY.findall(unescaped(source))))


def unescaped(source: str) -> str:
    """JSON in which ASCII characters stand for themselves, so that its keys can be found."""
    return _ESCAPED.sub(lambda found: chr(int(found[1], 16)), source)
