"""HTTP and text: the OpenAI and SGLang-native APIs in front of verify services. Never imports torch.

The process:
    app, service                       the process; what routes share, and how it comes up
    tls_listener, http_guard           connections: HTTPS, framing, limits, hang-ups
    flow                               how fast they are read, and whether their peers read
    lingering                          those that are closed while their peers still send
    http_refusals                      what is wrong with a request's head
    edge                               around every route: ids, keys, errors, a log line
    callers                            API keys, and the rate of each
    account                            what one request uses
    metrics, info, openapi             /metrics; /v1/models and health; /openapi.json
    page                               the playground at /, files of page/

Bodies:
    body                               read with a limit, parsed strictly, decoded
    schemas, tool_schemas              request bodies as types
    field_names                        what a route calls its fields
    errors, error_values               failures as OpenAI's objects; values as they show them
    unsupported                        what is refused, in one table
    offload                            work that would hold the event loop up

Routes:
    chat, message                      /v1/chat/completions; a choice as a message
    completions                        /v1/completions
    responses_api, responses_schemas   /v1/responses and its types
    responses_input, responses_output  the chat that it is; its items and events
    responses_tools, responses_items   tools and histories of other servers, as a chat can have them
    native, native_output              SGLang's /generate; its answers
    native_info, native_schemas        SGLang's routes about the server; their types
    tokenization                       /tokenize, /detokenize
    tokenization_schemas               their types

From a body to a call:
    messages, conversation             OpenAI's messages; as ids by the chat template
    template                           chat templates in processes of their own
    tokenizer, shield                  text to ids; users' text never becomes control tokens
    plan                               the rules that need the model, and the GenerateRequest
    sampling_defaults                  the makers' values for what is left out
    tools, tool_prompt                 what tools ask of the output; tools in words
    chat_rules                         a chat's grammar, parsers and marks
    constraints                        what the output must match, as the wire's grammar
    json_schema, sayable               schemas walked and moved; as grammars can say them
    branches                           what tells branches of a `oneOf` apart
    patterns, pattern_starts           patterns in Rust's syntax; whether two can meet

Calls to verify:
    replicas, replica                  the verify services behind this gateway; one of them
    served                             what those that serve now are together
    addresses                          what flags name, looked up again and again
    probing                            how replicas are asked whether they are there
    affinity, takers                   who has a prompt's beginning cached; who can take a call
    calls                              many calls on one stream
    backend, route                     calls that survive their replica; where one has been
    call_failures                      how calls end early, and what another replica mends

From tokens to an answer:
    answer, merge                      streams of all choices; several streams as one
    text_stream                        one choice as text, with its counts
    detokenizer, decoder_rules         ids to text as they come; a decoder's rules
    stop                               stop strings in pieces of text
    message_parts                      what a message is made of as it comes
    reasoning                          thinking apart from the answer
    tool_parsers                       calls of tools found in text
    logprobs                           log-probabilities as each API writes them
    prediction                         what became of a request's `prediction`
    totals                             what a request's answers add up to
    responses, chunks                  answers as types; chunks of a stream as bytes
    exchange                           server-sent events with a bounded buffer
"""
