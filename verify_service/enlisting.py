"""Whether a drafter fits this target: what it says in `enlist`, checked field by field."""

from __future__ import annotations

import reprlib

from engine.feature_spec import FeatureSpec
from engine.feature_wire import kind_name
from outrider.errors import FailedPrecondition, InvalidArgument, StartupError
from outrider.v1 import common_pb2, verify_pb2
from outrider.wire import MAX_NAME_CHARS, WIRE_VERSION
from verify_service.target import Target

_NAMES = {"drafter_id": 1, "draft_model": 0, "host_id": 0, "boot_id": 0}  # and the least that each must have
_DTYPES = {number: name for name, number in common_pb2.Dtype.items()}
_shown = reprlib.Repr()
_shown.maxstring, _shown.maxlist = 128, 64  # of values that both sides are told


def check_enlist(enlist: verify_pb2.Enlist, target: Target) -> bool:
    """Whether the drafter needs features. FailedPrecondition with both sides' values where the two don't fit."""
    _same("wire_version", enlist.wire_version, WIRE_VERSION)
    if enlist.algorithm not in common_pb2.Algorithm.values()[1:]:
        known = ", ".join(common_pb2.Algorithm.keys()[1:])
        raise InvalidArgument(f"algorithm is {enlist.algorithm}; known are {known}", field="enlist.algorithm")
    for name, least in _NAMES.items():
        size = len(getattr(enlist, name))
        if not least <= size <= MAX_NAME_CHARS:
            raise InvalidArgument(
                f"{name} has {size} characters; it must have {least} to {MAX_NAME_CHARS}", field=f"enlist.{name}"
            )
    if enlist.max_sessions < 1:
        raise InvalidArgument("max_sessions is 0; it must be at least 1", field="enlist.max_sessions")
    model, theirs = target.model, enlist.target
    if theirs.vocab_fingerprint:
        _same("target.vocab_fingerprint", theirs.vocab_fingerprint, model.vocab_fingerprint)
    if theirs.vocab_size > model.vocab_size:
        raise FailedPrecondition(
            f"target.vocab_size is {theirs.vocab_size}; this target's is {model.vocab_size}, and it may be no larger",
            field="enlist.target.vocab_size",
        )
    kind = enlist.features.kind
    if kind not in common_pb2.FeatureKind.values():
        known = ", ".join(common_pb2.FeatureKind.keys())
        raise InvalidArgument(f"features.kind is {kind}; known are {known}", field="enlist.features.kind")
    needs_features = kind not in (common_pb2.FEATURE_KIND_UNSPECIFIED, common_pb2.FEATURE_KIND_NONE)
    if needs_features:
        ours, layers = target.features, list(enlist.features.aux_layers)
        fix = _flag_for(kind, layers)
        _same("target.hidden_size", theirs.hidden_size, model.hidden_size)
        _same("features.kind", common_pb2.FeatureKind.Name(kind), common_pb2.FeatureKind.Name(ours.kind), fix)
        _same("features.aux_layers", layers, list(ours.aux_layers), fix)
        _same("features.width", enlist.features.width or ours.width, ours.width)
        dtype = enlist.features.dtype or ours.dtype
        _same("features.dtype", _DTYPES.get(dtype, dtype), _DTYPES[ours.dtype])
    return needs_features


def _same(name: str, theirs: object, ours: object, fix: str = "") -> None:
    if theirs != ours:
        raise FailedPrecondition(
            f"{name} differs: the drafter has {_shown.repr(theirs)}, this target {_shown.repr(ours)}{fix}",
            field=f"enlist.{name}",
        )


def _flag_for(kind: common_pb2.FeatureKind, layers: list[int]) -> str:
    """What to start verify with for a drafter that needs such features; nothing where no flag says them."""
    if len(layers) > _shown.maxlist:
        return ""
    try:
        spec = FeatureSpec(kind_name(kind), tuple(layers))
    except StartupError:
        return ""
    return f"; start verify with --features {spec}"
