"""The drafter's model in `bench wire`: it plays a script, each step in its share of a round."""

from __future__ import annotations

import ctypes
import time
from ctypes import POINTER, Structure, c_int32, c_int64, c_void_p
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from bench._wire_clock import NAP_NS, SPUN_NS, Clock
from bench._wire_script import NUM_TOP, VOCAB_SIZE, Script, Setting
from draft_service.drafters.growing_native import NativeGrower
from draft_service.drafters.kv import DraftCache
from draft_service.drafters.models import Tips
from draft_service.drafters.pool_size import ROWS_PER_SESSION
from draft_service.drafters.standalone import MAX_BATCH_TOKENS
from engine.cpu_kernels import cpu_kernels
from engine.models.heads.runner import HeadRunner
from kernels.native.build import SOURCES, load_library
from kernels.native.library import SIGNATURES
from outrider import env

if TYPE_CHECKING:
    from engine.batch import DeviceRows, Segment

_GROWING = (Path(__file__).with_suffix(".c"), SOURCES / "grow.c", SOURCES / "likeliest.c")
_MAX_STEPS = 2**20  # whose times are kept


class ScriptedModel:
    """A DraftModel: a head where the setting has features, else a language model; each step takes its share of a round.

    A head's row i stands for token i + 1, a language model's for token i; the row tells what follows. A head's trees
    are grown as those of any head are here: by the C kernels where they can be had, with a network of the script's.
    """

    device = torch.device("cpu")
    max_batch_tokens = MAX_BATCH_TOKENS
    num_read = VOCAB_SIZE
    num_drafted = VOCAB_SIZE
    num_stages = 1
    runs_apart = False
    trees = None

    def __init__(self, setting: Setting) -> None:
        sessions = max(setting.batch, 2)
        num_slots = sessions * 2 * (setting.max_len + setting.topk * setting.num_steps)
        self.cache = DraftCache(np.zeros((ROWS_PER_SESSION * sessions, setting.max_len), np.int32), num_slots)
        self.feature_width = setting.feature_width
        self.reads_states = bool(setting.feature_width)
        self._hidden = setting.hidden_size
        self._ahead = 1 + self.reads_states
        self._script = Script(setting)
        self._steps_ns: list[tuple[int, int]] = []
        self._clock = Clock(setting.draft_ms / setting.num_steps, burn=setting.burn)
        self._keys = np.zeros(num_slots, np.int64)  # of the session that a first row's slot belongs to
        self._head = None
        if self.reads_states and cpu_kernels() is not None:
            self._head = _ScriptedHead(setting, self._script, self._keys, ahead=self._ahead)
        self.grower = None if self._head is None else self._head.grower(self.cache)

    @property
    def steps_ns(self) -> list[tuple[int, int]]:
        """Begin and end of each step."""
        return sorted(self._steps_ns + ([] if self._head is None else self._head.steps_ns()))

    def run(
        self, segments: list[Segment], states: torch.Tensor | None, num_top: int, stage: int = 0,
        rows: DeviceRows | None = None,
    ) -> Tips:  # fmt: skip
        """See DraftModel."""
        start_ns = time.monotonic_ns()
        keys: list[int] = []
        positions: list[int] = []
        for segment in segments:
            if segment.prefix_len == 0 and segment.depths is None:
                self._keys[segment.slots[0]] = segment.tokens[0]
            key = int(self._keys[self.cache.slot_table[segment.table_row, 0]])
            count = len(segment.tokens)
            for row in range(count - segment.num_logits, count):
                depth = row if segment.depths is None else int(segment.depths[row])
                keys.append(key)
                positions.append(segment.prefix_len + depth + self._ahead)
        tips = self._script.tips(keys, positions, num_top) if keys else (torch.empty(0, 1), torch.empty(0, 1).long())
        carried = torch.zeros(len(keys), self._hidden, dtype=torch.bfloat16) if self.reads_states else None
        self._clock.spend(start_ns)
        self._steps_ns.append((start_ns, time.monotonic_ns()))
        return Tips(*tips, carried)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """See DraftModel."""
        return features[:, : self._hidden]

    def limit_vocabulary(self, vocab_size: int) -> None:
        """See DraftModel; the script's words all lie below it."""


class _Text(Structure):
    _fields_ = [("chances", c_void_p), ("tokens", c_void_p)]


class _Decoder(Structure):
    _fields_ = [
        ("texts", POINTER(_Text)), ("keys", c_void_p), ("steps_ns", c_void_p), ("num_steps", c_int64),
        ("max_steps", c_int64), ("step_ns", c_int64), ("num_top", c_int32), ("ahead", c_int32), ("burn", c_int32),
        ("nap_ns", c_int32), ("spun_ns", c_int32), ("memory", c_void_p), ("memory_bytes", c_int64),
    ]  # fmt: skip


class _ScriptedHead:
    """A stand-in for NativeHead: grow.c beside a forward pass of the script's (_wire_model.c)."""

    fuses = True
    num_logits = VOCAB_SIZE
    dtype = torch.bfloat16

    def __init__(self, setting: Setting, script: Script, keys: np.ndarray, *, ahead: int) -> None:
        self.hidden, self.input_width = setting.hidden_size, setting.feature_width
        self.library = load_library(env.home() / "kernels", _GROWING)
        self.library.outrider_grow.restype, self.library.outrider_grow.argtypes = SIGNATURES["outrider_grow"]
        texts = [script.text(key) for key in range(setting.batch + 1)]  # 0: of the warm-up
        self._times = np.zeros((_MAX_STEPS, 2), np.int64)
        self._decoder = _Decoder(
            texts=(_Text * len(texts))(*((t.top_chances.ctypes.data, t.top_tokens.ctypes.data) for t in texts)),
            keys=keys.ctypes.data, steps_ns=self._times.ctypes.data, max_steps=_MAX_STEPS,
            step_ns=int(setting.draft_ms / setting.num_steps * 1e6), num_top=NUM_TOP, ahead=ahead, burn=setting.burn,
            nap_ns=NAP_NS, spun_ns=SPUN_NS,
        )  # fmt: skip
        self.decoder = ctypes.addressof(self._decoder)

    def grower(self, cache: DraftCache) -> NativeGrower:
        """Makes what grows trees on `cache`."""
        runner = SimpleNamespace(native=self, slot_table=cache.slot_table, head=SimpleNamespace(tokens=None))
        return NativeGrower(cast("HeadRunner", runner), num_read=VOCAB_SIZE)

    def steps_ns(self) -> list[tuple[int, int]]:
        """Begin and end of each of its steps."""
        return [(int(begin), int(end)) for begin, end in self._times[: self._decoder.num_steps]]
