"""JSON text that can go out as UTF-8, whatever escapes the model wrote."""

from __future__ import annotations


def encodable(text: str) -> str:
    """JSON text with the halves of a character joined; a half alone, which UTF-8 has no bytes for, is an escape."""
    joined = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    return joined.encode("utf-8", "backslashreplace").decode("utf-8")
