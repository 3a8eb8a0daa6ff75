"""Request bodies as types: decoding is validation, and the OpenAPI document can be made from the same types.

Types and bounds only; what needs the model, or several fields at once, is in plan.py. Decoding is strict: no string
becomes a number, no float an int, no int a bool.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from gateway.tool_schemas import ToolCall, ToolChoice, Tools
from outrider.sampling import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from outrider.wire import INT31_MAX, MAX_CHOICES, MAX_NAME_CHARS, MAX_TOP_LOGPROBS

MAX_STOPS = 4
MAX_STOP_CHARS = 256

Temperature = Annotated[float, Meta(ge=0, le=2)]
Probability = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(gt=0, le=2)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
TopK = Annotated[int, Meta(ge=-1, le=INT31_MAX)]
Count = Annotated[int, Meta(ge=1, le=INT31_MAX)]
CountFromZero = Annotated[int, Meta(ge=0, le=INT31_MAX)]
NumChoices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
StopStrings = StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)]
TokenId = Annotated[int, Meta(ge=0, le=INT31_MAX)]
StopTokenIds = Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)]
TokenIds = Annotated[list[TokenId], Meta(min_length=1)]
LogitBias = Annotated[dict[str, float], Meta(max_length=MAX_LOGIT_BIAS)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
Metadata = Annotated[dict[str, Annotated[str, Meta(max_length=512)]], Meta(max_length=16)]
StartLen = Annotated[int, Meta(ge=-1, le=INT31_MAX)]
Priority = Annotated[int, Meta(ge=-(2**31), le=INT31_MAX)]
CacheSalt = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]


class StreamOptions(Struct, kw_only=True):
    """How a stream is reported."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class SpeculativeOptions(Struct, kw_only=True):
    """What a request asks of speculation; absent fields leave it to the server."""

    enabled: bool | None = None
    algorithm: str | None = None
    num_steps: Count | None = None
    topk: Count | None = None
    eagle_topk: Count | None = None  # another name for topk
    num_draft_tokens: Annotated[int, Meta(ge=2, le=INT31_MAX)] | None = None
    accept_threshold_single: Probability | None = None
    accept_threshold_acc: Annotated[float, Meta(gt=0, le=1)] | None = None
    include_origins: bool | None = None
    include_trees: bool | None = None


class SamplingFields(Struct, kw_only=True):
    """What every way of asking for text has in common: shape, end and drafting of the output."""

    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: TopK | None = None
    min_p: Probability | None = None
    n: NumChoices | None = None
    seed: Seed | None = None
    stop: StopStrings | None = None
    stop_token_ids: StopTokenIds | None = None
    min_tokens: CountFromZero | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: LogitBias | None = None
    speculative: SpeculativeOptions | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None


class JsonSchema(Struct, kw_only=True):
    """A schema for the output; with `strict` it is held to all of it, or refused."""

    schema: dict[str, Any] | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, kw_only=True):
    """What the output must match."""

    type: str
    json_schema: JsonSchema | None = None
    schema: dict[str, Any] | None = None  # as llama.cpp and others have it, beside either type of JSON


class StructuredOutputs(Struct, kw_only=True):
    """vLLM's way of saying what the output must match: one of these."""

    json: dict[str, Any] | str | None = None  # a schema, or its text
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=1024)] | None = None
    grammar: str | None = None
    structural_tag: Any = None


class RefusedFields(SamplingFields, kw_only=True):
    """What vLLM and SGLang know beside these, and is refused here (unsupported.py): answers without it are wrong."""

    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    grammar: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None
    stop_regex: Any = None
    use_beam_search: bool | None = None
    repetition_detection: Any = None
    logits_processors: Any = None
    custom_logit_processor: Any = None
    lora_path: Any = None
    session_params: Any = None
    prompt_embeds: Any = None
    truncate_prompt_tokens: Any = None
    prompt_logprobs: Any = None
    add_special_tokens: bool | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: Any = None
    max_thinking_tokens: Any = None
    return_hidden_states: Any = None


class OpenAIFields(RefusedFields, kw_only=True):
    """What chat and plain completions share beyond sampling; the last block is accepted and has no effect."""

    model: str | None = None
    max_tokens: Count | None = None
    response_format: ResponseFormat | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structured_outputs: StructuredOutputs | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    user: str | None = None
    metadata: Metadata | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None


class ContentPart(Struct, kw_only=True):
    """One part of a message; only text can be served."""

    type: str
    text: str | None = None
    refusal: str | None = None


Role = Literal["system", "developer", "user", "assistant", "tool"]


class Message(Struct, kw_only=True):
    """One turn of the conversation; which fields go with which role is checked in messages.py."""

    role: Role
    content: str | Annotated[list[ContentPart], Meta(max_length=1024)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=256)] | None = None
    tool_call_id: str | None = None
    function_call: dict[str, Any] | None = None  # before there were tool_calls; refused
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # vLLM's newer name of it


class Prediction(Struct, kw_only=True):
    """OpenAI's Predicted Outputs: text that the answer is expected to resemble."""

    type: str
    content: str | Annotated[list[ContentPart], Meta(min_length=1, max_length=1024)]


class ChatCompletionRequest(OpenAIFields, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=4096)]
    max_completion_tokens: Count | None = None
    prediction: Prediction | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    separate_reasoning: bool | None = None

    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None
    web_search_options: dict[str, Any] | None = None
    moderation: Any = None
    chat_template: Any = None
    documents: Any = None
    input_ids: Any = None
    echo: bool | None = None
    add_generation_prompt: bool | None = None


class CompletionRequest(OpenAIFields, kw_only=True):
    """POST /v1/completions. `prompt` is text, ids, or a list of either."""

    prompt: str | Annotated[list[str | TokenId | TokenIds], Meta(min_length=1)]
    max_tokens: CountFromZero | None = None  # 0 where only the echoed prompt is wanted
    echo: bool | None = None
    best_of: NumChoices | None = None
    suffix: str | None = None
    logprobs: TopLogprobs | None = None


class SglangSampling(Struct, kw_only=True):
    """SGLang's `sampling_params`; the last block is refused."""

    max_new_tokens: CountFromZero | None = None  # 0: only the prompt's log-probabilities are wanted
    min_new_tokens: CountFromZero | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: TopK | None = None
    min_p: Probability | None = None
    n: NumChoices | None = None
    sampling_seed: Seed | None = None
    stop: StopStrings | None = None
    stop_token_ids: StopTokenIds | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: LogitBias | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None

    structural_tag: Any = None
    stop_regex: Any = None
    no_stop_trim: bool | None = None
    include_stop_str_in_output: bool | None = None
    allowed_token_ids: Any = None
    bad_words: Any = None


class GenerateRequest(Struct, kw_only=True):
    """POST /generate, SGLang's native route. One of `text` and `input_ids`; a list makes a batch."""

    text: str | Annotated[list[str], Meta(min_length=1)] | None = None
    input_ids: Annotated[list[TokenId | TokenIds], Meta(min_length=1)] | None = None
    sampling_params: SglangSampling | Annotated[list[SglangSampling], Meta(min_length=1)] | None = None
    stream: bool | None = None
    rid: str | list[str] | None = None
    speculative: SpeculativeOptions | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: StartLen | list[StartLen] | None = None
    top_logprobs_num: TopLogprobs | list[TopLogprobs] | None = None
    return_text_in_logprobs: bool | None = None
    token_ids_logprob: Any = None
    image_data: Any = None
    audio_data: Any = None
    video_data: Any = None
    input_embeds: Any = None
    lora_path: Any = None
    session_params: Any = None
    custom_logit_processor: Any = None
    return_hidden_states: Any = None
