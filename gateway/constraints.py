"""What a body asks the output to match, as the wire's grammar."""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.schemas import ResponseFormat, SglangSampling
from outrider.errors import InvalidArgument
from outrider.v1 import common_pb2

_KINDS = ("json_schema", "regex", "ebnf")


def of_response_format(given: ResponseFormat | None) -> common_pb2.Grammar | None:
    """OpenAI's `response_format`; None for free text. InvalidArgument for a type or a shape that is not known."""
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return common_pb2.Grammar(json_object=True)
    if given.type != "json_schema":
        raise InvalidArgument(
            "The types are 'text', 'json_object' and 'json_schema'.", field="response_format.type", code="invalid_value"
        )
    schema: Any = (given.json_schema or {}).get("schema")
    if not isinstance(schema, dict):
        raise InvalidArgument(
            "response_format.json_schema needs an object 'schema'.",
            field="response_format.json_schema", code="missing_required_parameter",
        )  # fmt: skip
    return common_pb2.Grammar(json_schema=msgspec.json.encode(schema).decode())


def of_sglang(params: SglangSampling) -> common_pb2.Grammar | None:
    """SGLang's `json_schema`, `regex` and `ebnf`, of which one may be given."""
    given = {kind: value for kind in _KINDS if (value := getattr(params, kind)) is not None}
    if len(given) > 1:
        raise InvalidArgument(
            f"Only one of {', '.join(given)} may be given.", field="sampling_params", code="invalid_value"
        )
    return common_pb2.Grammar(**given) if given else None
