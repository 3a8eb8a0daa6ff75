"""GET /openapi.json: made from the types that decode requests and encode answers."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

import outrider
from gateway.errors import ErrorEnvelope
from gateway.native_schemas import (
    FlushReport,
    GenerateResult,
    LoadReport,
    ModelInfoReport,
    ServerReport,
    VersionReport,
)
from gateway.responses import ChatCompletion, Completion, ModelCard, ModelList
from gateway.responses_schemas import ResponseObject, ResponsesRequest
from gateway.schemas import ChatCompletionRequest, CompletionRequest, GenerateRequest
from gateway.tokenization import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse

_REFERENCES = "#/components/schemas/{name}"
# One server-sent event; the data is JSON but for the last one of a chat, [DONE].
_EVENT = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string", "contentMediaType": "application/json"}},
    "required": ["data"],
}


@dataclass(frozen=True, slots=True)
class _Operation:
    """One method of one path. `answer` is the type of its JSON, None for an empty one or for text."""

    method: str
    path: str
    summary: str
    body: Any = None
    answer: Any = None
    streams: bool = False
    text: bool = False
    parameter: str | None = None


_OPERATIONS = (
    _Operation("post", "/v1/chat/completions", "Answer a conversation.", ChatCompletionRequest, ChatCompletion, True),
    _Operation("post", "/v1/completions", "Continue a text.", CompletionRequest, Completion, True),
    _Operation("post", "/v1/responses", "Answer, in items.", ResponsesRequest, ResponseObject, True),
    _Operation("get", "/v1/models", "The model that is served.", answer=ModelList),
    _Operation("get", "/v1/models/{model}", "One model.", answer=ModelCard, parameter="model"),
    _Operation("post", "/tokenize", "Text or messages as token ids.", TokenizeRequest, TokenizeResponse),
    _Operation("post", "/detokenize", "Token ids as text.", DetokenizeRequest, DetokenizeResponse),
    _Operation("post", "/generate", "SGLang's own way to generate.", GenerateRequest,
               GenerateResult | list[GenerateResult], True),
    _Operation("get", "/get_model_info", "The model's files and sizes.", answer=ModelInfoReport),
    _Operation("get", "/get_server_info", "Settings and state of the verify services.", answer=ServerReport),
    _Operation("get", "/server_info", "The same.", answer=ServerReport),
    _Operation("get", "/v1/loads", "What the verify services have to do.", answer=LoadReport),
    _Operation("post", "/flush_cache", "Empty the prefix caches.", answer=FlushReport),
    _Operation("get", "/health", "Whether a request made now would be served."),
    _Operation("get", "/health_generate", "Whether a token can be generated."),
    _Operation("get", "/version", "The release.", answer=VersionReport),
    _Operation("get", "/metrics", "Counts for Prometheus.", text=True),
)  # fmt: skip


@functools.cache
def document() -> bytes:
    """The OpenAPI 3.1 document, as JSON."""
    kinds = [kind for operation in _OPERATIONS for kind in (operation.body, operation.answer) if kind is not None]
    schemas, components = msgspec.json.schema_components([*kinds, ErrorEnvelope], ref_template=_REFERENCES)
    by_kind = dict(zip(map(id, [*kinds, ErrorEnvelope]), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for operation in _OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation, by_kind)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "Outrider", "version": outrider.__version__,
                     "description": "OpenAI's API and SGLang's native one, over speculative decoding."},
            "paths": paths,
            "components": {
                "schemas": components,
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            },
            "security": [{}, {"key": []}],
        }
    )  # fmt: skip


def _described(operation: _Operation, schemas: dict[int, Any]) -> dict[str, Any]:
    failed = {"description": "An error in OpenAI's form.", **_content("application/json", schemas[id(ErrorEnvelope)])}
    described: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": operation.method + operation.path.replace("/", "_").replace("{", "").replace("}", ""),
        "responses": {"200": _answered(operation, schemas), "default": failed},
    }
    if operation.body is not None:
        described["requestBody"] = {"required": True, **_content("application/json", schemas[id(operation.body)])}
    if operation.parameter is not None:
        place = {"name": operation.parameter, "in": "path", "required": True, "schema": {"type": "string"}}
        described["parameters"] = [place]
    return described


def _answered(operation: _Operation, schemas: dict[int, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {"description": "The answer."}
    if operation.answer is not None:
        made.update(_content("application/json", schemas[id(operation.answer)]))
    if operation.streams:
        made["content"]["text/event-stream"] = {"schema": _EVENT}
    if operation.text:
        made.update(_content("text/plain", {"type": "string"}))
    return made


def _content(kind: str, schema: Any) -> dict[str, Any]:
    return {"content": {kind: {"schema": schema}}}


async def openapi(request: Request) -> ASGIApp:
    """GET /openapi.json."""
    return Response(document(), media_type="application/json")
