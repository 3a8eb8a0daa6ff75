"""What is served and whether it works: /v1/models, /health, /health_generate, /version."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

import outrider
from gateway.answer import collect
from gateway.error_values import no_such_model
from gateway.errors import SHUTTING_DOWN
from gateway.exchange import json_response, request_id
from gateway.plan import Prompt, make_plan
from gateway.responses import ModelCard, ModelList
from gateway.sampling_defaults import OPENAI
from gateway.schemas import SamplingFields
from gateway.service import Ready, gateway_of
from outrider.errors import Unavailable
from outrider.metrics import CONTENT_TYPE


def _card(ready: Ready) -> ModelCard:
    return ModelCard(ready.model_name, ready.created, ready.served.model.model_path, ready.codec.context_length)


async def list_models(request: Request) -> ASGIApp:
    """GET /v1/models: the one that is served."""
    return json_response(ModelList([_card(gateway_of(request).ready())]))


async def get_model(request: Request) -> ASGIApp:
    """GET /v1/models/{id}."""
    ready = gateway_of(request).ready()
    if request.path_params["model"] not in ready.names:
        raise no_such_model(request.path_params["model"], ready.model_name)
    return json_response(_card(ready))


async def health(request: Request) -> ASGIApp:
    """200 when a request made now would find a verify service, else 503."""
    gateway = gateway_of(request)
    if gateway.leaving:
        raise Unavailable(SHUTTING_DOWN)
    gateway.ready()
    return Response(status_code=200)


async def health_generate(request: Request) -> ASGIApp:
    """200 when a token can be generated."""
    gateway = gateway_of(request)
    ready = gateway.ready_for(None)
    plan = make_plan(
        SamplingFields(temperature=0.0), [Prompt([0], "prompt")], request_id=f"health-{request_id(request)}",
        max_tokens=1, codec=ready.codec, served=ready.served, defaults=OPENAI,
    )  # fmt: skip
    await collect(gateway.answers(plan, request, probe=True))
    return Response(status_code=200)


async def metrics(request: Request) -> ASGIApp:
    """GET /metrics: counts in Prometheus' text format."""
    return Response(gateway_of(request).metrics.text(), media_type=CONTENT_TYPE)


async def version(request: Request) -> ASGIApp:
    """GET /version."""
    return json_response({"version": outrider.__version__})
