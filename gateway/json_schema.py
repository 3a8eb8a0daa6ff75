"""JSON schemas as they come from anyone: bounded in depth, walked, and moved into larger ones with their references."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import quote, unquote, urljoin

from outrider.errors import InvalidArgument

MAX_DEPTH = 32
Steps = tuple[str, ...]  # to a place; joined, each place would repeat the names above it, however long they are
_VALUES = frozenset(("const", "enum", "default", "examples"))  # hold what documents may, and no schemas
_BY_NAME = frozenset(  # the keys of these are the user's
    ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
)

_DEFINITIONS = ("$defs", "definitions")
_SAYS_NOTHING = _VALUES - {"const", "enum"} | {
    *_DEFINITIONS, "type", "title", "description", "deprecated", "readOnly", "writeOnly", "$schema", "$comment"
}  # fmt: skip
_OF_ARRAYS = frozenset(("items", "minItems", "maxItems", "uniqueItems"))
_OF_OBJECTS = frozenset(("properties", "required", "additionalProperties"))
_OF_EMPTY = _SAYS_NOTHING | {"properties"}


def check_depth(schema: Mapping[str, Any] | None, field: str) -> None:
    """InvalidArgument for a schema that is nested too deeply. Its size is verify's to check, with the grammar's."""
    if schema is not None and not is_shallow(schema):
        raise InvalidArgument(
            f"The schema is nested more than {MAX_DEPTH} levels deep.", field=field, code="invalid_json_schema"
        )


def is_shallow(value: object, levels: int = MAX_DEPTH) -> bool:
    """Whether JSON is nested no deeper than so many levels."""
    if not isinstance(value, Mapping | list):
        return True
    items = value.values() if isinstance(value, Mapping) else value
    return levels > 0 and all(is_shallow(item, levels - 1) for item in items)


def with_inner(schema: Mapping[str, Any], make: Callable[[Any], Any]) -> dict[str, Any]:
    """A schema with `make` done to what its keywords hold, or to each of it where that goes by names."""
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _VALUES:
            made[key] = value
        elif key in _BY_NAME and isinstance(value, Mapping):
            made[key] = {name: make(item) for name, item in value.items()}
        else:
            made[key] = make(value)
    return made


def schemas_in(schema: Any, at: Steps = ()) -> Iterator[tuple[Steps, Mapping[str, Any]]]:
    """A schema and those in it, each with the steps to it: `.properties`, `.a`, `.anyOf`, `[1]`."""
    if isinstance(schema, list):
        for index, item in enumerate(schema):
            yield from schemas_in(item, (*at, f"[{index}]"))
    elif isinstance(schema, Mapping):
        yield at, schema
        for key, value in schema.items():
            if key in _BY_NAME and isinstance(value, Mapping):
                for name, item in value.items():
                    yield from schemas_in(item, (*at, f".{key}", f".{name}"))
            elif key not in _VALUES:
                yield from schemas_in(value, (*at, f".{key}"))


# ---- Objects that say nothing of other properties


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema whose objects have no properties but those that they name: if any, and if nothing is said of others.

    The whole is closed even if it names none. What several keywords or references describe together stays open, and
    what is referred to in such a place. A small model would go on inventing properties; vLLM's and SGLang's grammars
    close all objects.
    """
    references, alone = _references(schema), list[str]()
    if not all(reference.startswith(("#/$defs/", "#/definitions/")) for reference in references):
        return dict(schema)
    made = dict(_closed(schema, alone))
    definitions = {
        key: {name: _closed(item, alone) for name, item in schema[key].items()}
        for key in _DEFINITIONS
        if isinstance(schema.get(key), Mapping)
    }
    if sorted(alone) == sorted(references):
        made |= definitions
    if isinstance(made.get("properties"), Mapping) and not made["properties"] and made.keys() <= _OF_EMPTY:
        made["additionalProperties"] = False
    return made


def _closed(schema: Any, alone: list[str]) -> Any:
    """A schema as `closed` has it; `alone` gets the references of places that nothing else describes."""
    if not isinstance(schema, Mapping):
        return schema
    keys, made = schema.keys() - _SAYS_NOTHING, dict(schema)
    if keys == {"$ref"} and isinstance(schema["$ref"], str):
        alone.append(schema["$ref"])
    elif keys == {"anyOf"} and isinstance(schema["anyOf"], list):
        made["anyOf"] = [_closed(item, alone) for item in schema["anyOf"]]
    elif "items" in keys <= _OF_ARRAYS:
        made["items"] = _closed(schema["items"], alone)
    elif keys == {"additionalProperties"}:
        made["additionalProperties"] = _closed(schema["additionalProperties"], alone)
    elif "properties" in keys <= _OF_OBJECTS and isinstance(properties := schema["properties"], Mapping):
        made["properties"] = {name: _closed(item, alone) for name, item in properties.items()}
        required = schema.get("required", [])
        if properties and isinstance(required, list) and all(name in properties for name in required):
            made.setdefault("additionalProperties", False)
    return made


def _references(schema: Any) -> list[str]:
    if isinstance(schema, list):
        return [found for item in schema for found in _references(item)]
    if not isinstance(schema, Mapping):
        return []
    own = [schema["$ref"]] if isinstance(schema.get("$ref"), str) else []
    return own + [found for key, value in schema.items() if key not in _VALUES for found in _references(value)]


# ---- References


def moved(schema: Mapping[str, Any], root: str) -> dict[str, Any]:
    """A schema with its references moved along: what was the root is now at `root`, within a document of others.

    All that it defines itself is referred to by its place: the names that `$id` and `$anchor` give would be the whole
    document's, and are left out.
    """
    return _moved(schema, "", {"": root, **dict(_places(schema, "", (root,)))})


def pointed_at(root: object, reference: str) -> object:
    """What a reference within a document points to, `#/$defs/a`; None for one that points nowhere, or too deep."""
    start, *steps = reference.split("/", MAX_DEPTH + 1)
    if start != "#" or len(steps) > MAX_DEPTH:
        return None
    found = root
    for step in steps:
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _moved(schema: Any, base: str, places: Mapping[str, str]) -> Any:
    if isinstance(schema, list):
        return [_moved(item, base, places) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    base = _base(schema, base)
    made = with_inner(schema, lambda item: _moved(item, base, places))
    for key in ("$id", "$anchor"):
        if isinstance(made.get(key), str):
            del made[key]
    if isinstance(reference := made.get("$ref"), str):
        made["$ref"] = _place(_joined(base, reference), places) or reference
    return made


def _places(schema: Any, base: str, at: Steps) -> Iterator[tuple[str, str]]:
    """The names that a schema at `at` and those in it go by, as URIs, and the pointers to them."""
    if isinstance(schema, list):
        for index, item in enumerate(schema):
            yield from _places(item, base, (*at, f"/{index}"))
    if not isinstance(schema, Mapping):
        return
    inner = _base(schema, base)
    if inner != base:
        yield inner, "".join(at)
    if isinstance(anchor := schema.get("$anchor"), str):
        yield f"{inner}#{anchor}", "".join(at)
    if isinstance(own := schema.get("$id"), str) and own.startswith("#"):  # draft-07's anchors
        yield inner + own, "".join(at)
    for key, value in schema.items():
        below = (*at, f"/{_step(key)}")
        if key in _BY_NAME and isinstance(value, Mapping):
            for name, item in value.items():
                yield from _places(item, inner, (*below, f"/{_step(name)}"))
        elif key not in _VALUES:
            yield from _places(value, inner, below)


def _base(schema: Mapping[str, Any], base: str) -> str:
    """What references in a schema start from."""
    own = schema.get("$id")
    return _joined(base, own).partition("#")[0] if isinstance(own, str) else base


def _joined(base: str, reference: str) -> str:
    if reference.startswith("#"):  # which urljoin does not know of some schemes, as `urn:`
        return base + reference
    try:
        return urljoin(base, reference)
    except ValueError:
        return reference


def _place(uri: str, places: Mapping[str, str]) -> str | None:
    """The pointer to what a URI names; None for what is not in the schema."""
    bare, _, fragment = uri.partition("#")
    if fragment and not fragment.startswith("/"):
        return places.get(uri)
    start = places.get(bare)
    return None if start is None else start + fragment


def _step(name: str) -> str:
    return quote(name.replace("~", "~0").replace("/", "~1"), safe="~$")
