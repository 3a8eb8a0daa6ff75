from outrider.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class VerifyLinkState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VERIFY_LINK_STATE_UNSPECIFIED: _ClassVar[VerifyLinkState]
    VERIFY_LINK_STATE_CONNECTING: _ClassVar[VerifyLinkState]
    VERIFY_LINK_STATE_ENLISTED: _ClassVar[VerifyLinkState]
    VERIFY_LINK_STATE_REFUSED: _ClassVar[VerifyLinkState]
VERIFY_LINK_STATE_UNSPECIFIED: VerifyLinkState
VERIFY_LINK_STATE_CONNECTING: VerifyLinkState
VERIFY_LINK_STATE_ENLISTED: VerifyLinkState
VERIFY_LINK_STATE_REFUSED: VerifyLinkState

class ProposeRequest(_message.Message):
    __slots__ = ("tokens", "speculative", "features", "prediction_tokens", "corpus_scope")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPECULATIVE_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CORPUS_SCOPE_FIELD_NUMBER: _ClassVar[int]
    tokens: bytes
    speculative: _common_pb2.SpeculativeParams
    features: _common_pb2.Tensor
    prediction_tokens: bytes
    corpus_scope: str
    def __init__(self, tokens: _Optional[bytes] = ..., speculative: _Optional[_Union[_common_pb2.SpeculativeParams, _Mapping]] = ..., features: _Optional[_Union[_common_pb2.Tensor, _Mapping]] = ..., prediction_tokens: _Optional[bytes] = ..., corpus_scope: _Optional[str] = ...) -> None: ...

class ProposeResponse(_message.Message):
    __slots__ = ("tokens", "parents", "scores", "draft_us")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    DRAFT_US_FIELD_NUMBER: _ClassVar[int]
    tokens: bytes
    parents: bytes
    scores: bytes
    draft_us: int
    def __init__(self, tokens: _Optional[bytes] = ..., parents: _Optional[bytes] = ..., scores: _Optional[bytes] = ..., draft_us: _Optional[int] = ...) -> None: ...

class AddCorpusRequest(_message.Message):
    __slots__ = ("corpus_id", "tokens", "corpus_scope")
    CORPUS_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CORPUS_SCOPE_FIELD_NUMBER: _ClassVar[int]
    corpus_id: str
    tokens: bytes
    corpus_scope: str
    def __init__(self, corpus_id: _Optional[str] = ..., tokens: _Optional[bytes] = ..., corpus_scope: _Optional[str] = ...) -> None: ...

class AddCorpusResponse(_message.Message):
    __slots__ = ("tokens_added", "nodes_used")
    TOKENS_ADDED_FIELD_NUMBER: _ClassVar[int]
    NODES_USED_FIELD_NUMBER: _ClassVar[int]
    tokens_added: int
    nodes_used: int
    def __init__(self, tokens_added: _Optional[int] = ..., nodes_used: _Optional[int] = ...) -> None: ...

class RemoveCorpusRequest(_message.Message):
    __slots__ = ("corpus_id", "corpus_scope")
    CORPUS_ID_FIELD_NUMBER: _ClassVar[int]
    CORPUS_SCOPE_FIELD_NUMBER: _ClassVar[int]
    corpus_id: str
    corpus_scope: str
    def __init__(self, corpus_id: _Optional[str] = ..., corpus_scope: _Optional[str] = ...) -> None: ...

class RemoveCorpusResponse(_message.Message):
    __slots__ = ("tokens_removed", "nodes_used")
    TOKENS_REMOVED_FIELD_NUMBER: _ClassVar[int]
    NODES_USED_FIELD_NUMBER: _ClassVar[int]
    tokens_removed: int
    nodes_used: int
    def __init__(self, tokens_removed: _Optional[int] = ..., nodes_used: _Optional[int] = ...) -> None: ...

class DraftServiceGetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DraftServiceGetServerInfoResponse(_message.Message):
    __slots__ = ("version", "wire_version", "algorithm", "draft_model", "drafter_id", "links", "arguments", "corpus_nodes", "corpus_capacity", "corpora")
    class ArgumentsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    DRAFT_MODEL_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_ID_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    CORPUS_NODES_FIELD_NUMBER: _ClassVar[int]
    CORPUS_CAPACITY_FIELD_NUMBER: _ClassVar[int]
    CORPORA_FIELD_NUMBER: _ClassVar[int]
    version: str
    wire_version: int
    algorithm: _common_pb2.Algorithm
    draft_model: str
    drafter_id: str
    links: _containers.RepeatedCompositeFieldContainer[VerifyLink]
    arguments: _containers.ScalarMap[str, str]
    corpus_nodes: int
    corpus_capacity: int
    corpora: _containers.RepeatedCompositeFieldContainer[CorpusInfo]
    def __init__(self, version: _Optional[str] = ..., wire_version: _Optional[int] = ..., algorithm: _Optional[_Union[_common_pb2.Algorithm, str]] = ..., draft_model: _Optional[str] = ..., drafter_id: _Optional[str] = ..., links: _Optional[_Iterable[_Union[VerifyLink, _Mapping]]] = ..., arguments: _Optional[_Mapping[str, str]] = ..., corpus_nodes: _Optional[int] = ..., corpus_capacity: _Optional[int] = ..., corpora: _Optional[_Iterable[_Union[CorpusInfo, _Mapping]]] = ...) -> None: ...

class CorpusInfo(_message.Message):
    __slots__ = ("corpus_id", "corpus_scope", "tokens")
    CORPUS_ID_FIELD_NUMBER: _ClassVar[int]
    CORPUS_SCOPE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    corpus_id: str
    corpus_scope: str
    tokens: int
    def __init__(self, corpus_id: _Optional[str] = ..., corpus_scope: _Optional[str] = ..., tokens: _Optional[int] = ...) -> None: ...

class VerifyLink(_message.Message):
    __slots__ = ("address", "state", "sessions", "proposals", "rounds", "connects", "last_error")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    CONNECTS_FIELD_NUMBER: _ClassVar[int]
    LAST_ERROR_FIELD_NUMBER: _ClassVar[int]
    address: str
    state: VerifyLinkState
    sessions: int
    proposals: int
    rounds: int
    connects: int
    last_error: str
    def __init__(self, address: _Optional[str] = ..., state: _Optional[_Union[VerifyLinkState, str]] = ..., sessions: _Optional[int] = ..., proposals: _Optional[int] = ..., rounds: _Optional[int] = ..., connects: _Optional[int] = ..., last_error: _Optional[str] = ...) -> None: ...
