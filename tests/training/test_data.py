"""Data: what a conversation is made of, what never gets in, and that making it can stop and go on."""

from __future__ import annotations

import errno
import gzip
import json
import random
import shutil
import stat
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from engine.batch import Segment
from engine.runner import DEFAULT_MAX_BATCH_TOKENS, ModelRunner
from kernels.sampling import Filters
from outrider.errors import StartupError, Unfinished
from outrider.out_of_memory import memory_for
from tests.engine.disk import FULL, full_disk
from tests.training.rig import MAX_LEN, VOCAB_SIZE, make_chat, make_composer, make_runner
from training.args import MT_BENCH, DataArgs
from training.chat_format import ChatFormat, Message
from training.data import build, completer
from training.data.completer import PREFILL_TOKENS, Completed, Completer, Completion, Conversation, is_looping
from training.data.conversations import COMPOSED, GIVEN, Mix, Record, Script, given_number, prompt_key
from training.data.material import Material
from training.data.overlap import OverlapFilter, read_prompts
from training.data.passages import Passages, docstrings, documents, is_prose
from training.data.quality import is_sensible, normalized, words
from training.data.store import DataFolder, read_examples, read_facts, shard_paths

FACTS = {"format": 1, "seed": 0, "target": "tiny", "vocab_size": VOCAB_SIZE}


def asked(tokens: list[int], count: int, **options: Any) -> Completion:
    return Completion(tokens, count, frozenset({2}), **options)


def once(completion: Completion) -> Conversation:
    return (yield completion).tokens


# ---- The completer


def test_a_completion_is_the_same_alone_and_among_others(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    wanted = [
        asked(rng.choices(range(3, VOCAB_SIZE), k=rng.randint(1, 30)), 20, filters=Filters(0.7 * (i % 2)), seed=i)
        for i in range(9)
    ]
    alone = [next(Completer(make_runner(target, 1)).run(iter([once(one)]))) for one in wanted]
    monkeypatch.setattr(completer, "PREFILL_TOKENS", 13)
    together = Completer(make_runner(target, 4))
    assert sorted(together.run(once(one) for one in wanted)) == sorted(alone)


def test_turns_go_on_from_what_is_computed_already(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared, computed = [5, 6, 7, 8, 9], [0]
    forward = ModelRunner.forward

    def counted(runner: ModelRunner, segments: Sequence[Segment]) -> torch.Tensor:
        computed[-1] += sum(len(segment.tokens) for segment in segments)
        return forward(runner, segments)

    def two_turns(begin: list[int]) -> Conversation:
        first = yield asked([*begin, 20, 21], 6)
        second = yield asked([*begin, 20, 21, *first.tokens, 30, 31], 6)
        return first.tokens, second.tokens

    monkeypatch.setattr(ModelRunner, "forward", counted)
    plain = Completer(make_runner(target, 2))
    starts = [shared, [4, 4, 4, 4, 4], shared[:3], shared, [5, 6, 7, 8, 1]]
    expected = sorted(plain.run(two_turns(start) for start in starts))
    computed.append(0)
    kept = Completer(make_runner(target, 2), shared=shared)
    assert sorted(kept.run(two_turns(start) for start in starts)) == expected
    assert computed[1] < computed[0]


def test_a_completion_ends_at_its_limit_and_at_the_context(target: Path) -> None:
    def reasons() -> Conversation:
        short = yield asked([3, 4], 5, cuts_loops=False)
        full = yield asked(list(range(3, MAX_LEN - 5)), 50, cuts_loops=False)
        none = yield asked(list(range(3, MAX_LEN + 20)), 50)
        return [(len(one.tokens), one.reason) for one in (short, full, none)]

    (found,) = Completer(make_runner(target, 1)).run(iter([reasons()]))
    assert found[0] == (5, "length")
    assert found[1][1] == "context"
    assert found[2] == (0, "context")


def test_loops() -> None:
    assert is_looping([1, 2, 3] * 16)
    assert not is_looping([1, 2, 3] * 15)
    assert not is_looping(list(range(48)))


# ---- Prompts


@pytest.mark.parametrize(
    ("text", "sensible"),
    [
        ("What is the capital of France?", True),
        ("Write a function.\n\nIt takes a list of numbers and returns the largest of them.", True),
        ("Hi", False),
        ("????? ..... 11111 ----- 22222", False),
        ("东京的天气怎么样今天好吗 really?", False),
        ("the cat and the dog " * 12, False),
        ("- apple\n- pear\n" * 8, False),
    ],
)
def test_what_prompts_are_worth_an_answer(text: str, sensible: bool) -> None:
    assert is_sensible(text) == sensible


def test_every_slot_of_every_template_can_be_filled() -> None:
    composer, material, rng = make_composer(), Material.load(), random.Random(0)
    groups = (material.openers, material.follow_ups, material.wishes, material.systems, material.self_written)
    for template in [t for group in (*groups, *material.templates.values()) for t in group]:
        filled = composer.fill(template, rng)
        assert "{" not in filled, template
    assert material.weights.keys() == material.templates.keys()
    prompts = {composer.prompt(rng) for _ in range(500)}
    assert len(prompts) > 400
    assert "Whales sing." in composer.about("summary", "Whales sing.", rng)


def test_prose_and_docstrings(tmp_path: Path) -> None:
    prose = "This package brings a small tool for people who keep bees. " * 4
    (tmp_path / "README").write_text(f"{prose}\n\n| a | b |\n| 1 | 2 |\n")
    (tmp_path / "changelog.txt").write_text(prose)
    packed = bytearray(gzip.compress(prose.encode()))
    packed[10] |= 7  # a block of no type that there is
    (tmp_path / "damaged.gz").write_bytes(packed)
    assert list(documents(tmp_path)) == [prose.strip()]
    (tmp_path / "tool.py").write_text(
        f'def keep(bees, *, warm=True):\n    """{prose}"""\n\ndef _own():\n    """{prose}"""\n'
    )
    (found,) = docstrings(tmp_path)
    assert found.startswith("tool: def keep(bees, *, warm=True)\n\nThis package")
    assert is_prose(prose)
    assert not is_prose("x = [1, 2, 3]; y = {4: 5}")
    with pytest.raises(StartupError, match="no documentation"):
        Passages([], [])


# ---- What never gets in


def test_a_benchmarks_prompts_are_found_in_any_dress() -> None:
    overlap = OverlapFilter(read_prompts(MT_BENCH))
    questions = [json.loads(line)["turns"] for line in MT_BENCH.read_text(encoding="utf-8").splitlines()]
    for turn in [turn for turns in questions for turn in turns]:
        assert overlap.overlaps(turn)
        assert overlap.overlaps(turn.upper().replace(",", " ;"))
        if len(turn.split()) > 12:
            assert overlap.overlaps("Please help me. " + " ".join(turn.split()[:-2]) + " and so on")
    assert not overlap.overlaps("Write a short poem about the sea and the people who live beside it.")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Café_au-lait, №5!", "cafe au lait no5"),
        ("don\u2019t  STOP\u2014now", "dont stopnow"),
        ("Straße ÆRØ", "straße ærø"),
        ("Почему небо голубое?", "почему небо голубое"),
        ("Ποιος είσαι;", "ποιος εισαι"),
        ("दिन में", "दिन में"),
        ("क्या है।क्यों", "क्या है क्यों"),
        ("ሰላም፡ለዓለም", "ሰላም ለዓለም"),
        ("བོད་ཡིག", "བོད ཡིག"),
        ("鲸鱼会唱歌吗？", "鲸 鱼 会 唱 歌 吗"),
        ("が、ガ", "が ガ"),
        ("한국어 문장", "한국어 문장"),
        ("Türkçe\u00a0IŞIK", "turkce isik"),
    ],
)
def test_words_of_any_script(text: str, found: str) -> None:
    assert words(text) == found.split()


def test_prompts_without_words_are_known_apart() -> None:
    assert normalized(" ??") == "??"
    assert normalized("\U0001f433") != normalized("\U0001f40b") != ""


@pytest.mark.parametrize(
    "text",
    [
        "鲸鱼为什么会在夜里唱歌给大海听？", "Почему киты поют ночью в холодном море зимой, а летом молчат?",
        "ለምን፡ዓሣዎች፡በሌሊት፡በባሕር፡ውስጥ፡ይዘምራሉ፡እና፡በክረምት፡ዝም፡ይላሉ",
    ],
)  # fmt: skip
def test_a_benchmark_in_another_script_is_kept_out(text: str) -> None:
    overlap = OverlapFilter([text])
    assert overlap.overlaps(f"OK. {text.upper()} !")
    assert not overlap.overlaps(f"OK. {text[:6]}")
    assert not overlap.overlaps("Do whales sing? " * 4)


def test_no_template_asks_what_the_benchmark_asks() -> None:
    overlap, composer, rng = OverlapFilter(read_prompts(MT_BENCH)), make_composer(), random.Random(1)
    texts = [composer.prompt(rng) for _ in range(3000)] + [composer.opener(rng) for _ in range(1000)]
    assert [text for text in texts if overlap.overlaps(text)] == []


def scripted(target: Path, overlap: OverlapFilter, given: list[list[Message]], **mix: float) -> Script:
    return Script(make_chat(target), make_composer(), overlap, seed=3, mix=Mix(**mix), given=given)


def results(target: Path, script: Script, numbers: Iterable[int]) -> list[Record]:
    completer = Completer(make_runner(target, 4, 512), shared=make_chat(target).opening)
    found = completer.run(script.conversation(index) for index in numbers)
    return sorted((record for records in found for record in records), key=lambda record: record.index)


def test_nothing_that_was_made_overlaps_with_the_benchmark_and_nothing_is_asked_twice(target: Path) -> None:
    turns = [json.loads(line)["turns"][0] for line in MT_BENCH.read_text(encoding="utf-8").splitlines()][:5]
    given = [[{"role": "user", "content": text}] for text in (*turns, "Do whales sing?", "do whales sing!", *turns)]
    script = scripted(target, OverlapFilter(read_prompts(MT_BENCH)), given)
    records = results(target, script, script.given_numbers)
    assert [record.index for record in records] == [given_number(given[5])]
    assert records[0].source == GIVEN
    assert records[0].key == prompt_key("Do Whales Sing")


# ---- Conversations


def test_a_number_and_a_seed_make_a_conversation(target: Path) -> None:
    overlap = OverlapFilter([])
    mix = {"sampled": 0.2, "passage": 0.3, "more_turns": 0.6}
    whole = results(target, scripted(target, overlap, [], **mix), range(12))
    halves = scripted(target, overlap, [], **mix)
    later = results(target, halves, range(6, 12))
    assert [record for record in whole if record.index >= 6] == later
    assert {record.source for record in whole} > {COMPOSED}


def spoken(talk: Conversation, said: list[int]) -> list[Record]:
    """The records of a conversation in which every completion is the same."""
    try:
        next(talk)
        while True:
            talk.send(Completed(list(said), "stop"))
    except StopIteration as ended:
        return ended.value


def test_another_turn_goes_on_from_the_first(target: Path) -> None:
    chat = make_chat(target)
    script = Script(chat, make_composer(), OverlapFilter([]), seed=3, mix=Mix(sampled=0.0, passage=0.0, more_turns=1.0))
    said, two = [*chat.encode("So it is."), 2], []
    for index in range(8):
        two += [record for record in spoken(script.conversation(index), said) if len(record.answers) == 2]
    assert two
    for record in two:
        (_, first_end), (second_start, second_end) = record.answers
        between = chat.tokenizer.decode(record.tokens[first_end:second_start], skip_special_tokens=False)
        assert between.startswith("\n<|im_start|>user\n")
        assert between.endswith("<|im_end|>\n<|im_start|>assistant\n")
        assert record.tokens[second_start:second_end] == said
        assert second_end == len(record.tokens)


def test_answers_are_the_targets_own_and_are_marked(target: Path) -> None:
    chat = make_chat(target)
    script = scripted(target, OverlapFilter([]), [[{"role": "user", "content": "Do whales sing?"}]], greedy=1.0)
    (record,) = results(target, script, script.given_numbers)
    prompt = chat.prompt([{"role": "user", "content": "Do whales sing?"}])
    ((start, end),) = record.answers
    assert record.tokens[:start] == prompt
    assert end == len(record.tokens)
    (answer,) = Completer(make_runner(target, 1, 512)).run(iter([once(asked(prompt, 400))]))
    assert record.tokens[start:] == answer[: end - start]


def test_what_a_template_refuses_is_left_out(target: Path, tmp_path: Path) -> None:
    """Templates of Mistral and Gemma refuse a system message."""
    shutil.copytree(target, tmp_path, dirs_exist_ok=True)
    template = tmp_path / "chat_template.jinja"
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    template.write_text(refusing + template.read_text())
    given = [
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Do birds?"}],
        [{"role": "user", "content": "Do whales sing?"}],
    ]
    script = scripted(tmp_path, OverlapFilter([]), given, sampled=0.5, passage=0.0, more_turns=0.0, system=1.0)
    said = [*make_chat(tmp_path).encode("So it is."), 2]
    assert [len(spoken(script.conversation(number), said)) for number in script.given_numbers] == [0, 1]
    assert any(spoken(script.conversation(number), said) for number in range(8))
    template.write_text(template.read_text().replace("messages[0].role == 'system'", "messages | length > 1"))
    script = scripted(tmp_path, OverlapFilter([]), [], sampled=0.0, passage=0.0, more_turns=1.0)
    found = [record for number in range(8) for record in spoken(script.conversation(number), said)]
    assert {len(record.answers) for record in found} == {1}


def test_the_template_opens_and_closes_turns(target: Path) -> None:
    chat = make_chat(target)
    assert chat.decode(chat.opening) == "user\n"
    assert chat.user_stops == {2}
    turn = chat.user_turn([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}], "Why")
    assert chat.tokenizer.decode(turn, skip_special_tokens=False).endswith("<|im_start|>user\nWhy")


def test_a_model_without_a_template_is_refused(target: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((target / name).read_bytes())
    with pytest.raises(StartupError, match="no chat template"):
        ChatFormat.of_model(tmp_path)


# ---- On disk


def test_shards_are_added_and_read_back(tmp_path: Path) -> None:
    store = DataFolder(tmp_path, FACTS)
    first = Record(0, COMPOSED, 0.7, [5, 6, 7, 8], [(1, 2), (3, 4)], key=11)
    second = Record(1, GIVEN, 0.0, [9, 419], [(1, 2)], key=-12)
    store.add(0, [first])
    store.flush()
    store.add(1, [second, Record(1, COMPOSED, 0.0, [3, 3], [(1, 2)])])
    store.add(2, [])
    store.flush()
    store.flush()
    again = DataFolder(tmp_path, FACTS)
    assert (again.ended, again.keys, again.num_answer_tokens) == ({0, 1, 2}, {11, -12}, 4)
    paths = shard_paths(tmp_path)
    examples = [example for path in paths for example in read_examples(path)]
    assert len(paths) == 2
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths} == {0o644}  # a head's training may be another user's
    assert [example.tokens.tolist() for example in examples] == [[5, 6, 7, 8], [9, 419], [3, 3]]
    assert [example.answers for example in examples] == [((1, 2), (3, 4)), ((1, 2),), ((1, 2),)]
    assert [example.source for example in examples] == [COMPOSED, GIVEN, COMPOSED]
    assert np.allclose([example.temperature for example in examples], [0.7, 0, 0])


def test_several_processes_fill_a_folder(tmp_path: Path) -> None:
    one, two = DataFolder(tmp_path, FACTS), DataFolder(tmp_path, FACTS)
    one.add(0, [Record(0, COMPOSED, 0.0, [5, 6], [(1, 2)], key=1)])
    two.add(1, [Record(1, COMPOSED, 0.0, [5, 7], [(1, 2)], key=1), Record(1, COMPOSED, 0.0, [5, 8], [(1, 2)], key=2)])
    one.flush()
    two.flush()
    assert [path.name for path in shard_paths(tmp_path)] == ["shard-00000.safetensors", "shard-00001.safetensors"]
    assert (two.keys, two.ended, two.num_answer_tokens) == ({1, 2}, {0, 1}, 2)
    found = [example.tokens.tolist() for path in shard_paths(tmp_path) for example in read_examples(path)]
    assert found == [[5, 6], [5, 8]]
    assert DataArgs(output="x", share="2/3").share_of() == (2, 3)
    for wrong in ("0/3", "4/3", "2", "a/b", "1/²", "1/" + "9" * 5000):
        with pytest.raises(StartupError, match="--share is"):
            DataArgs(output="x", share=wrong)


def test_data_of_another_seed_or_target_is_not_added_to(tmp_path: Path) -> None:
    DataFolder(tmp_path, FACTS)
    with pytest.raises(StartupError, match="made with seed 0, now 1"):
        DataFolder(tmp_path, FACTS | {"seed": 1})


def test_an_older_folder_keeps_to_what_it_knew(tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text(json.dumps(FACTS))
    DataFolder(tmp_path, FACTS, asked={"tokens": 5})
    assert read_facts(tmp_path) == FACTS


@pytest.mark.parametrize(
    "text",
    ["[]", "{}", "5", json.dumps(FACTS | {"made_with": [{"tokens": "9"}]}), '{"target": "x"}', "{", "[" * 100_000],
)
def test_a_folder_that_does_not_say_what_made_its_data_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text(text)
    with pytest.raises(StartupError, match=f"{tmp_path}"):
        read_facts(tmp_path)
    with pytest.raises(StartupError, match=f"{tmp_path}"):
        DataFolder(tmp_path, FACTS)


def test_a_shard_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    store = DataFolder(tmp_path / "data", FACTS)
    store.add(0, [Record(0, COMPOSED, 0.0, [5, 6], [(1, 2)], key=1)])
    shutil.rmtree(tmp_path / "data")
    with pytest.raises(Unfinished, match=r"training data cannot be kept in .*data: .*No such file"):
        store.flush()


def test_a_full_disk_leaves_the_shards_that_there_are(tmp_path: Path) -> None:
    store = DataFolder(tmp_path, FACTS)
    for index, num_tokens in enumerate((2, 5000)):
        store.add(index, [Record(index, COMPOSED, 0.0, [5] * num_tokens, [(1, 2)], key=index)])
        if index == 0:
            store.flush()
    names = {path.name for path in tmp_path.iterdir()}
    with full_disk(5000), pytest.raises(Unfinished, match=f"kept in {tmp_path}: .*{FULL}"):
        store.flush()
    assert {path.name for path in tmp_path.iterdir()} == names
    store.flush()
    assert len(shard_paths(tmp_path)) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *[({name: None}, f"it has no {name} of") for name in ("tokens", "offsets", "answers", "keys", "ended")],
        ({"answers": np.zeros(3, np.int64)}, "it has no answers of 2 dimensions"),
        ({"answers": np.array([[5, 0, 1]])}, "do not fit one another"),
        ({"offsets": np.array([0, 9])}, "do not fit one another"),
        ({"sources": np.array([99], np.uint8)}, "do not fit one another"),
    ],
)
def test_a_shard_with_parts_missing_or_wrong_is_refused(
    change: dict[str, np.ndarray | None], message: str, tmp_path: Path
) -> None:
    store = DataFolder(tmp_path, FACTS)
    store.add(0, [Record(0, COMPOSED, 0.0, [5, 6], [(1, 2)], key=1)])
    store.flush()
    (path,) = shard_paths(tmp_path)
    tensors = load_file(path) | change
    save_file({name: value for name, value in tensors.items() if value is not None}, path)
    with pytest.raises(StartupError, match=f"{path} .*{message}"):
        list(read_examples(path))
    with pytest.raises(StartupError, match=f"{path} .*{message}"):
        DataFolder(tmp_path, FACTS)


def test_data_that_does_not_fit_in_memory_is_told_with_its_flags() -> None:
    with pytest.raises(StartupError, match=r"--batch-size 1000000000 and --max-len 1024 ask for"):
        DataArgs(output="x", batch_size=1_000_000_000)
    for error in (
        MemoryError(),
        OSError(errno.ENOMEM, "no"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ):
        with pytest.raises(StartupError, match="no memory for --batch-size 5"), memory_for("--batch-size 5"):
            raise error
    with pytest.raises(RuntimeError, match="something else"), memory_for("--batch-size 5"):
        raise RuntimeError("something else")


def test_a_kernel_that_a_gpu_has_no_room_for_is_told_with_what_it_lacks() -> None:
    errors = pytest.importorskip("triton.runtime.errors", reason="triton is not installed")
    message = "^a kernel does not fit this GPU: out of resource: shared memory, Required: 98304, Hardware limit: 65536"
    with pytest.raises(StartupError, match=message), memory_for("--batch-size 5"):
        raise errors.OutOfResources(98304, 65536, "shared memory")


def test_the_command_goes_on_with_what_is_there(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Passages, "of_system", lambda: Passages(["Whales sing."], ["def f(x): pass"]))
    monkeypatch.setattr(build, "SHARD_TOKENS", 200)
    prompts = tmp_path / "own.jsonl"
    prompts.write_text(json.dumps("Do whales sing?") + "\n")
    output = tmp_path / "data"

    def make(tokens: int) -> None:
        args = DataArgs(
            model_path=str(target), dtype="float32", device="cpu", threads=1, output=str(output), tokens=tokens,
            batch_size=4, max_len=256, prompts=(str(prompts),), sampled_share=0.2, greedy_share=1.0,
        )  # fmt: skip
        assert build.main(args) == 0

    make(400)
    prompts.write_text(json.dumps("Do whales sing?") + "\n" + json.dumps("Do birds?") + "\n")
    first = {path.name: path.read_bytes() for path in shard_paths(output)}
    made = DataFolder(output, read_facts(output))
    make(1500)
    after = DataFolder(output, read_facts(output))
    assert after.num_answer_tokens >= 1500
    assert after.ended > made.ended
    assert {name: (output / name).read_bytes() for name in first} == first
    examples = [example for path in shard_paths(output) for example in read_examples(path)]
    assert [example.source for example in examples].count(GIVEN) == 2  # a prompt that is new is asked
    begins = [example.tokens[: example.answers[0][0]].tobytes() for example in examples]
    assert len(set(begins)) == len(begins)
    assert "tokens/s generated" in capsys.readouterr().out


def test_prompts_that_cannot_be_read_leave_no_folder(target: Path, tmp_path: Path) -> None:
    prompts, output = tmp_path / "own.jsonl", tmp_path / "data"
    prompts.write_text("{")
    with pytest.raises(StartupError, match=f"{prompts}, line 1: it is not JSON"):
        build.main(DataArgs(model_path=str(target), output=str(output), prompts=(str(prompts),)))
    assert not output.exists()


def test_a_step_holds_a_row_of_every_conversation_and_prompts(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []

    def load(*_: Any, max_batch_tokens: int = DEFAULT_MAX_BATCH_TOKENS, **__: Any) -> None:
        held.append(max_batch_tokens)
        raise MemoryError

    monkeypatch.setattr(ModelRunner, "load", load)
    for count in (4, 4000):
        with pytest.raises(StartupError, match="no memory for"):
            build.main(DataArgs(model_path=str(target), output=str(tmp_path), batch_size=count, max_len=256))
    assert held == [DEFAULT_MAX_BATCH_TOKENS, 4000 + PREFILL_TOKENS]


def test_the_benchmark_is_kept_out_unless_told_otherwise() -> None:
    assert DataArgs(output="x").exclude_paths() == [MT_BENCH]
    assert DataArgs(output="x", exclude=("none",)).exclude_paths() == []


def test_the_benchmark_is_part_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["*"]
    assert any(MT_BENCH.match(pattern) for pattern in patterns)
    assert MT_BENCH.is_file()
    assert MT_BENCH.parent == Path(build.__file__).parent
