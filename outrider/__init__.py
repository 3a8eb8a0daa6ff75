"""What every Outrider process shares: the wire, errors, token trees, arguments. No torch."""

__version__ = "0.1.0"
