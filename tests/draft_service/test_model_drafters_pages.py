"""Whatever happens to sessions, in whatever order: no page is lost or held twice, and no tree is malformed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draft_service.drafters.base import AheadRequest, Draft, DraftRequest
from draft_service.drafters.eagle import EagleDrafter
from draft_service.drafters.factory import make_drafter
from draft_service.drafters.kv import DraftCache, NoRoom
from draft_service.drafters.model_drafter import ModelDrafter
from draft_service.drafters.models import HeadModel, LanguageModel
from draft_service.drafters.mtp import MultiLayerDrafter
from draft_service.drafters.shape import TreeShape
from draft_service.drafters.standalone import StandaloneDrafter
from draft_service.session import Extension, Session, Wishes
from draft_service.sessions import InVerification
from engine.models.heads.load import load_head
from engine.models.heads.runner import HeadRunner
from engine.runner import ModelRunner
from outrider.args import DraftArgs
from outrider.v1 import common_pb2, verify_pb2
from tests.draft_service.model_rig import rows, session
from tests.engine.heads import make

NUM_SLOTS, MAX_LEN, TABLE_ROWS = 64, 40, 7

Step = tuple[str, int, int]
steps = st.lists(
    st.tuples(st.sampled_from(["open", "extend", "extend", "draft", "draft", "ahead", "close"]), st.integers(0, 9),
              st.integers(0, 12)),
    min_size=8,
    max_size=50,
)  # fmt: skip


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelDrafter[Any]]:
    folder = tmp_path_factory.mktemp("drafters")
    target = make.write_target(folder / "target")
    shape, nothing = TreeShape(3, 2, 6), common_pb2.ModelInfo()
    runner = ModelRunner.load(
        target.folder, dtype="float32", num_slots=NUM_SLOTS, max_sessions=TABLE_ROWS, max_len=MAX_LEN
    )
    model = LanguageModel(runner, NUM_SLOTS, max_batch_tokens=48)
    made: dict[str, ModelDrafter[Any]] = {"standalone": StandaloneDrafter(model, shape, draft_model="", target=nothing)}
    written = make.add_multi_layer(make.write_target(folder / "multi"))
    for name, head_folder, kind in (
        ("eagle3", make.eagle3(folder / "eagle3").folder, EagleDrafter),
        ("multi-layer", written.folder, MultiLayerDrafter),
    ):
        head, _ = load_head(head_folder, target.folder, max_len=MAX_LEN)
        head_model = HeadModel(
            HeadRunner(head, num_slots=NUM_SLOTS, max_sessions=TABLE_ROWS), NUM_SLOTS, max_batch_tokens=48
        )
        made[name] = kind(
            head_model, shape, algorithm=common_pb2.ALGORITHM_MTP, draft_model="", target=nothing,
            features=common_pb2.FeatureLayout(),
        )  # fmt: skip
    # Its trees are grown by the C kernels, and what it is behind with is run in the same call.
    args = DraftArgs(
        speculative_algorithm="EAGLE3", speculative_num_steps=3, speculative_eagle_topk=2,
        speculative_num_draft_tokens=6, max_sessions=2, draft_max_total_tokens=NUM_SLOTS, threads=1,
    )  # fmt: skip
    shipped = make_drafter(args)
    assert isinstance(shipped, EagleDrafter)
    made["shipped"] = shipped
    return made


class Life:
    """Sessions of a drafter, told random things."""

    def __init__(self, drafter: ModelDrafter[Any]) -> None:
        self.drafter = drafter
        self.width = drafter.model.feature_width if isinstance(drafter.model, HeadModel) else 0
        self.vocab = drafter.model.num_read
        self.open: list[Session] = []
        self.rng = np.random.default_rng(0)

    def do(self, step: Step) -> None:
        kind, which, size = step
        if kind == "open":
            self.start(which, size)
        elif self.open:
            getattr(self, kind)(self.open[which % len(self.open)], size)
        for given_up in self.drafter.take_given_up():
            assert given_up.session in self.open
        self.check()

    def start(self, topk: int, size: int) -> None:
        opened = session(self.tokens(size + 1), wishes=Wishes(topk=topk or None), remaining=40)
        self.open.append(opened)
        self.drafter.open([opened])
        if self.width and size and size % 3:
            self.drafter.add_features([(opened, rows(0, torch.zeros(size, self.width)))])

    def extend(self, opened: Session, size: int) -> None:
        base_len, new = len(opened.tokens), self.tokens(size % 5 + 1)
        opened.commit(np.array(new, np.int32))
        verdict = verify_pb2.Verdict(base_len=base_len, tokens=new)
        if self.width:
            verdict.features.CopyFrom(rows(base_len - 1, torch.zeros(len(new), self.width)))
        self.drafter.extend([Extension(opened, base_len, verdict)])

    def draft(self, opened: Session, size: int) -> None:
        requests = [DraftRequest(one, size) for one in self.open]
        for request, found in zip(requests, self.drafter.draft(requests), strict=True):
            self.sound(found, request.num_nodes)

    def ahead(self, opened: Session, size: int) -> None:
        (draft,) = self.drafter.draft([DraftRequest(opened, 5)])
        if size % 2:
            verifying = InVerification.whole(opened, draft.tree, draft.probabilities, draft.memo)
        else:
            verifying = InVerification(opened, draft.tree, draft.probabilities)
        (early,) = self.drafter.draft_ahead([AheadRequest(verifying, size, size + 1, 3)])
        assert len(early) <= 3
        for found in early:
            assert 1 <= len(found.assumed) <= size + 1
            self.sound(found, size)

    def close(self, opened: Session, size: int) -> None:
        self.open.remove(opened)
        self.drafter.close([opened])

    def tokens(self, count: int) -> list[int]:
        return self.rng.integers(0, self.vocab, count).tolist()

    def sound(self, draft: Draft, num_nodes: int) -> None:
        assert len(draft) == len(draft.tree) <= num_nodes
        assert ((draft.tokens >= 0) & (draft.tokens < self.vocab)).all()
        assert ((draft.probabilities >= 0) & (draft.probabilities <= 1 + 1e-6)).all()
        for node, parent in enumerate(draft.parents.tolist()):
            assert parent < 0 or draft.probabilities[node] <= draft.probabilities[parent] + 1e-6

    def check(self) -> None:
        self.drafter.model.cache.check([state.rows for state in self.drafter._served])


@pytest.mark.parametrize("name", ["standalone", "eagle3", "multi-layer", "shipped"])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(script=steps)
def test_any_life(name: str, script: list[Step], drafters: dict[str, ModelDrafter[Any]]) -> None:
    life = Life(drafters[name])
    for step in script:
        life.do(step)
    life.drafter.close(life.open)
    life.drafter.take_given_up()
    life.check()
    assert life.drafter.model.cache.num_free == NUM_SLOTS


def test_a_tree_that_has_room_keeps_it_from_rows_that_another_session_is_behind_with(
    drafters: dict[str, ModelDrafter[Any]],
) -> None:
    drafter = drafters["shipped"]
    if drafter.model.grower is None:
        pytest.skip("no C kernels: what a session is behind with is run before")
    life = Life(drafter)
    wide, late, large = [
        session(life.tokens(size + 1), wishes=wishes, remaining=40)
        for size, wishes in ((10, Wishes(topk=4, num_steps=5, num_draft_tokens=7)), (10, Wishes()), (26, Wishes()))
    ]
    life.open = [wide, late, large]
    drafter.open(life.open)
    for opened in life.open:
        size = len(opened.tokens) - 1
        drafter.add_features([(opened, rows(0, torch.zeros(size, life.width)))])
    life.extend(wide, 0)
    life.extend(late, 4)
    assert drafter.model.cache.num_free == 18  # a tree of `wide` takes 16, what is behind 1 and 5
    tree, none = drafter.draft([DraftRequest(wide, 6), DraftRequest(late, 6)])
    assert (len(tree), len(none)) == (6, 0)
    assert [given.session for given in drafter.take_given_up()] == [late]
    life.check()
    drafter.close(life.open)


def test_cache_refuses_what_does_not_fit_and_forks_share(tmp_path: Path) -> None:
    cache = DraftCache(np.zeros((2, 8), np.int32), 10)
    first = cache.open()
    slots = cache.append(first, 6)
    assert cache.slot_table[first.table_row, :6].tolist() == slots
    with pytest.raises(NoRoom, match="9 rows; the draft model's context has 8"):
        cache.append(first, 3)
    fork = cache.fork(first, first.num_rows)
    with pytest.raises(NoRoom, match="all 2 rows of the slot table"):
        cache.open()
    own = cache.append(fork, 2)
    assert cache.slot_table[fork.table_row, :8].tolist() == [*slots, *own]
    with pytest.raises(NoRoom, match="3 pages wanted, 2 free"):
        cache.scratch(3)
    cache.check([first, fork])
    cache.truncate(fork, 0)
    assert fork.num_rows == 6
    cache.close(fork)
    cache.check([first])
    with pytest.raises(RuntimeError, match="slots held"):
        cache.check([])
    cache.close(first)
    assert cache.num_free == 10
