"""What a body asks the output to match, as the wire's grammar."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from gateway.body import strict_json
from gateway.error_values import missing, shown
from gateway.field_names import Names
from gateway.reasoning import ReasoningFormat
from gateway.sayable import check_schema, sayable
from gateway.schemas import JsonSchema, OpenAIFields, ResponseFormat, SglangSampling, StructuredOutputs
from outrider.errors import InvalidArgument
from outrider.v1 import common_pb2
from outrider.wire import JSON_STYLE, MAX_GRAMMAR_BYTES

_KINDS = ("json_schema", "regex", "ebnf")
_BESIDE = _KINDS  # fields of SGLang's that stand beside OpenAI's `response_format`
_FIELDS = (*_BESIDE, "structured_outputs", "response_format")


def of_response_format(given: ResponseFormat | None) -> common_pb2.Grammar | None:
    """OpenAI's `response_format` as a grammar; None for free text. InvalidArgument for an unknown type or shape."""
    if given is None:
        return None
    if given.type == "text":
        for name in ("json_schema", "schema"):
            if getattr(given, name):
                raise InvalidArgument(
                    f"'{name}' goes with the types 'json_object' and 'json_schema', not with 'text'.",
                    field=f"response_format.{name}", code="invalid_value",
                )  # fmt: skip
        return None
    if given.type == "structural_tag":
        raise _no_structural_tag("response_format.type")
    if given.type not in {"json_object", "json_schema"}:
        raise InvalidArgument(
            f"The types are 'text', 'json_object' and 'json_schema', not {shown(given.type)}.",
            field="response_format.type", code="invalid_value",
        )  # fmt: skip
    asked, field = given.json_schema, "response_format.json_schema.schema"
    if given.schema or (given.schema is not None and given.type == "json_schema"):  # an empty one is any object
        if asked is not None:
            raise InvalidArgument(
                "Only one of json_schema and schema may be given.", field="response_format.schema", code="invalid_value"
            )
        asked, field = JsonSchema(schema=given.schema), "response_format.schema"
    if asked is None and given.type == "json_schema":
        raise missing("response_format.json_schema")
    if asked is None or asked.schema is None:
        return common_pb2.Grammar(json_object=True)
    strict = bool(asked.strict)
    check_schema(asked.schema, field, strict=strict)
    return of_schema(sayable(asked.schema, strict=strict))


def of_structured_outputs(given: StructuredOutputs | None) -> common_pb2.Grammar | None:
    """vLLM's `structured_outputs` as a grammar; None for free text. Schemas are strict, as those of `/generate`."""
    asked = _asked(given)
    if given is not None and given == StructuredOutputs():
        raise InvalidArgument(
            f"Give one of {', '.join(given.__struct_fields__)}.", field="structured_outputs", code="invalid_value"
        )
    if len(asked) > 1:
        raise InvalidArgument(
            f"Only one of {', '.join(asked)} may be given.", field=f"structured_outputs.{[*asked][1]}",
            code="invalid_value",
        )  # fmt: skip
    match asked:
        case {"json": str(text)}:
            return _of_schema_text(text, "structured_outputs.json")
        case {"json": schema}:
            return _of_schema_text(msgspec.json.encode(schema).decode(), "structured_outputs.json")
        case {"regex": regex}:
            return common_pb2.Grammar(regex=regex)
        case {"choice": choices}:
            return common_pb2.Grammar(ebnf="start: " + " | ".join(map(json.dumps, choices)))
        case {"grammar": text}:
            return common_pb2.Grammar(ebnf=text)
        case {"structural_tag": _}:
            raise _no_structural_tag("structured_outputs.structural_tag")
        case {"json_object": _}:
            return common_pb2.Grammar(json_object=True)
    return None


def _no_structural_tag(field: str) -> InvalidArgument:
    return InvalidArgument("This server does not support 'structural_tag'.", field=field, code="unsupported_value")


def _asked(given: StructuredOutputs | None) -> dict[str, Any]:
    """What is asked for by name, of which there should be one."""
    named = {} if given is None else {name: getattr(given, name) for name in given.__struct_fields__}
    return {name: value for name, value in named.items() if value is not None and value is not False}


def of_openai(fields: OpenAIFields) -> common_pb2.Grammar | None:
    """The grammar of `response_format`, of SGLang's `json_schema`, `regex` or `ebnf`, or of vLLM's
    `structured_outputs`, of which one may be given."""
    asked = {name: _of_kind(name, value, name) for name in _BESIDE if (value := getattr(fields, name)) is not None}
    asked |= {
        "structured_outputs": of_structured_outputs(fields.structured_outputs),
        "response_format": of_response_format(fields.response_format),
    }
    given = {name: grammar for name, grammar in asked.items() if grammar is not None}
    if len(given) > 1:
        raise InvalidArgument(
            f"Only one of {', '.join(_FIELDS)} may be given.", field=next(iter(given)), code="invalid_value"
        )
    return next(iter(given.values()), None)


def grammar_field(fields: OpenAIFields) -> str:
    """The field that `of_openai` takes the grammar from."""
    beside = next((name for name in _BESIDE if getattr(fields, name) is not None), None)
    asked = _asked(fields.structured_outputs)
    return beside or (f"structured_outputs.{next(iter(asked))}" if asked else "response_format")


def of_schema(schema: object) -> common_pb2.Grammar:
    """The grammar of a JSON schema."""
    return common_pb2.Grammar(json_schema=msgspec.json.encode(schema).decode())


def after_reasoning(grammar: common_pb2.Grammar, form: ReasoningFormat, *, inside: bool) -> common_pb2.Grammar | None:
    """A grammar for an answer that reasoning may go before (or goes before: `inside`). None where it cannot be said."""
    kind = grammar.WhichOneof("kind")
    if kind == "json_object":
        rule = "%json " + json.dumps({"type": "object", "x-guidance": JSON_STYLE})
    elif kind == "json_schema":
        schema = json.loads(grammar.json_schema)
        rule = "%json " + json.dumps({**schema, "x-guidance": JSON_STYLE}, ensure_ascii=False)
    else:
        return None
    return _with_thoughts(rule, form, before="" if inside else json.dumps(form.begin))


def calls_after_reasoning(lark: str, form: ReasoningFormat, *, inside: bool) -> common_pb2.Grammar:
    """A grammar for reasoning and then text with calls: one of `gateway.tool_parsers.strict`, whose free text is
    TEXT."""
    rules = lark.partition("start: ")[2]
    if inside:
        return _with_thoughts(rules, form, before="")
    opening = f"SPACE {json.dumps(form.begin)}"
    # Else the mark could be free text as well, and a call that thoughts mention would be held to its schema.
    rules = rules.replace("\nTEXT: ", f"\nTEXT: ~({opening} ANY) & ", 1)
    return _with_thoughts(rules, form, before=opening)


def _with_thoughts(answer: str, form: ReasoningFormat, *, before: str) -> common_pb2.Grammar:
    """Lark of thoughts and then `answer`, a rule's body and any rules after it. Thoughts that nothing stands `before`
    have begun in the prompt; others may be left out."""
    start = "(thoughts SPACE)? answer" if before else "thoughts SPACE answer"
    lark = (
        f"%llguidance {{}}\nstart: {start}\nthoughts[lazy]: {before} ANY {json.dumps(form.end)}\n"
        f"ANY: /(.|\\n)*/\nSPACE: /\\s*/\nanswer: {answer}\n"
    )
    return common_pb2.Grammar(ebnf=lark)


def of_sglang(params: SglangSampling, names: Names) -> common_pb2.Grammar | None:
    """The grammar of SGLang's `json_schema`, `regex` or `ebnf`, of which one may be given."""
    given = {kind: value for kind in _KINDS if (value := getattr(params, kind)) is not None}
    if len(given) > 1:
        raise InvalidArgument(
            f"Only one of {', '.join(given)} may be given.", field=names.path([*given][1]), code="invalid_value"
        )
    return next((_of_kind(kind, value, names.path(kind)) for kind, value in given.items()), None)


def _of_kind(kind: str, value: str, field: str) -> common_pb2.Grammar:
    """The grammar of one of _KINDS."""
    if kind == "json_schema":
        return _of_schema_text(value, field)
    return common_pb2.Grammar(regex=value) if kind == "regex" else common_pb2.Grammar(ebnf=value)


def _of_schema_text(text: str, field: str) -> common_pb2.Grammar:
    """The grammar of a schema's JSON text. It is a strict one: output is held to all of it, or it is refused."""
    as_it_is = common_pb2.Grammar(json_schema=text)
    if len(text) > MAX_GRAMMAR_BYTES:  # it will be refused
        return as_it_is
    try:
        schema = strict_json(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"The schema is no JSON: {error}.", field=field, code="invalid_json_schema") from None
    if not isinstance(schema, dict):  # verify knows what a boolean means
        return as_it_is
    check_schema(schema, field, strict=True)
    return of_schema(sayable(schema, strict=True))


def sglang_grammar_field(params: SglangSampling) -> str:
    """The field that `of_sglang` takes the grammar from."""
    return next((kind for kind in _KINDS if getattr(params, kind) is not None), "json_schema")
