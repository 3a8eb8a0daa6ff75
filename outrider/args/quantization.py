"""Names of --quantization. Which of them run where, and how, is engine.quantization's to say."""

from __future__ import annotations

from outrider.errors import StartupError

QUANTIZATION, DRAFT_QUANTIZATION = "--quantization", "--speculative-draft-model-quantization"
METHODS = ("int8", "int8_dynamic", "int4", "fp8")
# SGLang's flag has these as well: one is int8_dynamic's other name, the rest are forms of checkpoints or not offered.
_ALIASES = {"w8a8_int8": "int8_dynamic"}
_OF_SGLANG = frozenset({
    "auto-round", "awq", "awq_marlin", "bitsandbytes", "compressed-tensors", "gguf", "gptq", "gptq_marlin", "marlin",
    "modelopt", "modelopt_fp4", "modelopt_fp8", "moe_wna16", "mxfp4", "petit_nvfp4", "qoq", "w4afp8", "w8a8_fp8",
})  # fmt: skip


def quantization_method(name: str, flag: str = QUANTIZATION) -> str:
    """The method by its own name. StartupError for one that there is not."""
    method = _ALIASES.get(name, name)
    if method not in METHODS:
        known = "is SGLang's and not offered here" if name in _OF_SGLANG else "is unknown"
        raise StartupError(f"{flag} {name!r} {known}; there are {', '.join((*METHODS, *_ALIASES))}")
    return method
