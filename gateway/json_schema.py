"""JSON schemas as they come from anyone: bounded in depth, and moved into larger ones with their references."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.errors import InvalidArgument

MAX_DEPTH = 32
# How verify writes all JSON, for schemas that stand within a larger grammar (`x-guidance`): a small model that may
# write any white space writes nothing else.
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def check_depth(schema: Mapping[str, Any] | None, field: str) -> None:
    """InvalidArgument for a schema that is nested too deeply. Its size is verify's to check, with the grammar's."""
    if schema is not None and not _shallow(schema, MAX_DEPTH):
        raise InvalidArgument(
            f"The schema is nested more than {MAX_DEPTH} levels deep.", field=field, code="invalid_json_schema"
        )


def _shallow(value: object, levels: int) -> bool:
    if not isinstance(value, Mapping | list):
        return True
    items = value.values() if isinstance(value, Mapping) else value
    return levels > 0 and all(_shallow(item, levels - 1) for item in items)


def moved(schema: Any, root: str) -> Any:
    """A schema with its references moved along: what was the root is now at `root`."""
    if isinstance(schema, list):
        return [moved(item, root) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    made = {key: moved(item, root) for key, item in schema.items()}
    reference = made.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        made["$ref"] = root + reference[1:]
    return made
