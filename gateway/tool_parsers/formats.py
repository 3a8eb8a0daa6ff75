"""The formats by their names, as `--tool-call-parser` takes them, and the one that a chat template shows."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gateway.message_parts import PartParser
from gateway.tool_parsers import mistral, strict, xml
from gateway.tool_parsers.pythonic import PythonicCalls
from gateway.tool_parsers.strict import Schemas
from gateway.tool_parsers.tagged import TagForm, TaggedCalls
from gateway.tool_schemas import NAME_PATTERN
from outrider.errors import StartupError

_NAME = rf"(?P<name>{NAME_PATTERN})"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes calls.

    `make` gives a parser for functions by their schemas, `strict` the grammar that holds calls to these schemas (None:
    there is none). `markers` must come out of the detokenizer, control tokens though they may be. The parser of a
    `typed` format reads values by the schemas; of others `make` looks at the functions' names alone.
    """

    name: str
    make: Callable[[Schemas], PartParser]
    markers: frozenset[str] = frozenset()
    strict: Callable[[Schemas], str] | None = None
    typed: bool = False


def _tagged(name: str, form: TagForm, grammar: Callable[[Schemas], str] | None = None) -> ToolFormat:
    return ToolFormat(name, lambda schemas: TaggedCalls(form, frozenset(schemas)), form.markers, grammar)


HERMES = _tagged("hermes", TagForm("<tool_call>", ("</tool_call>",)), strict.tagged)
# The list that a forced call's grammar makes.
FORCED = _tagged("forced", TagForm(None, ("[", ",", "]"), only_calls=True))
_LLAMA = _tagged("llama3_json", TagForm(None, (";", ","), may_begin="<|python_tag|>"), strict.bare)
_DEEPSEEK = TagForm(
    begin="<｜tool▁calls▁begin｜>",
    fillers=("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "```"),
    header=re.compile(
        rf"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?{_NAME}(?:<｜tool▁sep｜>)?\s*(?:```json)?\s*(?=\{{)"
    ),
    header_begin="<｜tool▁call▁begin｜>",
    within_header=("<｜tool▁sep｜>",),
)
_KIMI = TagForm(
    begin="<|tool_calls_section_begin|>",
    fillers=("<|tool_call_end|>", "<|tool_calls_section_end|>"),
    header=re.compile(
        rf"<\|tool_call_begin\|>\s*(?:functions\.)?{_NAME}(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*(?=\{{)"
    ),
    header_begin="<|tool_call_begin|>",
    within_header=("<|tool_call_argument_begin|>",),
)
_FORMATS = {
    "hermes": HERMES,
    "qwen": HERMES,
    "qwen25": HERMES,
    "llama3": _LLAMA,
    "llama3_json": _LLAMA,
    "mistral": ToolFormat("mistral", lambda schemas: mistral.MistralCalls(frozenset(schemas)), mistral.MARKERS),
    "pythonic": ToolFormat("pythonic", lambda schemas: PythonicCalls(frozenset(schemas))),
    "qwen3_coder": ToolFormat("qwen3_coder", xml.XmlCalls, xml.MARKERS, typed=True),
    "deepseekv3": _tagged("deepseekv3", _DEEPSEEK),
    "deepseekv31": _tagged("deepseekv31", _DEEPSEEK),
    "kimi_k2": _tagged("kimi_k2", _KIMI),
}
NAMES = tuple(_FORMATS)
# What a template that shows tools to the model has in it, and the format that it teaches.
_SIGNS: Sequence[tuple[str, str]] = (
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    (mistral.BEGIN, "mistral"),
    ("<｜tool▁calls▁begin｜>", "deepseekv3"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters": dictionary of argument', "llama3_json"),
)


def tool_format(name: str | None, template: str | None) -> ToolFormat:
    """The format by its name, else the one that the template shows, else hermes. StartupError for an unknown name."""
    if name is None:
        shown = (shown for sign, shown in _SIGNS if sign in (template or ""))
        return _FORMATS[next(shown, "hermes")]
    found = _FORMATS.get(name.replace("-", "_").lower())
    if found is None:
        raise StartupError(f"--tool-call-parser is {name!r}; it must be one of {', '.join(NAMES)}")
    return found
