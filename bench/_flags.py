"""Kinds of values on a benchmark's command line."""

from __future__ import annotations

import argparse
import json
from typing import Any


def positive(text: str) -> int:
    """A whole number from 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def counts(text: str) -> list[int]:
    """Whole numbers from 1, joined by commas."""
    return [positive(part) for part in text.split(",")]


def rates(text: str) -> list[float]:
    """Numbers above 0, joined by commas."""
    values = [float(part) for part in text.split(",")]
    if not all(0 < value < float("inf") for value in values):
        raise argparse.ArgumentTypeError(f"{text} holds a rate that is not above 0")
    return values


def names(text: str) -> list[str]:
    """Words joined by commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("not a JSON object")
    return value
