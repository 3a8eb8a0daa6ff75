"""Which way a large model is read: the one that was measured to be faster, for every matrix alike."""

from __future__ import annotations

import ctypes
from typing import Any, cast

import pytest

from kernels.native.library import CLayer, CMatrix, CModel
from kernels.native.streaming import choose_streaming
from kernels.native_linear import BF16

NAMES = ("qkv", "output", "gate_up", "down")


class Machine:
    """A library and a clock: a product takes so long for each number by whether its matrix streams."""

    def __init__(self, *, streamed: float, kept: float, fails: bool = False) -> None:
        self.now = 0.0
        self.teams = 0
        self.products: list[tuple[int, int]] = []
        self._each = {True: streamed, False: kept}
        self._fails = fails

    def outrider_product_team(self, num_threads: int) -> int:
        self.teams += 1
        return num_threads

    def outrider_team_destroy(self, team: int) -> None:
        self.teams -= 1

    def outrider_product(self, team: int, matrix: Any, *_: object) -> int:
        own = cast("CMatrix", matrix._obj)
        self.products.append((own.n, own.k))
        # One turn stands still for other reasons.
        slow = 50.0 if len(self.products) == 40 else 1.0
        self.now += slow * own.n * own.k * self._each[bool(own.streams)]
        return not self._fails


def model_of(num_layers: int, *, n: int = 32, k: int = 64) -> CModel:
    layers = [CLayer(**{name: CMatrix(None, None, n, k, BF16) for name in NAMES}) for _ in range(num_layers)]
    return CModel(num_layers=num_layers, layers=(CLayer * num_layers)(*layers), head=CMatrix(None, None, n, k, BF16))


def ways_of(model: CModel) -> set[bool]:
    layers = [model.layers[index] for index in range(model.num_layers)]
    return {bool(getattr(layer, name).streams) for layer in layers for name in NAMES} | {bool(model.head.streams)}


@pytest.mark.parametrize(("streamed", "kept", "expected"), [(1.0, 1.1, True), (1.1, 1.0, False)])
def test_the_faster_way_is_taken_for_all_matrices(streamed: float, kept: float, expected: bool) -> None:
    machine, model = Machine(streamed=streamed, kept=kept), model_of(2)
    choose_streaming(model, cast("ctypes.CDLL", machine), 2, clock=lambda: machine.now)
    assert ways_of(model) == {expected}
    assert machine.teams == 0
    assert set(machine.products) == {(32, 64)}  # none of the matrices that a decoder has not


def test_of_a_huge_model_the_first_matrices_tell() -> None:
    machine, model = Machine(streamed=1.0, kept=2.0), model_of(8, n=16384, k=8192)
    choose_streaming(model, cast("ctypes.CDLL", machine), 2, clock=lambda: machine.now)
    assert ways_of(model) == {True}
    assert len(machine.products) == 2 * 2 * 6  # matrices, ways, turns


def test_a_product_without_memory_is_told_and_leaves_no_team() -> None:
    machine = Machine(streamed=1.0, kept=1.0, fails=True)
    with pytest.raises(MemoryError, match="8 rows"):
        choose_streaming(model_of(1), cast("ctypes.CDLL", machine), 2)
    assert machine.teams == 0
