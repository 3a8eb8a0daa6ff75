from outrider.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]

class ReleaseReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RELEASE_REASON_UNSPECIFIED: _ClassVar[ReleaseReason]
    RELEASE_REASON_CAPACITY: _ClassVar[ReleaseReason]
    RELEASE_REASON_OUT_OF_SYNC: _ClassVar[ReleaseReason]
    RELEASE_REASON_FEATURES: _ClassVar[ReleaseReason]
    RELEASE_REASON_DRAINING: _ClassVar[ReleaseReason]
    RELEASE_REASON_ERROR: _ClassVar[ReleaseReason]

class NextKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NEXT_KIND_UNSPECIFIED: _ClassVar[NextKind]
    NEXT_KIND_PROPOSAL: _ClassVar[NextKind]
    NEXT_KIND_PLAIN: _ClassVar[NextKind]
    NEXT_KIND_WAITING: _ClassVar[NextKind]
    NEXT_KIND_NONE: _ClassVar[NextKind]

class CloseReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CLOSE_REASON_UNSPECIFIED: _ClassVar[CloseReason]
    CLOSE_REASON_FINISHED: _ClassVar[CloseReason]
    CLOSE_REASON_CANCELLED: _ClassVar[CloseReason]
    CLOSE_REASON_REASSIGNED: _ClassVar[CloseReason]
    CLOSE_REASON_QUARANTINED: _ClassVar[CloseReason]
    CLOSE_REASON_SLOW: _ClassVar[CloseReason]
    CLOSE_REASON_ERROR: _ClassVar[CloseReason]

class RejectReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REJECT_REASON_UNSPECIFIED: _ClassVar[RejectReason]
    REJECT_REASON_STALE: _ClassVar[RejectReason]
    REJECT_REASON_REPLAYED: _ClassVar[RejectReason]
    REJECT_REASON_FOREIGN: _ClassVar[RejectReason]
    REJECT_REASON_MALFORMED: _ClassVar[RejectReason]
    REJECT_REASON_CROWDED: _ClassVar[RejectReason]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
RELEASE_REASON_UNSPECIFIED: ReleaseReason
RELEASE_REASON_CAPACITY: ReleaseReason
RELEASE_REASON_OUT_OF_SYNC: ReleaseReason
RELEASE_REASON_FEATURES: ReleaseReason
RELEASE_REASON_DRAINING: ReleaseReason
RELEASE_REASON_ERROR: ReleaseReason
NEXT_KIND_UNSPECIFIED: NextKind
NEXT_KIND_PROPOSAL: NextKind
NEXT_KIND_PLAIN: NextKind
NEXT_KIND_WAITING: NextKind
NEXT_KIND_NONE: NextKind
CLOSE_REASON_UNSPECIFIED: CloseReason
CLOSE_REASON_FINISHED: CloseReason
CLOSE_REASON_CANCELLED: CloseReason
CLOSE_REASON_REASSIGNED: CloseReason
CLOSE_REASON_QUARANTINED: CloseReason
CLOSE_REASON_SLOW: CloseReason
CLOSE_REASON_ERROR: CloseReason
REJECT_REASON_UNSPECIFIED: RejectReason
REJECT_REASON_STALE: RejectReason
REJECT_REASON_REPLAYED: RejectReason
REJECT_REASON_FOREIGN: RejectReason
REJECT_REASON_MALFORMED: RejectReason
REJECT_REASON_CROWDED: RejectReason

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "prompt_tokens", "sampling", "speculative", "num_choices", "first_choice_index", "resumed_tokens", "logprobs", "top_logprobs", "prompt_logprobs", "prediction_tokens", "corpus_scope", "priority", "include_trees", "cache_salt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SPECULATIVE_FIELD_NUMBER: _ClassVar[int]
    NUM_CHOICES_FIELD_NUMBER: _ClassVar[int]
    FIRST_CHOICE_INDEX_FIELD_NUMBER: _ClassVar[int]
    RESUMED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CORPUS_SCOPE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_TREES_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_tokens: bytes
    sampling: _common_pb2.SamplingParams
    speculative: _common_pb2.SpeculativeParams
    num_choices: int
    first_choice_index: int
    resumed_tokens: bytes
    logprobs: bool
    top_logprobs: int
    prompt_logprobs: bool
    prediction_tokens: bytes
    corpus_scope: str
    priority: int
    include_trees: bool
    cache_salt: str
    def __init__(self, request_id: _Optional[str] = ..., prompt_tokens: _Optional[bytes] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., speculative: _Optional[_Union[_common_pb2.SpeculativeParams, _Mapping]] = ..., num_choices: _Optional[int] = ..., first_choice_index: _Optional[int] = ..., resumed_tokens: _Optional[bytes] = ..., logprobs: _Optional[bool] = ..., top_logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[bool] = ..., prediction_tokens: _Optional[bytes] = ..., corpus_scope: _Optional[str] = ..., priority: _Optional[int] = ..., include_trees: _Optional[bool] = ..., cache_salt: _Optional[str] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("choice_index", "tokens", "num_accepted", "logprobs", "prompt_logprobs", "start", "finish", "tree", "num_drafted", "algorithm")
    CHOICE_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTED_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    choice_index: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    num_accepted: int
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    start: GenerateStart
    finish: GenerateFinish
    tree: VerifiedTree
    num_drafted: int
    algorithm: _common_pb2.Algorithm
    def __init__(self, choice_index: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., num_accepted: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., start: _Optional[_Union[GenerateStart, _Mapping]] = ..., finish: _Optional[_Union[GenerateFinish, _Mapping]] = ..., tree: _Optional[_Union[VerifiedTree, _Mapping]] = ..., num_drafted: _Optional[int] = ..., algorithm: _Optional[_Union[_common_pb2.Algorithm, str]] = ...) -> None: ...

class GenerateStart(_message.Message):
    __slots__ = ("seed", "boot_id", "numerics_id", "cached_tokens")
    SEED_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_ID_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    seed: int
    boot_id: str
    numerics_id: str
    cached_tokens: int
    def __init__(self, seed: _Optional[int] = ..., boot_id: _Optional[str] = ..., numerics_id: _Optional[str] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class GenerateFinish(_message.Message):
    __slots__ = ("reason", "stop_token_id", "prompt_tokens", "completion_tokens", "speculation", "queue_us", "prefill_us", "decode_us")
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    PREFILL_US_FIELD_NUMBER: _ClassVar[int]
    DECODE_US_FIELD_NUMBER: _ClassVar[int]
    reason: FinishReason
    stop_token_id: int
    prompt_tokens: int
    completion_tokens: int
    speculation: _common_pb2.SpeculationStats
    queue_us: int
    prefill_us: int
    decode_us: int
    def __init__(self, reason: _Optional[_Union[FinishReason, str]] = ..., stop_token_id: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., speculation: _Optional[_Union[_common_pb2.SpeculationStats, _Mapping]] = ..., queue_us: _Optional[int] = ..., prefill_us: _Optional[int] = ..., decode_us: _Optional[int] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token", "logprob", "top")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    token: int
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TopLogprob]
    def __init__(self, token: _Optional[int] = ..., logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TopLogprob, _Mapping]]] = ...) -> None: ...

class TopLogprob(_message.Message):
    __slots__ = ("token", "logprob")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token: int
    logprob: float
    def __init__(self, token: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class VerifiedTree(_message.Message):
    __slots__ = ("tokens", "parents", "accepted", "probabilities", "algorithm", "draft_us", "verify_us")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    DRAFT_US_FIELD_NUMBER: _ClassVar[int]
    VERIFY_US_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    accepted: _containers.RepeatedScalarFieldContainer[bool]
    probabilities: _containers.RepeatedScalarFieldContainer[float]
    algorithm: _common_pb2.Algorithm
    draft_us: int
    verify_us: int
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., parents: _Optional[_Iterable[int]] = ..., accepted: _Optional[_Iterable[bool]] = ..., probabilities: _Optional[_Iterable[float]] = ..., algorithm: _Optional[_Union[_common_pb2.Algorithm, str]] = ..., draft_us: _Optional[int] = ..., verify_us: _Optional[int] = ...) -> None: ...

class GenerateManyRequest(_message.Message):
    __slots__ = ("begin", "cancel")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    begin: _containers.RepeatedCompositeFieldContainer[GenerateCall]
    cancel: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, begin: _Optional[_Iterable[_Union[GenerateCall, _Mapping]]] = ..., cancel: _Optional[_Iterable[int]] = ...) -> None: ...

class GenerateCall(_message.Message):
    __slots__ = ("call", "request", "timeout_ms", "traceparent")
    CALL_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    call: int
    request: GenerateRequest
    timeout_ms: int
    traceparent: str
    def __init__(self, call: _Optional[int] = ..., request: _Optional[_Union[GenerateRequest, _Mapping]] = ..., timeout_ms: _Optional[int] = ..., traceparent: _Optional[str] = ...) -> None: ...

class GenerateManyResponse(_message.Message):
    __slots__ = ("outputs",)
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    outputs: _containers.RepeatedCompositeFieldContainer[CallOutput]
    def __init__(self, outputs: _Optional[_Iterable[_Union[CallOutput, _Mapping]]] = ...) -> None: ...

class CallOutput(_message.Message):
    __slots__ = ("call", "response", "end")
    CALL_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    call: int
    response: GenerateResponse
    end: CallEnd
    def __init__(self, call: _Optional[int] = ..., response: _Optional[_Union[GenerateResponse, _Mapping]] = ..., end: _Optional[_Union[CallEnd, _Mapping]] = ...) -> None: ...

class CallEnd(_message.Message):
    __slots__ = ("code", "message", "details")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    details: bytes
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ..., details: _Optional[bytes] = ...) -> None: ...

class SpeculateRequest(_message.Message):
    __slots__ = ("enlist", "proposals", "releases")
    ENLIST_FIELD_NUMBER: _ClassVar[int]
    PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    RELEASES_FIELD_NUMBER: _ClassVar[int]
    enlist: Enlist
    proposals: Proposals
    releases: Releases
    def __init__(self, enlist: _Optional[_Union[Enlist, _Mapping]] = ..., proposals: _Optional[_Union[Proposals, _Mapping]] = ..., releases: _Optional[_Union[Releases, _Mapping]] = ...) -> None: ...

class Enlist(_message.Message):
    __slots__ = ("drafter_id", "wire_version", "algorithm", "draft_model", "target", "max_sessions", "features", "host_id", "boot_id")
    DRAFTER_ID_FIELD_NUMBER: _ClassVar[int]
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    DRAFT_MODEL_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    drafter_id: str
    wire_version: int
    algorithm: _common_pb2.Algorithm
    draft_model: str
    target: _common_pb2.ModelInfo
    max_sessions: int
    features: _common_pb2.FeatureLayout
    host_id: str
    boot_id: str
    def __init__(self, drafter_id: _Optional[str] = ..., wire_version: _Optional[int] = ..., algorithm: _Optional[_Union[_common_pb2.Algorithm, str]] = ..., draft_model: _Optional[str] = ..., target: _Optional[_Union[_common_pb2.ModelInfo, _Mapping]] = ..., max_sessions: _Optional[int] = ..., features: _Optional[_Union[_common_pb2.FeatureLayout, _Mapping]] = ..., host_id: _Optional[str] = ..., boot_id: _Optional[str] = ...) -> None: ...

class Proposals(_message.Message):
    __slots__ = ("proposals", "consumed_slot_seq", "shared_memory_nonce")
    PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    CONSUMED_SLOT_SEQ_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_NONCE_FIELD_NUMBER: _ClassVar[int]
    proposals: _containers.RepeatedCompositeFieldContainer[Proposal]
    consumed_slot_seq: int
    shared_memory_nonce: bytes
    def __init__(self, proposals: _Optional[_Iterable[_Union[Proposal, _Mapping]]] = ..., consumed_slot_seq: _Optional[int] = ..., shared_memory_nonce: _Optional[bytes] = ...) -> None: ...

class Proposal(_message.Message):
    __slots__ = ("session", "generation", "proposal_id", "base_len", "assumed", "tokens", "parents", "scores", "draft_us", "from_prediction")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    ASSUMED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    DRAFT_US_FIELD_NUMBER: _ClassVar[int]
    FROM_PREDICTION_FIELD_NUMBER: _ClassVar[int]
    session: int
    generation: int
    proposal_id: int
    base_len: int
    assumed: bytes
    tokens: bytes
    parents: bytes
    scores: bytes
    draft_us: int
    from_prediction: bytes
    def __init__(self, session: _Optional[int] = ..., generation: _Optional[int] = ..., proposal_id: _Optional[int] = ..., base_len: _Optional[int] = ..., assumed: _Optional[bytes] = ..., tokens: _Optional[bytes] = ..., parents: _Optional[bytes] = ..., scores: _Optional[bytes] = ..., draft_us: _Optional[int] = ..., from_prediction: _Optional[bytes] = ...) -> None: ...

class Releases(_message.Message):
    __slots__ = ("releases",)
    RELEASES_FIELD_NUMBER: _ClassVar[int]
    releases: _containers.RepeatedCompositeFieldContainer[Release]
    def __init__(self, releases: _Optional[_Iterable[_Union[Release, _Mapping]]] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("session", "generation", "reason", "detail")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    session: int
    generation: int
    reason: ReleaseReason
    detail: str
    def __init__(self, session: _Optional[int] = ..., generation: _Optional[int] = ..., reason: _Optional[_Union[ReleaseReason, str]] = ..., detail: _Optional[str] = ...) -> None: ...

class SpeculateResponse(_message.Message):
    __slots__ = ("enlisted", "round")
    ENLISTED_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    enlisted: Enlisted
    round: Round
    def __init__(self, enlisted: _Optional[_Union[Enlisted, _Mapping]] = ..., round: _Optional[_Union[Round, _Mapping]] = ...) -> None: ...

class Enlisted(_message.Message):
    __slots__ = ("boot_id", "target", "limits", "features", "shared_memory", "features_token")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_FIELD_NUMBER: _ClassVar[int]
    FEATURES_TOKEN_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    target: _common_pb2.ModelInfo
    limits: DrafterLimits
    features: _common_pb2.FeatureLayout
    shared_memory: SharedMemoryRing
    features_token: bytes
    def __init__(self, boot_id: _Optional[str] = ..., target: _Optional[_Union[_common_pb2.ModelInfo, _Mapping]] = ..., limits: _Optional[_Union[DrafterLimits, _Mapping]] = ..., features: _Optional[_Union[_common_pb2.FeatureLayout, _Mapping]] = ..., shared_memory: _Optional[_Union[SharedMemoryRing, _Mapping]] = ..., features_token: _Optional[bytes] = ...) -> None: ...

class DrafterLimits(_message.Message):
    __slots__ = ("max_proposal_nodes", "max_assumed_tokens", "max_proposals_per_session", "drafter_outbox_bytes", "max_sessions", "max_verify_nodes")
    MAX_PROPOSAL_NODES_FIELD_NUMBER: _ClassVar[int]
    MAX_ASSUMED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_PROPOSALS_PER_SESSION_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_OUTBOX_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_VERIFY_NODES_FIELD_NUMBER: _ClassVar[int]
    max_proposal_nodes: int
    max_assumed_tokens: int
    max_proposals_per_session: int
    drafter_outbox_bytes: int
    max_sessions: int
    max_verify_nodes: int
    def __init__(self, max_proposal_nodes: _Optional[int] = ..., max_assumed_tokens: _Optional[int] = ..., max_proposals_per_session: _Optional[int] = ..., drafter_outbox_bytes: _Optional[int] = ..., max_sessions: _Optional[int] = ..., max_verify_nodes: _Optional[int] = ...) -> None: ...

class SharedMemoryRing(_message.Message):
    __slots__ = ("name", "num_slots", "slot_bytes", "header_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    HEADER_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    num_slots: int
    slot_bytes: int
    header_bytes: int
    def __init__(self, name: _Optional[str] = ..., num_slots: _Optional[int] = ..., slot_bytes: _Optional[int] = ..., header_bytes: _Optional[int] = ...) -> None: ...

class Round(_message.Message):
    __slots__ = ("opened", "features", "verdicts", "closed", "rejected", "slot_seq_end")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    VERDICTS_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    SLOT_SEQ_END_FIELD_NUMBER: _ClassVar[int]
    opened: _containers.RepeatedCompositeFieldContainer[Opened]
    features: _containers.RepeatedCompositeFieldContainer[SessionFeatures]
    verdicts: _containers.RepeatedCompositeFieldContainer[Verdict]
    closed: _containers.RepeatedCompositeFieldContainer[Closed]
    rejected: _containers.RepeatedCompositeFieldContainer[Rejected]
    slot_seq_end: int
    def __init__(self, opened: _Optional[_Iterable[_Union[Opened, _Mapping]]] = ..., features: _Optional[_Iterable[_Union[SessionFeatures, _Mapping]]] = ..., verdicts: _Optional[_Iterable[_Union[Verdict, _Mapping]]] = ..., closed: _Optional[_Iterable[_Union[Closed, _Mapping]]] = ..., rejected: _Optional[_Iterable[_Union[Rejected, _Mapping]]] = ..., slot_seq_end: _Optional[int] = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ("session", "generation", "tokens", "prompt_len", "features_from_pos", "speculative", "remaining_tokens", "remaining_context", "corpus_scope", "prediction_tokens", "shares_prefix_with", "traceparent")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LEN_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FROM_POS_FIELD_NUMBER: _ClassVar[int]
    SPECULATIVE_FIELD_NUMBER: _ClassVar[int]
    REMAINING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REMAINING_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    CORPUS_SCOPE_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SHARES_PREFIX_WITH_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    session: int
    generation: int
    tokens: bytes
    prompt_len: int
    features_from_pos: int
    speculative: _common_pb2.SpeculativeParams
    remaining_tokens: int
    remaining_context: int
    corpus_scope: str
    prediction_tokens: bytes
    shares_prefix_with: int
    traceparent: str
    def __init__(self, session: _Optional[int] = ..., generation: _Optional[int] = ..., tokens: _Optional[bytes] = ..., prompt_len: _Optional[int] = ..., features_from_pos: _Optional[int] = ..., speculative: _Optional[_Union[_common_pb2.SpeculativeParams, _Mapping]] = ..., remaining_tokens: _Optional[int] = ..., remaining_context: _Optional[int] = ..., corpus_scope: _Optional[str] = ..., prediction_tokens: _Optional[bytes] = ..., shares_prefix_with: _Optional[int] = ..., traceparent: _Optional[str] = ...) -> None: ...

class SessionFeatures(_message.Message):
    __slots__ = ("session", "generation", "rows")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    session: int
    generation: int
    rows: _common_pb2.FeatureRows
    def __init__(self, session: _Optional[int] = ..., generation: _Optional[int] = ..., rows: _Optional[_Union[_common_pb2.FeatureRows, _Mapping]] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("session", "generation", "base_len", "tokens", "credits", "features", "verify_us", "batch_tokens", "node_budget", "steps", "next")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    VERIFY_US_FIELD_NUMBER: _ClassVar[int]
    BATCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NODE_BUDGET_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    session: int
    generation: int
    base_len: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    credits: _containers.RepeatedCompositeFieldContainer[Credit]
    features: _common_pb2.FeatureRows
    verify_us: int
    batch_tokens: int
    node_budget: int
    steps: int
    next: Next
    def __init__(self, session: _Optional[int] = ..., generation: _Optional[int] = ..., base_len: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., credits: _Optional[_Iterable[_Union[Credit, _Mapping]]] = ..., features: _Optional[_Union[_common_pb2.FeatureRows, _Mapping]] = ..., verify_us: _Optional[int] = ..., batch_tokens: _Optional[int] = ..., node_budget: _Optional[int] = ..., steps: _Optional[int] = ..., next: _Optional[_Union[Next, _Mapping]] = ...) -> None: ...

class Credit(_message.Message):
    __slots__ = ("proposal_id", "root_node", "nodes_verified", "accepted_nodes")
    PROPOSAL_ID_FIELD_NUMBER: _ClassVar[int]
    ROOT_NODE_FIELD_NUMBER: _ClassVar[int]
    NODES_VERIFIED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_NODES_FIELD_NUMBER: _ClassVar[int]
    proposal_id: int
    root_node: int
    nodes_verified: int
    accepted_nodes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, proposal_id: _Optional[int] = ..., root_node: _Optional[int] = ..., nodes_verified: _Optional[int] = ..., accepted_nodes: _Optional[_Iterable[int]] = ...) -> None: ...

class Next(_message.Message):
    __slots__ = ("kind", "base_len", "proposal_id", "root_node", "nodes_kept")
    KIND_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_ID_FIELD_NUMBER: _ClassVar[int]
    ROOT_NODE_FIELD_NUMBER: _ClassVar[int]
    NODES_KEPT_FIELD_NUMBER: _ClassVar[int]
    kind: NextKind
    base_len: int
    proposal_id: int
    root_node: int
    nodes_kept: int
    def __init__(self, kind: _Optional[_Union[NextKind, str]] = ..., base_len: _Optional[int] = ..., proposal_id: _Optional[int] = ..., root_node: _Optional[int] = ..., nodes_kept: _Optional[int] = ...) -> None: ...

class Closed(_message.Message):
    __slots__ = ("session", "generation", "reason")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    session: int
    generation: int
    reason: CloseReason
    def __init__(self, session: _Optional[int] = ..., generation: _Optional[int] = ..., reason: _Optional[_Union[CloseReason, str]] = ...) -> None: ...

class Rejected(_message.Message):
    __slots__ = ("session", "generation", "proposal_id", "reason", "detail")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    session: int
    generation: int
    proposal_id: int
    reason: RejectReason
    detail: str
    def __init__(self, session: _Optional[int] = ..., generation: _Optional[int] = ..., proposal_id: _Optional[int] = ..., reason: _Optional[_Union[RejectReason, str]] = ..., detail: _Optional[str] = ...) -> None: ...

class StreamFeaturesRequest(_message.Message):
    __slots__ = ("session", "generation", "boot_id", "first_pos", "count", "drafter_id", "features_token")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_POS_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_ID_FIELD_NUMBER: _ClassVar[int]
    FEATURES_TOKEN_FIELD_NUMBER: _ClassVar[int]
    session: int
    generation: int
    boot_id: str
    first_pos: int
    count: int
    drafter_id: str
    features_token: bytes
    def __init__(self, session: _Optional[int] = ..., generation: _Optional[int] = ..., boot_id: _Optional[str] = ..., first_pos: _Optional[int] = ..., count: _Optional[int] = ..., drafter_id: _Optional[str] = ..., features_token: _Optional[bytes] = ...) -> None: ...

class StreamFeaturesResponse(_message.Message):
    __slots__ = ("first_pos", "rows")
    FIRST_POS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    first_pos: int
    rows: _common_pb2.Tensor
    def __init__(self, first_pos: _Optional[int] = ..., rows: _Optional[_Union[_common_pb2.Tensor, _Mapping]] = ...) -> None: ...

class VerifyServiceGetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VerifyServiceGetServerInfoResponse(_message.Message):
    __slots__ = ("version", "wire_version", "boot_id", "model", "features", "limits", "state", "speculation", "drafters", "arguments")
    class ArgumentsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    version: str
    wire_version: int
    boot_id: str
    model: _common_pb2.ModelInfo
    features: _common_pb2.FeatureLayout
    limits: RequestLimits
    state: EngineState
    speculation: _common_pb2.SpeculationStats
    drafters: _containers.RepeatedCompositeFieldContainer[DrafterState]
    arguments: _containers.ScalarMap[str, str]
    def __init__(self, version: _Optional[str] = ..., wire_version: _Optional[int] = ..., boot_id: _Optional[str] = ..., model: _Optional[_Union[_common_pb2.ModelInfo, _Mapping]] = ..., features: _Optional[_Union[_common_pb2.FeatureLayout, _Mapping]] = ..., limits: _Optional[_Union[RequestLimits, _Mapping]] = ..., state: _Optional[_Union[EngineState, _Mapping]] = ..., speculation: _Optional[_Union[_common_pb2.SpeculationStats, _Mapping]] = ..., drafters: _Optional[_Iterable[_Union[DrafterState, _Mapping]]] = ..., arguments: _Optional[_Mapping[str, str]] = ...) -> None: ...

class RequestLimits(_message.Message):
    __slots__ = ("context_length", "max_running_requests", "max_queued_requests", "max_choices", "max_total_tokens")
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_CHOICES_FIELD_NUMBER: _ClassVar[int]
    MAX_TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    context_length: int
    max_running_requests: int
    max_queued_requests: int
    max_choices: int
    max_total_tokens: int
    def __init__(self, context_length: _Optional[int] = ..., max_running_requests: _Optional[int] = ..., max_queued_requests: _Optional[int] = ..., max_choices: _Optional[int] = ..., max_total_tokens: _Optional[int] = ...) -> None: ...

class EngineState(_message.Message):
    __slots__ = ("running_requests", "queued_requests", "total_pages", "free_pages", "page_size", "generation_tokens_per_s", "steps", "preemptions", "draining")
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_PAGES_FIELD_NUMBER: _ClassVar[int]
    FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    running_requests: int
    queued_requests: int
    total_pages: int
    free_pages: int
    page_size: int
    generation_tokens_per_s: float
    steps: int
    preemptions: int
    draining: bool
    def __init__(self, running_requests: _Optional[int] = ..., queued_requests: _Optional[int] = ..., total_pages: _Optional[int] = ..., free_pages: _Optional[int] = ..., page_size: _Optional[int] = ..., generation_tokens_per_s: _Optional[float] = ..., steps: _Optional[int] = ..., preemptions: _Optional[int] = ..., draining: _Optional[bool] = ...) -> None: ...

class DrafterState(_message.Message):
    __slots__ = ("drafter_id", "algorithm", "draft_model", "sessions", "proposals")
    class ProposalsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    DRAFTER_ID_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    DRAFT_MODEL_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    drafter_id: str
    algorithm: _common_pb2.Algorithm
    draft_model: str
    sessions: int
    proposals: _containers.ScalarMap[str, int]
    def __init__(self, drafter_id: _Optional[str] = ..., algorithm: _Optional[_Union[_common_pb2.Algorithm, str]] = ..., draft_model: _Optional[str] = ..., sessions: _Optional[int] = ..., proposals: _Optional[_Mapping[str, int]] = ...) -> None: ...

class FlushCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushCacheResponse(_message.Message):
    __slots__ = ("freed_pages", "kept_pages")
    FREED_PAGES_FIELD_NUMBER: _ClassVar[int]
    KEPT_PAGES_FIELD_NUMBER: _ClassVar[int]
    freed_pages: int
    kept_pages: int
    def __init__(self, freed_pages: _Optional[int] = ..., kept_pages: _Optional[int] = ...) -> None: ...
