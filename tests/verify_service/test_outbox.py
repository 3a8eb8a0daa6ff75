"""What a slow drafter is told amounts to what a quick one is told; nothing pending grows without being counted."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from outrider.v1 import common_pb2, verify_pb2
from outrider.wire import INLINE_FEATURE_BYTES, MAX_MESSAGE_BYTES
from tests.verify_service.rig import taken
from verify_service.outbox import FRAME_BYTES, RoundOutbox, join_verdicts, size_of

SESSION, GENERATION, PROMPT_LEN = 7, 1, 3
KEY = SESSION, GENERATION


def rows(first_pos: int, count: int, width: int = 1) -> common_pb2.FeatureRows:
    """Rows that hold their position, one byte each (the outbox does not look inside)."""
    data = b"".join(bytes([(first_pos + i) % 256]) * width for i in range(count))
    tensor = common_pb2.Tensor(shape=[count, width], data=data)
    return common_pb2.FeatureRows(first_pos=first_pos, count=count, rows=tensor)


def verdict(base_len: int, tokens: list[int], *, budget: int | None = None, width: int = 1) -> verify_pb2.Verdict:
    made = verify_pb2.Verdict(
        session=SESSION,
        generation=GENERATION,
        base_len=base_len,
        tokens=tokens,
        verify_us=base_len,
        batch_tokens=1,
        steps=1,
        node_budget=budget,
        features=rows(base_len - 1, len(tokens), width) if width else None,
        next=verify_pb2.Next(kind=verify_pb2.NEXT_KIND_PLAIN, base_len=base_len + len(tokens)),
    )
    made.credits.add(proposal_id=base_len, root_node=-1, nodes_verified=len(tokens))
    return made


@dataclass
class Reader:
    """Applies frames as a drafter does."""

    committed_len: int = PROMPT_LEN
    tokens: list[int] = field(default_factory=list)
    credits: list[int] = field(default_factory=list)
    verify_us: int = 0
    steps: int = 0
    next_row_pos: int = PROMPT_LEN - 1
    last: verify_pb2.Verdict | None = None
    closed: list[verify_pb2.CloseReason] = field(default_factory=list)

    def read(self, frame: verify_pb2.Round | None) -> None:
        for got in frame.verdicts if frame is not None else ():
            assert not self.closed
            assert got.base_len == self.committed_len
            assert got.next.base_len == got.base_len + len(got.tokens)
            self.take_rows(got.features, len(got.tokens))
            self.committed_len += len(got.tokens)
            self.tokens += got.tokens
            self.credits += [credit.proposal_id for credit in got.credits]
            self.verify_us += got.verify_us
            self.steps += got.steps
            self.last = got
        self.closed += [closed.reason for closed in frame.closed] if frame is not None else []

    def take_rows(self, features: common_pb2.FeatureRows, count: int) -> None:
        assert (features.first_pos, features.count) == (self.next_row_pos, count)
        if not features.announced:
            assert list(features.rows.data) == [
                pos % 256 for pos in range(self.next_row_pos, self.next_row_pos + count)
            ]
            assert list(features.rows.shape) == [count, 1]
        self.next_row_pos += count


class Outbox(RuleBasedStateMachine):
    """One session's verdicts with any budget, read at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.outbox = RoundOutbox()
        self.reader = Reader()
        self.sent: list[verify_pb2.Verdict] = []
        self.rejected = 0

    @property
    def committed_len(self) -> int:
        return PROMPT_LEN + sum(len(one.tokens) for one in self.sent)

    @precondition(lambda self: not self.reader.closed)
    @rule(count=st.integers(1, 4), budget=st.sampled_from([None, 0, 0, 5]))
    def commit(self, count: int, budget: int | None) -> None:
        made = verdict(self.committed_len, list(range(count)), budget=budget)
        kept = verify_pb2.Verdict()
        kept.CopyFrom(made)
        self.sent.append(kept)
        self.outbox.verdict(made)

    @rule()
    def read(self) -> None:
        self.take()
        self.check()
        assert self.outbox.num_bytes == 0

    @precondition(lambda self: not self.reader.closed)
    @rule()
    def close(self) -> None:
        self.outbox.close(SESSION, GENERATION, verify_pb2.CLOSE_REASON_FINISHED)
        self.take()
        assert self.reader.closed == [verify_pb2.CLOSE_REASON_FINISHED]
        self.check()
        assert self.outbox.num_bytes == 0

    @rule()
    def reject(self) -> None:
        self.outbox.reject(verify_pb2.Rejected(session=SESSION, generation=GENERATION, detail="no"))

    def take(self) -> None:
        """Has the reader read; checks that what it read was counted while it waited."""
        before, frame = self.outbox.num_bytes, taken(self.outbox) or verify_pb2.Round()
        self.reader.read(frame)
        messages = (message for kind in (frame.verdicts, frame.closed, frame.rejected) for message in kind)
        assert before - self.outbox.num_bytes == sum(map(size_of, messages))

    def check(self) -> None:
        reader, told = self.reader, self.sent
        assert reader.tokens == [token for one in told for token in one.tokens]
        assert reader.credits == [credit.proposal_id for one in told for credit in one.credits]
        assert reader.verify_us == sum(one.verify_us for one in told)
        assert reader.steps == len(told)
        if told:
            assert reader.last is not None
            assert reader.last.next == told[-1].next
            assert reader.last.HasField("node_budget") == told[-1].HasField("node_budget")
            assert reader.last.node_budget == told[-1].node_budget


TestOutbox = Outbox.TestCase
TestOutbox.settings = settings(max_examples=80, stateful_step_count=25, deadline=None)


def take(outbox: RoundOutbox) -> verify_pb2.Round:
    frame = taken(outbox)
    assert frame is not None
    return frame


def test_nothing_pending_is_no_frame() -> None:
    assert taken(RoundOutbox()) is None


def test_joined_rows_over_the_inline_limit_are_announced() -> None:
    width = INLINE_FEATURE_BYTES // 3
    outbox = RoundOutbox()
    for base_len in (3, 4, 5):
        outbox.verdict(verdict(base_len, [1], width=width))
    assert len(take(outbox).verdicts[0].features.rows.data) == 3 * width
    for base_len in (6, 7, 8, 9):
        outbox.verdict(verdict(base_len, [1], width=width))
    assert take(outbox).verdicts[0].features == common_pb2.FeatureRows(first_pos=5, count=4, announced=True)


def test_joined_with_a_last_verdict_which_has_no_rows_there_are_none() -> None:
    earlier = verdict(3, [1, 2])
    join_verdicts(earlier, verdict(5, [3], width=0))
    assert not earlier.HasField("features")
    assert list(earlier.tokens) == [1, 2, 3]


def test_verdicts_that_do_not_follow_are_not_joined() -> None:
    with pytest.raises(ValueError, match=r"verdict at 6 does not follow 3 \+ 2"):
        join_verdicts(verdict(3, [1, 2]), verdict(6, [3]))


def test_a_session_closed_for_slow_reading_leaves_nothing_but_the_notice() -> None:
    outbox = RoundOutbox()
    outbox.open(verify_pb2.Opened(session=SESSION, generation=GENERATION, tokens=bytes(400)))
    features = verify_pb2.SessionFeatures(session=SESSION, generation=GENERATION, rows=rows(0, 2))
    outbox.feature_rows(features)
    outbox.verdict(verdict(3, [1], budget=0))
    outbox.verdict(verdict(4, [1], budget=0))
    other = verify_pb2.Opened(session=8, generation=1, tokens=bytes(40))
    outbox.open(other)
    assert outbox.sessions_by_size() == [KEY, (8, 1)]
    outbox.close_slow(SESSION, GENERATION)
    frame = take(outbox)
    assert list(frame.opened) == [other]
    assert [(c.session, c.reason) for c in frame.closed] == [(SESSION, verify_pb2.CLOSE_REASON_SLOW)]
    assert not frame.features
    assert not frame.verdicts
    assert outbox.num_bytes == 0


def test_a_frame_holds_all_kinds_and_then_they_are_gone() -> None:
    outbox = RoundOutbox()
    outbox.open(verify_pb2.Opened(session=SESSION, generation=GENERATION))
    outbox.feature_rows(verify_pb2.SessionFeatures(session=SESSION, generation=GENERATION, rows=rows(0, 2)))
    outbox.feature_rows(verify_pb2.SessionFeatures(session=SESSION, generation=GENERATION, rows=rows(2, 1)))
    outbox.verdict(verdict(3, [1]))
    outbox.reject(verify_pb2.Rejected(session=SESSION))
    outbox.close(8, 1, verify_pb2.CLOSE_REASON_CANCELLED)
    frame = take(outbox)
    assert [len(part) for part in (frame.opened, frame.features, frame.verdicts, frame.closed, frame.rejected)] == [
        1,
        2,
        1,
        1,
        1,
    ]
    assert taken(outbox) is None


def test_no_slots_before_a_number_is_said_once_all_that_may_name_them_is_out(monkeypatch: pytest.MonkeyPatch) -> None:
    outbox = RoundOutbox()
    outbox.name_no_slots_before(7)
    assert not outbox.take(verify_pb2.Round())
    monkeypatch.setattr("verify_service.outbox.FRAME_BYTES", 1)
    outbox.feature_rows(verify_pb2.SessionFeatures(session=1, generation=1, rows=rows(0, 2)))
    outbox.verdict(verdict(10, [1]))
    assert not take(outbox).HasField("slot_seq_end")
    outbox.name_no_slots_before(9)
    assert take(outbox).slot_seq_end == 9
    outbox.verdict(verdict(11, [1]))
    assert not take(outbox).HasField("slot_seq_end")


def test_frames_fit_a_message_and_keep_the_order_in_which_they_are_applied() -> None:
    outbox = RoundOutbox()
    size = FRAME_BYTES // 3
    for session in range(5):
        outbox.open(verify_pb2.Opened(session=session, generation=1, tokens=bytes(size)))
        outbox.close(session, 1, verify_pb2.CLOSE_REASON_FINISHED)
    for first_pos in (0, 3, 6, 9):
        chunk = rows(first_pos, 3, width=size // 3)
        outbox.feature_rows(verify_pb2.SessionFeatures(session=SESSION, generation=GENERATION, rows=chunk))
    outbox.verdict(verdict(PROMPT_LEN, [1]))
    frames: list[verify_pb2.Round] = []
    while (frame := taken(outbox)) is not None:
        assert frame.ByteSize() < MAX_MESSAGE_BYTES
        frames.append(frame)
    kinds = [kind for frame in frames for kind, _ in sorted(frame.ListFields(), key=lambda field: field[0].number)]
    assert [kind.name for kind in kinds] == ["opened", "opened", "features", "features", "verdicts", "closed"]
    assert [chunk.rows.first_pos for frame in frames for chunk in frame.features] == [0, 3, 6, 9]
    assert outbox.num_bytes == 0


def test_the_engine_adds_while_the_event_loop_takes() -> None:
    outbox, reader, sent = RoundOutbox(), Reader(), 3000

    def commit() -> None:
        for step in range(sent):
            outbox.verdict(verdict(PROMPT_LEN + step, [step]))
        outbox.close(SESSION, GENERATION, verify_pb2.CLOSE_REASON_FINISHED)

    engine = threading.Thread(target=commit)
    engine.start()
    while not reader.closed:
        reader.read(taken(outbox))
    engine.join()
    assert reader.tokens == list(range(sent))
    assert reader.steps == sent
    assert outbox.num_bytes == 0
