"""How one chat's output is constrained and read: its grammar, its parsers, and the marks that they look for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gateway.constraints import after_reasoning, calls_after_reasoning, grammar_field, of_openai, of_schema
from gateway.message import MessageRules, NamedCall
from gateway.message_parts import PartParser
from gateway.reasoning import ReasoningFormat, ReasoningParser
from gateway.schemas import ChatCompletionRequest
from gateway.service import Ready
from gateway.tool_parsers.formats import FORCED, HERMES, ToolFormat
from gateway.tools import ToolPlan, plan_tools
from outrider.errors import InvalidArgument
from outrider.v1 import common_pb2


@dataclass(frozen=True, slots=True)
class ChatRules:
    """`grammar_field` is what the body calls the field that the grammar comes from."""

    message: MessageRules
    grammar: common_pb2.Grammar | None
    grammar_field: str
    markers: frozenset[str]


def chat_rules(body: ChatCompletionRequest, ready: Ready, prompt_tail: str, continued: str) -> ChatRules:
    """The rules for a body whose prompt ends in `prompt_tail`, and that in an answer's beginning where it has one."""
    plan = plan_tools(body.tools, body.tool_choice, body.parallel_tool_calls)
    form = _format_of(plan, ready)
    grammar, field = _grammar(body, plan, form)
    markers = form.markers if form is not None and plan is not None and not plan.forced else frozenset()
    make_parser = _parser(plan, form)
    reasoning = ready.reasoning if body.separate_reasoning is not False else None
    make_reasoning: Callable[[PartParser | None], ReasoningParser] | None = None
    if reasoning is not None:
        inside = reasoning.starts_inside(prompt_tail, continued)
        reasoned = _with_reasoning(grammar, field, reasoning, ready, inside=inside)
        if grammar is None or reasoned is not None:
            grammar, markers = reasoned, markers | reasoning.markers
            make_reasoning = _reasoning_maker(reasoning, inside=inside)
    named = plan is not None and plan.mode == "named"
    message = MessageRules(make_parser, make_reasoning, named, single=plan is not None and not plan.parallel)
    return ChatRules(message, grammar, field, markers)


def rewrites(body: ChatCompletionRequest, ready: Ready) -> bool:
    """Whether the rules put schemas in other words: where output is held to them, or their types are read."""
    if body.response_format is not None or body.structured_outputs is not None:
        return True
    tools = body.tools or ()
    is_forced = body.tool_choice not in (None, "auto", "none")
    return bool(tools) and (is_forced or ready.tools.typed or any(tool.function.strict for tool in tools))


def _format_of(plan: ToolPlan | None, ready: Ready) -> ToolFormat | None:
    """How calls are written: forced ones as our grammar has it, tools that we put in words as these say."""
    if plan is None or plan.mode == "none":
        return None
    if plan.mode == "required":
        return FORCED
    knows_tools = ready.template is not None and ready.template.chosen(tools=True).takes_tools
    return ready.tools if knows_tools else HERMES


def _parser(plan: ToolPlan | None, form: ToolFormat | None) -> Callable[[], PartParser] | None:
    if plan is None or form is None:
        return None
    if plan.mode == "named":
        (name,) = plan.names
        return lambda: NamedCall(name)
    schemas = plan.parameters() if form.typed else {name: {} for name in plan.names}
    return lambda: form.make(schemas)


def _grammar(
    body: ChatCompletionRequest, plan: ToolPlan | None, form: ToolFormat | None
) -> tuple[common_pb2.Grammar | None, str]:
    """What the output must match, and the field that says so. A call that is forced goes before a response format."""
    asked = of_openai(body)
    if plan is not None and plan.forced:
        plan.check_size()
        return of_schema(plan.forced_schema()), "tools"
    if asked is not None or plan is None or form is None:
        return asked, grammar_field(body)
    if not any(tool.function.strict for tool in plan.tools):
        return None, "tools"
    if form.strict is None:
        raise InvalidArgument(
            f"This server holds calls in the format {form.name} to no schema, unless tool_choice forces them.",
            field="tools", code="unsupported_value",
        )  # fmt: skip
    plan.check_size()
    return common_pb2.Grammar(ebnf=form.strict(plan.parameters())), "tools"


def _with_reasoning(
    grammar: common_pb2.Grammar | None, field: str, form: ReasoningFormat, ready: Ready, *, inside: bool
) -> common_pb2.Grammar | None:
    """The grammar with room for reasoning before it; None where reasoning cannot go before it."""
    if grammar is None or any(ready.codec.is_control(mark) for mark in form.markers):
        return None
    if field == "tools" and grammar.HasField("ebnf"):
        return calls_after_reasoning(grammar.ebnf, form, inside=inside)
    return after_reasoning(grammar, form, inside=inside)


def _reasoning_maker(form: ReasoningFormat, *, inside: bool) -> Callable[[PartParser | None], ReasoningParser]:
    return lambda inner: ReasoningParser(form, inner, inside=inside)
