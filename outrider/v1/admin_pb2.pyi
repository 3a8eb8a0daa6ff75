from outrider.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DrafterMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DRAFTER_MODE_UNSPECIFIED: _ClassVar[DrafterMode]
    DRAFTER_MODE_ENABLED: _ClassVar[DrafterMode]
    DRAFTER_MODE_DRAINING: _ClassVar[DrafterMode]
    DRAFTER_MODE_DISABLED: _ClassVar[DrafterMode]
DRAFTER_MODE_UNSPECIFIED: DrafterMode
DRAFTER_MODE_ENABLED: DrafterMode
DRAFTER_MODE_DRAINING: DrafterMode
DRAFTER_MODE_DISABLED: DrafterMode

class ListDraftersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListDraftersResponse(_message.Message):
    __slots__ = ("drafters", "disabled_algorithms")
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    DISABLED_ALGORITHMS_FIELD_NUMBER: _ClassVar[int]
    drafters: _containers.RepeatedCompositeFieldContainer[ManagedDrafter]
    disabled_algorithms: _containers.RepeatedScalarFieldContainer[_common_pb2.Algorithm]
    def __init__(self, drafters: _Optional[_Iterable[_Union[ManagedDrafter, _Mapping]]] = ..., disabled_algorithms: _Optional[_Iterable[_Union[_common_pb2.Algorithm, str]]] = ...) -> None: ...

class ManagedDrafter(_message.Message):
    __slots__ = ("drafter_id", "algorithm", "draft_model", "mode", "sessions", "max_sessions", "silent_sessions", "draft_tokens", "accepted_tokens", "gains_nothing")
    DRAFTER_ID_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    DRAFT_MODEL_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    SILENT_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GAINS_NOTHING_FIELD_NUMBER: _ClassVar[int]
    drafter_id: str
    algorithm: _common_pb2.Algorithm
    draft_model: str
    mode: DrafterMode
    sessions: int
    max_sessions: int
    silent_sessions: int
    draft_tokens: int
    accepted_tokens: int
    gains_nothing: bool
    def __init__(self, drafter_id: _Optional[str] = ..., algorithm: _Optional[_Union[_common_pb2.Algorithm, str]] = ..., draft_model: _Optional[str] = ..., mode: _Optional[_Union[DrafterMode, str]] = ..., sessions: _Optional[int] = ..., max_sessions: _Optional[int] = ..., silent_sessions: _Optional[int] = ..., draft_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., gains_nothing: _Optional[bool] = ...) -> None: ...

class SetDrafterModeRequest(_message.Message):
    __slots__ = ("drafter_id", "mode")
    DRAFTER_ID_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    drafter_id: str
    mode: DrafterMode
    def __init__(self, drafter_id: _Optional[str] = ..., mode: _Optional[_Union[DrafterMode, str]] = ...) -> None: ...

class SetDrafterModeResponse(_message.Message):
    __slots__ = ("drafter", "moved_sessions")
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    MOVED_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    drafter: ManagedDrafter
    moved_sessions: int
    def __init__(self, drafter: _Optional[_Union[ManagedDrafter, _Mapping]] = ..., moved_sessions: _Optional[int] = ...) -> None: ...

class SetAlgorithmRequest(_message.Message):
    __slots__ = ("algorithm", "enabled")
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    ENABLED_FIELD_NUMBER: _ClassVar[int]
    algorithm: _common_pb2.Algorithm
    enabled: bool
    def __init__(self, algorithm: _Optional[_Union[_common_pb2.Algorithm, str]] = ..., enabled: _Optional[bool] = ...) -> None: ...

class SetAlgorithmResponse(_message.Message):
    __slots__ = ("moved_sessions",)
    MOVED_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    moved_sessions: int
    def __init__(self, moved_sessions: _Optional[int] = ...) -> None: ...
