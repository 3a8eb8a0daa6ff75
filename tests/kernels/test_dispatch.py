"""Where Triton's kernels serve."""

from __future__ import annotations

from typing import cast
from unittest.mock import Mock

import pytest
import torch

from kernels.dispatch import has_triton, runs_triton, triton_version

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_triton_is_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not has_triton(CPU)
    assert triton_version(CPU) == ""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not has_triton(CUDA)
    assert triton_version(CUDA) == ""


@pytest.mark.parametrize(("capability", "serves"), [((7, 5), False), ((8, 0), True), ((12, 0), True)])
def test_older_gpus_keep_to_torch(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], serves: bool) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    assert has_triton(CUDA) is serves
    with torch.inference_mode():
        assert runs_triton(cast("torch.Tensor", Mock(is_cuda=True, device=CUDA))) is serves


def test_what_wants_gradients_keeps_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    x = cast("torch.Tensor", Mock(is_cuda=True, device=CUDA))
    assert not runs_triton(x)
    with torch.no_grad():
        assert runs_triton(x)
        assert not runs_triton(torch.zeros(1))
    monkeypatch.setattr("torch.compiler.is_compiling", lambda: True)
    with torch.inference_mode():
        assert not runs_triton(x)
