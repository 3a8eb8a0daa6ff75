"""What a draft model is quantised to, by the flags of the draft service."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from draft_service.drafters import heads, standalone
from draft_service.drafters.models import HeadModel, LanguageModel
from kernels.native_linear import NativeLinear
from outrider.args import DraftArgs
from outrider.errors import StartupError
from tests.engine.heads import make
from tests.engine.tiny import save_model


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("draft")
    save_model("llama", folder)
    return folder


def numerics(folder: Path, **flags: Any) -> str:
    drafter = standalone.make_drafter(
        DraftArgs(
            speculative_algorithm="STANDALONE", speculative_draft_model_path=str(folder), device="cpu", dtype="float32",
            draft_max_total_tokens=128, max_sessions=1, **flags,
        )
    )  # fmt: skip
    assert isinstance(drafter.model, LanguageModel)
    return drafter.model._runner.numerics_id


def test_a_draft_model_goes_with_its_target_unless_told_otherwise(draft: Path) -> None:
    plain = numerics(draft)
    eight = numerics(draft, quantization="int8")
    assert eight != plain
    assert numerics(draft, quantization="int8", speculative_draft_model_quantization="unquant") == plain
    assert numerics(draft, quantization="int4", speculative_draft_model_quantization="int8") == eight
    with pytest.raises(StartupError, match="--speculative-draft-model-quantization fp8 needs a CUDA device"):
        numerics(draft, speculative_draft_model_quantization="fp8")
    with pytest.raises(StartupError, match="'q5' is unknown"):
        numerics(draft, speculative_draft_model_quantization="q5")


@pytest.mark.parametrize("method", ["int8", "int8_dynamic", "int4"])
def test_heads(method: str, tmp_path: Path) -> None:
    target = make.write_target(tmp_path / "target")
    written = make.eagle(tmp_path / "head")
    logits: dict[str, torch.Tensor] = {}
    for name in ("unquant", method):
        drafter = heads.make_drafter(
            DraftArgs(
                speculative_algorithm="EAGLE", speculative_draft_model_path=str(written.folder), device="cpu",
                model_path=str(target.folder), speculative_draft_model_quantization=name, dtype="float32",
                draft_max_total_tokens=128, max_sessions=1,
            )
        )  # fmt: skip
        assert isinstance(drafter.model, HeadModel)
        head = drafter.model._runner.head
        if name == method and isinstance(head._head, NativeLinear):
            assert head._head._data.dtype is torch.uint8
        logits[name] = head.logits(torch.randn((20, make.HIDDEN), generator=torch.Generator().manual_seed(1)))
    apart = (logits[method] - logits["unquant"]).std() / logits["unquant"].std()
    assert 0 < apart < 0.2
