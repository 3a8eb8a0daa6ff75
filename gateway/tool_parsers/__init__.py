"""The formats in which models write calls of tools, one a file; `formats` has them by name."""
