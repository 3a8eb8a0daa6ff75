"""From the names of a checkpoint's tensors to a head's family and our names for its tensors.

What a checkpoint is, its tensors tell better than the `architectures` of its config.json, which EAGLE's own
repositories, speculators and multi-token-prediction checkpoints fill in differently.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from outrider.errors import StartupError

EMBEDDING = "embed_tokens.weight"
OUTPUT_HEAD = "lm_head.weight"
DRAFT_TO_TARGET = "d2t"
TARGET_TO_DRAFT = "t2d"

# Carried along by exports, and computed or taken from the target here.
_IGNORED = ("rotary_emb.inv_freq", "verifier_norm.weight", "verifier_lm_head.weight")
_EAGLE3_SIGNS = ("layers.0.hidden_norm.weight", DRAFT_TO_TARGET)
_NEXTN = re.compile(r"model\.layers\.(\d+)\.(.+)")
_MIMO = re.compile(r"model\.mtp_layers\.(\d+)\.(.+)")
_MULTI_LAYER = re.compile(r"model\.mtp\.layers\.(\d+)\.(.+)")
# What the families of multi-token prediction call tensors of ours.
_MTP_NAMES = {
    "nextn": {"norm.weight": "shared_head.norm.weight"},
    "mimo": {
        "enorm.weight": "token_layernorm.weight",
        "hnorm.weight": "hidden_layernorm.weight",
        "eh_proj.weight": "input_proj.weight",
        "norm.weight": "final_layernorm.weight",
    },
    "multi-layer": {
        "norm.weight": "final_layernorm.weight",
        "post_attention_layernorm.weight": "pre_mlp_layernorm.weight",
    },
}
_FROM_MTP = {stored: own for names in _MTP_NAMES.values() for own, stored in names.items()}


@dataclass(frozen=True, slots=True)
class HeadNames:
    """A head's family, its number of stages, and `stored`: our name for a tensor -> the checkpoint's.

    prefixes: before the names of each stage's tensors in the checkpoint; none in EAGLE's.
    """

    family: str
    num_stages: int
    stored: Mapping[str, str]
    prefixes: tuple[str, ...] = ()

    def in_file(self, name: str) -> str:
        """The checkpoint's name for a tensor of ours, of a missing one what it should be."""
        if name in self.stored:
            return self.stored[name]
        if self.prefixes:
            stage, _, rest = name.partition(".")
            return self.prefixes[int(stage)] + _MTP_NAMES[self.family].get(rest, rest)
        spells_it_so = any("layers.0." in stored for stored in self.stored.values())  # speculators
        return name if spells_it_so else published_name(self.family, name)


class NoHeadError(StartupError):
    """Something that holds no draft head at all."""


def head_names(names: Iterable[str], where: object, *, family: str | None = None) -> HeadNames:
    """Tells what tensors called `names` are; `where` is named in a NoHeadError when they are no head that we know.

    family: as config.json names it. Any one sign of EAGLE-3 makes it that, so that what is missing can be named.
    StartupError for layers of multi-token prediction that are of a kind or number not served.
    """
    every = list(names)
    if any(name.endswith(".eh_proj.weight") and _NEXTN.fullmatch(name) for name in every):
        return _stages(every, "nextn", _NEXTN, where)
    if any(_MIMO.fullmatch(name) for name in every):
        return _stages(every, "mimo", _MIMO, where)
    if any(_MULTI_LAYER.fullmatch(name) for name in every):
        return _stages(every, "multi-layer", _MULTI_LAYER, where)
    stored = _renamed(every, _eagle_name)
    has_midlayer = any(name.removeprefix("model.").startswith("midlayer.") for name in every)
    if family == "eagle3" or has_midlayer or not stored.keys().isdisjoint(_EAGLE3_SIGNS):
        return HeadNames("eagle3", 1, stored)
    if "fc.weight" in stored:
        # EAGLE-1 and -2 always use the target's output head, whatever their files hold.
        return HeadNames("eagle", 1, {own: name for own, name in stored.items() if own != OUTPUT_HEAD})
    raise NoHeadError(f"{where} holds no draft head: neither fc.weight (EAGLE) nor eh_proj or mtp_layers (MTP)")


def family_named(values: Mapping[str, object]) -> str | None:
    """The family that a config.json's `architectures` names, for checkpoints without tensors; None for no head."""
    names = values.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else str(values.get("speculators_model_type"))
    name = name.lower()
    for family, words in (
        ("eagle3", ("eagle3",)), ("eagle", ("eagle",)), ("multi-layer", ("mimov2", "step3p5")), ("mimo", ("mimo",)),
        ("nextn", ("nextn", "deepseekv3", "mtp")),
    ):  # fmt: skip
        if any(word in name for word in words):
            return family
    return None


def published_name(family: str, name: str) -> str:
    """The name that SGLang and EAGLE's own code give an EAGLE or EAGLE-3 tensor of ours."""
    return name.replace("layers.0.", "midlayer.", 1) if family == "eagle3" and name.startswith("layers.0.") else name


def _eagle_name(name: str) -> str | None:
    name = name.removeprefix("model.")
    for stored, own in (
        ("midlayer.", "layers.0."), ("transformer.", "layers.0."), ("fusion_fc.", "fc."),
        ("aux_norm_low.", "fc_norm.0."), ("aux_norm_mid.", "fc_norm.1."), ("aux_norm_high.", "fc_norm.2."),
    ):  # fmt: skip
        if name.startswith(stored):
            name = own + name.removeprefix(stored)
    return None if name.endswith(_IGNORED) else name


def _stages(names: list[str], family: str, pattern: re.Pattern[str], where: object) -> HeadNames:
    """Multi-token-prediction layers, numbered from 0; every other tensor of the target is left out."""
    matches = [match for name in names if (match := pattern.fullmatch(name))]
    numbers = sorted({int(match[1]) for match in matches if family != "nextn" or match[2] == "eh_proj.weight"})
    if family != "multi-layer" and len(numbers) != 1:
        raise StartupError(f"{where} has {len(numbers)} {family} layers ({numbers}); one, used at each step, is needed")
    experts = [
        match.string for match in matches if int(match[1]) in numbers and re.match(r"mlp\.(experts|gate)\.", match[2])
    ]
    if experts:
        raise StartupError(
            f"{where}: the MTP layer is a mixture of experts ({experts[0]}), which is not supported; "
            "one with a dense MLP is"
        )

    def own_name(name: str) -> str | None:
        match = pattern.fullmatch(name)
        if match is None or int(match[1]) not in numbers or name.endswith(_IGNORED):
            return None
        if match[2] in {"shared_head.head.weight", "embed_tokens.weight"}:
            return None
        return f"{numbers.index(int(match[1]))}.{_FROM_MTP.get(match[2], match[2])}"

    prefixes = {int(match[1]): match.string[: match.start(2)] for match in matches}
    return HeadNames(family, len(numbers), _renamed(names, own_name), tuple(prefixes[number] for number in numbers))


def _renamed(names: list[str], rename: Callable[[str], str | None]) -> dict[str, str]:
    return {own: name for name in names if (own := rename(name)) is not None}
