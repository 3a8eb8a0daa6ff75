"""Every head family over its paged pool, row by row and step by step, against the equations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.nn.functional import linear, scaled_dot_product_attention
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from engine.batch import Segment
from engine.cpu_kernels import cpu_kernels
from engine.models.heads.base import Vocabulary
from engine.models.heads.load import load_head
from engine.models.heads.runner import HeadRunner, HeadStep
from engine.quantization import KernelLinears
from kernels.rope import apply_rope
from outrider.errors import StartupError
from tests.engine.heads import make, reference
from tests.engine.heads.make import VOCAB, Written
from tests.engine.heads.reference import Reference
from tests.engine.tiny import Recorded

# fp32 on both sides; logits are some 10 wide and errors grow from step to step.
TOLERANCE = 5e-4
MAX_LEN = 64

Make = Callable[[Path, Written], tuple[Written, type[Reference]]]

FAMILIES: dict[str, Make] = {
    "eagle": lambda f, t: (make.eagle(f), reference.Eagle),
    "eagle-no-bias": lambda f, t: (make.eagle(f, bias=False), reference.Eagle),
    "eagle-qkv-bias": lambda f, t: (make.eagle(f, qkv_bias=True), reference.Eagle),
    "eagle-two-layers": lambda f, t: (make.eagle(f, layers=2), reference.Eagle),
    "eagle3": lambda f, t: (make.eagle3(f), reference.Eagle3),
    "eagle3-layers.0": lambda f, t: (make.eagle3(f, spelling="layers.0"), reference.Eagle3),
    "eagle3-two-layers": lambda f, t: (make.eagle3(f, spelling="layers.0", layers=2), reference.Eagle3),
    "eagle3-full-vocabulary": lambda f, t: (make.eagle3(f, narrow=False), reference.Eagle3),
    "eagle3-qk-norm": lambda f, t: (make.eagle3(f, qk_norm=True), reference.Eagle3),
    "eagle3-fc-norm": lambda f, t: (make.eagle3(f, fc_norm=True), reference.Eagle3),
    "eagle3-norm-output": lambda f, t: (make.eagle3(f, norm_output=True), reference.Eagle3),
    "eagle3-norm-before-fc": lambda f, t: (make.eagle3(f, norm_before_fc=True), reference.Eagle3),
    "eagle3-norm-before-residual": lambda f, t: (make.eagle3(f, norm_before_residual=True), reference.Eagle3),
    "eagle3-two-aux": lambda f, t: (
        make.eagle3(f, num_aux_hidden_states=2, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 5]}, bias=True),
        reference.Eagle3,
    ),
    "nextn": lambda f, t: (make.add_nextn(t), reference.NextN),
    "mimo": lambda f, t: (make.add_mimo(t), reference.Mimo),
}


class Rows:
    """One sequence in a runner, its slots in no order."""

    def __init__(self, runner: HeadRunner, table_row: int, seed: int) -> None:
        self.runner = runner
        self.table_row = table_row
        first = table_row * MAX_LEN
        self.free = (first + np.random.default_rng(seed).permutation(MAX_LEN)).astype(np.int32).tolist()
        self.length = 0

    def segment(self, tokens: list[int], num_logits: int) -> Segment:
        """The next rows."""
        slots = np.array([self.free.pop() for _ in tokens], np.int32)
        found = Segment(self.table_row, self.length, np.array(tokens, np.int32), slots, num_logits=num_logits)
        self.runner.slot_table[self.table_row, self.length : self.length + len(tokens)] = slots
        self.length += len(tokens)
        return found


needs_c = pytest.mark.skipif(cpu_kernels() is None, reason="needs a C compiler")
# What the C kernels do not run in one call.
BY_TORCH_ALONE = {"mimo"}
BY_C = [f"{name} by C" for name in FAMILIES if name not in BY_TORCH_ALONE]


@pytest.fixture(params=sorted([*FAMILIES, *BY_C]))
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[HeadRunner, Reference]:
    name, _, by_c = request.param.partition(" by ")
    if by_c and cpu_kernels() is None:
        pytest.skip("needs a C compiler")
    target = make.write_target(tmp_path / "target")
    written, kind = FAMILIES[name](tmp_path / "head", target)
    made: dict[str, Any] = {"make_linear": KernelLinears(None, 2)} if by_c else {}
    head, _ = load_head(written.folder, target.folder, max_len=MAX_LEN, **made)
    runner = HeadRunner(head, num_slots=3 * MAX_LEN, max_sessions=3)
    assert (runner.native is not None) == bool(by_c)
    return runner, kind(written, target)


def text(runner: HeadRunner, count: int, seed: int) -> tuple[list[int], torch.Tensor]:
    """Tokens, and features of all positions but the last."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (count,), generator=generator).tolist()
    return tokens, torch.randn((count - 1, runner.head.config.feature_width), generator=generator)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_prefill_then_drafts_on_its_own_states(pair: tuple[HeadRunner, Reference]) -> None:
    runner, expected = pair
    tokens, features = text(runner, 20, 1)
    drafted = [3, 70, 41, 9]
    rows = Rows(runner, 0, 1)
    step = runner.forward([rows.segment(tokens[1:], 1)], runner.fuse(features))
    said = [step.logits[0]]
    for token in drafted:
        step = runner.forward([rows.segment([token], 1)], step.carried)
        said.append(step.logits[0])
    close(torch.stack(said), expected.next_logits(tokens, features, drafted))


def test_chunks_of_several_sequences_in_one_step(pair: tuple[HeadRunner, Reference]) -> None:
    runner, expected = pair
    texts = [text(runner, count, count) for count in (9, 17, 2)]
    rows = [Rows(runner, row, row) for row in range(3)]
    steps: list[HeadStep] = []
    for cut in (slice(0, 5), slice(5, None)):
        running = [(r, t[1:][cut], f[cut]) for r, (t, f) in zip(rows, texts, strict=True) if t[1:][cut]]
        states = runner.fuse(torch.cat([f for _, _, f in running]))
        steps.append(runner.forward([r.segment(t, len(t)) for r, t, _ in running], states))
    every = [expected.logits(expected.rows(torch.tensor(t[1:]), expected.fuse(f))) for t, f in texts]
    close(steps[0].logits, torch.cat([every[0][:5], every[1][:5], every[2]]))
    close(steps[1].logits, torch.cat([every[0][5:], every[1][5:]]))


def test_branches_of_a_tree_see_their_own_ancestors(pair: tuple[HeadRunner, Reference]) -> None:
    runner, expected = pair
    tokens, features = text(runner, 12, 7)
    rows = Rows(runner, 0, 2)
    root = runner.forward([rows.segment(tokens[1:], 1)], runner.fuse(features))
    # Two children of the root, then the second's child: each goes on from its parent's state.
    slots = np.array([rows.free.pop() for _ in range(3)], np.int32)
    first = Segment(
        0, rows.length, np.array([5, 6], np.int32), slots[:2], depths=np.zeros(2, np.int32),
        mask=np.eye(2, dtype=np.bool_), num_logits=2,
    )  # fmt: skip
    states = root.carried.expand(2, -1)
    children = runner.forward([first], states)
    mask = np.array([[1, 0, 0], [0, 1, 0], [0, 1, 1]], np.bool_)
    second = Segment(
        0, rows.length, np.array([5, 6, 7], np.int32), slots, depths=np.array([0, 0, 1], np.int32), mask=mask,
        num_logits=1,
    )  # fmt: skip
    grandchild = runner.forward([second], torch.cat([states, children.carried[1:]]))
    close(children.logits[0], expected.next_logits(tokens, features, [5])[-1])
    close(children.logits[1], expected.next_logits(tokens, features, [6])[-1])
    close(grandchild.logits[0], expected.next_logits(tokens, features, [6, 7])[-1])


@pytest.mark.parametrize("num_states", [1, 3])
def test_another_number_of_states_than_of_rows_is_refused(tmp_path: Path, num_states: int) -> None:
    target = make.write_target(tmp_path / "target")
    head, _ = load_head(
        make.eagle(tmp_path / "head").folder, target.folder, max_len=MAX_LEN, make_linear=KernelLinears(None, 2)
    )
    runner = HeadRunner(head, num_slots=MAX_LEN, max_sessions=1)
    with pytest.raises((ValueError, RuntimeError)):
        runner.forward([Rows(runner, 0, 0).segment([1, 2], 1)], torch.zeros(num_states, head.config.block.hidden_size))


def test_outputs_are_the_states_of_the_equations(pair: tuple[HeadRunner, Reference]) -> None:
    runner, expected = pair
    tokens, features = text(runner, 15, 3)
    step = runner.forward([Rows(runner, 1, 4).segment(tokens[1:], 14)], runner.fuse(features))
    outputs = expected.rows(torch.tensor(tokens[1:]), expected.fuse(features))
    close(step.carried, expected.carried(outputs))


def test_multi_layer_stages_read_tokens_further_and_further_ahead(tmp_path: Path) -> None:
    target = make.write_target(tmp_path / "target")
    written = make.add_multi_layer(target, stages=3)
    head, features_spec = load_head(written.folder, target.folder, max_len=MAX_LEN)
    runner = HeadRunner(head, num_slots=MAX_LEN, max_sessions=1)
    expected = reference.MultiLayer(written, target)
    assert head.num_stages == 3
    assert str(features_spec) == f"aux:{make.LAYERS}"
    tokens, features = text(runner, 14, 5)
    rows = Rows(runner, 0, 0)
    slots = rows.segment(tokens[1:], 1).slots
    words, drafted = tokens[1:], []
    for stage in range(3):
        segment = Segment(0, 0, np.array(words, np.int32), slots, num_logits=len(words))
        step = runner.forward([segment], runner.fuse(features), stage)
        close(step.logits, expected.logits(expected.rows(torch.tensor(words), features, stage)))
        drafted.append(int(step.logits[-1].argmax()))
        words = [*words[1:], drafted[-1]]
    assert drafted == expected.chain(tokens, features, 3)


@pytest.mark.parametrize("name", ["eagle", "eagle3", "nextn"])
@pytest.mark.parametrize("by_c", [False, pytest.param(True, marks=needs_c)])
def test_yarn_turns_rows_as_transformers_does(
    name: str, by_c: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
    target = make.write_target(tmp_path / "target")
    written, kind = FAMILIES[name](tmp_path / "head", target)
    written = make.rewrite(written, rope_scaling=yarn)
    rope = yarn | {"rope_theta": 10000.0}
    rotary = LlamaRotaryEmbedding(
        transformers.LlamaConfig(head_dim=make.HEAD_DIM, max_position_embeddings=256, rope_parameters=rope)
    )

    def rotate(x: torch.Tensor) -> torch.Tensor:
        cos, sin = rotary(x, torch.arange(len(x))[None])
        return apply_rotary_pos_emb(x, x, cos[0], sin[0], unsqueeze_dim=1)[0]

    monkeypatch.setattr(reference, "rotate", rotate)
    made: dict[str, Any] = {"make_linear": KernelLinears(None, 2)} if by_c else {}
    head, _ = load_head(written.folder, target.folder, max_len=MAX_LEN, **made)
    runner = HeadRunner(head, num_slots=MAX_LEN, max_sessions=1)
    test_prefill_then_drafts_on_its_own_states((runner, kind(written, target)))


def test_bf16_stays_near_fp32(tmp_path: Path) -> None:
    target, written = make.write_target(tmp_path / "target"), make.eagle3(tmp_path / "head")
    said = []
    for dtype in ("float32", "bfloat16"):
        head, _ = load_head(written.folder, target.folder, max_len=MAX_LEN, dtype=dtype)
        runner = HeadRunner(head, num_slots=MAX_LEN, max_sessions=1)
        tokens, features = text(runner, 30, 8)
        said.append(runner.forward([Rows(runner, 0, 0).segment(tokens[1:], 29)], runner.fuse(features)).logits)
    assert said[1].dtype == torch.float32
    assert (said[0] - said[1]).abs().mean() < 0.05 * said[0].std()


def test_training_can_run_a_head_over_its_own_mask_and_differentiate_it(tmp_path: Path) -> None:
    target, written = make.write_target(tmp_path / "target"), make.eagle3(tmp_path / "head")
    head, _ = load_head(written.folder, target.folder, max_len=MAX_LEN)
    runner = HeadRunner(head, num_slots=MAX_LEN, max_sessions=1)
    tokens, features = text(runner, 10, 9)
    expected = runner.forward([Rows(runner, 0, 0).segment(tokens[1:], 9)], runner.fuse(features)).logits

    parameters = {
        name.replace("midlayer.", "layers.0."): torch.nn.Parameter(tensor)
        for name, tensor in written.tensors.items()
        if name not in {"d2t", "t2d", "lm_head.weight"}
    }
    vocabulary = Vocabulary(head.embedding, written.tensors["lm_head.weight"], head.tokens)
    trained = head.config.build(parameters, vocabulary, MAX_LEN, lambda weight, bias: lambda x: linear(x, weight, bias))

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        q, k = apply_rope(q, rope), apply_rope(k, rope)
        return scaled_dot_product_attention(
            q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], is_causal=True, enable_gqa=True
        )[0].transpose(0, 1)

    outputs = trained.forward(torch.tensor(tokens[1:]), trained.fuse(features), torch.arange(9), attend)
    close(trained.logits(outputs), expected)
    trained.logits(outputs).sum().backward()
    assert all(parameter.grad is not None for parameter in parameters.values())


@pytest.mark.skipif(cpu_kernels() is None, reason="needs a C compiler")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("method", [None, "int8", "int8_dynamic", "int4"])
@pytest.mark.parametrize("family", ["eagle", "eagle3-fc-norm", "nextn"])
def test_a_step_in_one_call_is_the_step_by_torchs_operators(
    family: str, method: str | None, dtype: str, tmp_path: Path
) -> None:
    target = make.write_target(tmp_path / "target")
    written, _ = FAMILIES[family](tmp_path / "head", target)
    steps: list[HeadStep] = []
    for attention in ("auto", "torch_native"):
        head, _ = load_head(
            written.folder, target.folder, max_len=MAX_LEN, dtype=dtype, make_linear=KernelLinears(method, 2)
        )
        runner = HeadRunner(head, num_slots=MAX_LEN, max_sessions=1, attention=attention)
        assert (runner.native is not None) == (attention == "auto")
        tokens, features = text(runner, 30, 11)
        steps.append(runner.forward([Rows(runner, 0, 0).segment(tokens[1:], 29)], runner.fuse(features)))
    one, other = steps
    assert one.carried.dtype is other.carried.dtype
    exact = dtype == "float32" and method is None
    for left, right in ((one.logits, other.logits), (one.carried.float(), other.carried.float())):
        assert (left - right).abs().mean() < (1e-5 if exact else 0.03) * right.std()


def test_a_head_of_a_shape_that_triton_does_not_cover_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make.write_target(tmp_path / "target")
    head, _ = load_head(make.eagle(tmp_path / "head").folder, target.folder, max_len=MAX_LEN)
    monkeypatch.setattr(type(head), "device", torch.device("cuda"))
    monkeypatch.setattr("kernels.attention.triton_blocks.MAX_HEAD_DIM", make.HEAD_DIM - 1)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    message = "head_dim is 16; .* 1 to 15: use --speculative-draft-attention-backend torch_native"
    with pytest.raises(StartupError, match=message):
        HeadRunner(head, num_slots=MAX_LEN, max_sessions=1)


def test_steps_of_all_sizes_run_on_each_stage(tmp_path: Path) -> None:
    target = make.write_target(tmp_path / "target")
    written = make.add_multi_layer(target)
    head, _ = load_head(written.folder, target.folder, max_len=MAX_LEN)
    runner = HeadRunner(head, num_slots=40, max_sessions=1, attention="torch_native")
    attention = runner._attention = Recorded()
    runner.run_each_size()
    assert attention.segments == {(rows, tree) for rows in (1, 2, 4, 8, 16, 32, 40) for tree in (False, True)}
    assert head.num_stages > 1
    assert attention.count >= 14 * head.num_stages


@pytest.mark.skipif(cpu_kernels() is None, reason="needs a C compiler")
def test_attention_may_be_narrower_than_the_rows(tmp_path: Path) -> None:
    target, written = make.write_target(tmp_path / "target"), make.eagle(tmp_path / "head")
    width = make.HEAD_DIM
    narrow = {f"layers.0.self_attn.{name}_proj.weight": slice(width) for name in "qkv"}
    tensors = {name: written.tensors[name][rows] for name, rows in narrow.items()}
    tensors["layers.0.self_attn.o_proj.weight"] = written.tensors["layers.0.self_attn.o_proj.weight"][:, :width]
    written = make.rewrite(written, num_attention_heads=1, num_key_value_heads=1, tensors=tensors)
    assert 3 * width < make.HIDDEN
    said = []
    for attention in ("auto", "torch_native"):
        head, _ = load_head(written.folder, target.folder, max_len=MAX_LEN, make_linear=KernelLinears(None, 2))
        runner = HeadRunner(head, num_slots=MAX_LEN, max_sessions=1, attention=attention)
        tokens, features = text(runner, 50, 12)
        said.append(runner.forward([Rows(runner, 0, 0).segment(tokens[1:], 49)], runner.fuse(features)).logits)
    close(*said)
