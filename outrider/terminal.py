"""Text from elsewhere, as a terminal may be shown it: what a terminal would obey is written out."""

from __future__ import annotations

_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))}  # C0, DEL and C1
_BESIDE_LAYOUT = {code: shown for code, shown in _CONTROLS.items() if chr(code) not in "\n\t"}


def shown_line(text: str) -> str:
    """Text of one line."""
    return text.translate(_CONTROLS)


def shown_text(text: str) -> str:
    """Text that may have lines and tabs."""
    return text.translate(_BESIDE_LAYOUT)
