"""What a head's checkpoint must have and fit, and what is said when it does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.models.heads.load import HeadFolder, load_head
from engine.models.heads.names import NoHeadError
from engine.models.heads.token_map import load_token_map
from outrider.errors import StartupError
from tests.engine.heads import make
from tests.engine.heads.make import HIDDEN, LAYERS, NARROW, VOCAB, Written


@pytest.fixture
def target(tmp_path: Path) -> Written:
    return make.write_target(tmp_path / "target")


def load(head: Written, target: Written, **options: Any) -> Any:
    return load_head(head.folder, target.folder, max_len=32, **options)


@pytest.mark.parametrize(
    ("make_head", "features"),
    [
        (lambda f, t: make.eagle(f), "last"),
        (lambda f, t: make.eagle3(f), "aux:2,4,5"),
        (lambda f, t: make.eagle3(f, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}), "aux:2,4,5"),
        (lambda f, t: make.eagle3(f, eagle_aux_hidden_state_layer_ids=[1, 3, 4]), "aux:1,3,4"),
        (lambda f, t: make.eagle3(f, eagle_aux_hidden_state_layer_ids=[1, 3, 8]), "aux:1,3,8"),
        (lambda f, t: make.add_nextn(t), "last"),
        (lambda f, t: make.add_mimo(t), "last"),
        (lambda f, t: make.add_multi_layer(t), "aux:8"),
    ],
)
def test_which_states_of_the_target_a_head_goes_on_from(
    make_head: Any, features: str, tmp_path: Path, target: Written
) -> None:
    head = make_head(tmp_path / "head", target)
    assert str(load(head, target)[1]) == features


def test_embedding_and_head_come_from_the_target_and_nothing_else_is_read(tmp_path: Path, target: Written) -> None:
    broken = target.tensors | {"model.layers.3.mlp.up_proj.weight": torch.full((96, HIDDEN), torch.nan)}
    target = make.rewrite(target, tensors=broken)
    head, _ = load(make.eagle(tmp_path / "head"), target)
    assert torch.equal(head.embedding, target.tensors["model.embed_tokens.weight"])
    outputs = torch.randn(3, HIDDEN)
    torch.testing.assert_close(head.logits(outputs), outputs @ target.tensors["lm_head.weight"].T)


def test_a_tied_target_gives_its_embedding_as_the_head(tmp_path: Path) -> None:
    target = make.write_target(tmp_path / "target", tie_word_embeddings=True)
    head, _ = load(make.eagle(tmp_path / "head"), target)
    outputs = torch.randn(3, HIDDEN)
    torch.testing.assert_close(head.logits(outputs), outputs @ target.tensors["model.embed_tokens.weight"].T)


def test_a_target_without_a_head_is_tied_whatever_its_config_leaves_out(tmp_path: Path) -> None:
    target = make.write_target(tmp_path / "target", tie_word_embeddings=True)
    path = target.folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    del config["tie_word_embeddings"]
    outer = {"architectures": config.pop("architectures"), "text_config": config}
    path.write_text(json.dumps(outer), encoding="utf-8")
    head, _ = load(make.eagle(tmp_path / "head"), target)
    outputs = torch.randn(3, HIDDEN)
    torch.testing.assert_close(head.logits(outputs), outputs @ target.tensors["model.embed_tokens.weight"].T)


def test_a_target_inside_a_larger_model_and_in_shards(tmp_path: Path, target: Written) -> None:
    folder = tmp_path / "sharded"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(target.config))
    names = {f"language_model.{name}": tensor for name, tensor in target.tensors.items()}
    shards = {"a.safetensors": {}, "b.safetensors": {}}
    for index, (name, tensor) in enumerate(sorted(names.items())):
        shards[f"{'ab'[index % 2]}.safetensors"][name] = tensor
    for name, tensors in shards.items():
        save_file(tensors, folder / name)
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    head, _ = load_head(make.eagle(tmp_path / "head").folder, folder, max_len=8)
    assert torch.equal(head.embedding, target.tensors["model.embed_tokens.weight"])


def test_an_embedding_and_head_of_its_own_are_used(tmp_path: Path, target: Written) -> None:
    own = make.eagle3(tmp_path / "head")
    embedding = torch.randn(VOCAB, HIDDEN)
    head, _ = load(make.rewrite(own, tensors={"embed_tokens.weight": embedding}), target)
    assert torch.equal(head.embedding, embedding)
    assert head.tokens is not None
    assert head.tokens.tolist() == (own.tensors["d2t"] + torch.arange(NARROW)).tolist()


def test_the_model_prefix_and_the_names_of_aux_norms_do_not_matter(tmp_path: Path, target: Written) -> None:
    own = make.eagle3(tmp_path / "head", fc_norm=True)
    words = {"fc_norm.0": "aux_norm_low", "fc_norm.1": "aux_norm_mid", "fc_norm.2": "aux_norm_high"}
    renamed = {}
    for name, tensor in own.tensors.items():
        for old, new in words.items():
            name = name.replace(old, new)
        renamed["model." + name if name.startswith("midlayer") else name] = tensor
    other = make.write(tmp_path / "other", own.config, renamed)
    features = torch.randn(4, 3 * HIDDEN)
    assert torch.equal(load(other, target)[0].fuse(features), load(own, target)[0].fuse(features))


def test_dtype_follows_the_target_unless_named(tmp_path: Path, target: Written) -> None:
    head = make.eagle(tmp_path / "head")
    target = make.rewrite(target, torch_dtype="bfloat16")
    assert load(head, target)[0].dtype is torch.bfloat16
    assert load(head, target, dtype="float32")[0].dtype is torch.float32
    with pytest.raises(StartupError, match="--dtype is 'int8'; bfloat16"):
        load(head, target, dtype="int8")
    large = make.rewrite(head, tensors={"fc.weight": head.tensors["fc.weight"] + 1e6})
    assert load(large, target)
    with pytest.raises(StartupError, match=r"tensor fc\.weight holds 1e\+06, which is infinity in torch\.float16"):
        load(large, target, dtype="float16")


@pytest.mark.parametrize("make_head", [make.eagle, make.eagle3])
def test_dummy_weights_need_no_files_and_are_the_same_each_time(
    make_head: Any, tmp_path: Path, target: Written
) -> None:
    head = make_head(tmp_path / "head")
    (head.folder / "model.safetensors").unlink()
    one, two = (load(head, target, load_format="dummy")[0] for _ in range(2))
    outputs = torch.randn(2, HIDDEN)
    assert torch.equal(one.logits(outputs), two.logits(outputs))


def without(key: str, head: Written) -> Written:
    return make.write(head.folder, {name: value for name, value in head.config.items() if name != key}, head.tensors)


def test_biases_that_the_config_does_not_speak_of(tmp_path: Path, target: Written) -> None:
    head = without("qkv_bias", make.eagle(tmp_path / "head", qkv_bias=True))
    head = make.rewrite(head, architectures=["Qwen2ForCausalLMEagle"], model_type="qwen2")
    config = HeadFolder.open(head.folder).config
    assert config.block.qkv_bias
    assert config.shapes()["layers.0.self_attn.q_proj.bias"] == (HIDDEN,)
    with pytest.raises(StartupError, match="3 tensors are not known"):
        load(make.rewrite(head, qkv_bias=False), target)


def test_scaling_of_rotary_frequencies_starts_from_the_heads_own_length(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
    head = make.rewrite(make.eagle(tmp_path / "head"), rope_scaling=rope)
    scaling = HeadFolder.open(head.folder).config.block.rope_scaling
    assert scaling is not None
    assert scaling.original_max_position == 256


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_norms_of_q_and_k_are_told_by_the_tensors_and_not_by_a_name(name: str, qk_norm: bool, tmp_path: Path) -> None:
    head = make.rewrite(make.eagle3(tmp_path / "head", qk_norm=qk_norm), model_type=name)
    assert ("layers.0.self_attn.q_norm.weight" in HeadFolder.open(head.folder).config.shapes()) == qk_norm


def test_layers_of_an_eagle3_head_are_counted_where_they_are_stored(tmp_path: Path, target: Written) -> None:
    head = make.rewrite(make.eagle3(tmp_path / "head", layers=2), num_hidden_layers=40)
    assert HeadFolder.open(head.folder).config.block.num_layers == 2
    with pytest.raises(StartupError, match=r"missing: layers\.1\."):
        load(make.rewrite(head, drop=("layers.1.mlp.up_proj.weight",)), target)


# ---- Refusals: each names what is wrong, and both sides where there are two.


def no_tensor(name: str) -> Any:
    return lambda h: make.rewrite(h, drop=(name,))


def tensor(name: str, value: torch.Tensor) -> Any:
    return lambda h: make.rewrite(h, tensors={name: value})


def config(**changes: Any) -> Any:
    return lambda h: make.rewrite(h, **changes)


@pytest.mark.parametrize(
    ("make_head", "spoil", "words"),
    [
        (make.eagle, no_tensor("layers.0.mlp.up_proj.weight"), "1 tensors of the eagle head are missing: layers.0.mlp"),
        (make.eagle, no_tensor("fc.weight"), "holds no draft head"),
        (make.eagle, no_tensor("fc.bias"), "missing: fc.bias"),
        (make.eagle, tensor("fc.weight", torch.zeros(HIDDEN, HIDDEN)), r"fc.weight is \[64, 64\].*\[64, 128\]"),
        (make.eagle, tensor("layers.0.input_layernorm.weight", torch.ones(HIDDEN)), "not known in a eagle head"),
        (make.eagle, tensor("fc.bias", torch.full((HIDDEN,), torch.inf)), "fc.bias holds NaN or infinity"),
        (make.eagle, config(vocab_size=VOCAB + 1), "vocab_size 81; that of .* is 80"),
        (make.eagle, config(layernorms=True), "layernorms is True, which is not supported"),
        (make.eagle, config(num_hidden_layers=2), "missing: layers.1.input_layernorm"),
        (make.eagle, config(rope_scaling={"type": "dynamic", "factor": 2}), "head.config.json: rope scaling 'dynamic'"),
        (make.eagle, config(bias="yes"), "bias is 'yes'; it must be true or false"),
        (make.eagle3, config(target_hidden_size=96), r"fc.weight is \[64, 192\].*\[64, 288\]"),
        (make.eagle3, no_tensor("midlayer.hidden_norm.weight"), "eagle3 head are missing: midlayer.hidden_norm"),
        (
            make.eagle3,
            tensor("midlayer.self_attn.q_proj.weight", torch.zeros(64, 64)),
            r"shape: midlayer.self_attn.q_proj.weight is \[64, 64\], config.json calls for \[64, 128\]",
        ),
        (make.eagle3, tensor("midlayer.sinks", torch.ones(4)), "not known in a eagle3 head: midlayer.sinks"),
        (make.eagle3, no_tensor("d2t"), "d2t is missing; draft_vocab_size is 48, of 80"),
        (make.eagle3, config(draft_vocab_size=40), "draft_vocab_size is 40, but d2t names 48"),
        (make.eagle3, tensor("d2t", torch.full((NARROW,), VOCAB)), "entry 0 is token 80; .* from 0 to 79"),
        (make.eagle3, tensor("d2t", -torch.arange(NARROW)), "token 0 is named 48 times"),
        (make.eagle3, tensor("d2t", torch.zeros(NARROW, dtype=torch.int64)), "t2d marks 48; they are not the same"),
        (
            make.eagle3,
            tensor("d2t", torch.ones(NARROW, dtype=torch.bool)),
            r"d2t is torch.bool \[48\]; a list of whole",
        ),
        (make.eagle3, tensor("d2t", torch.ones(NARROW).to(torch.float8_e5m2)), r"d2t is torch.float8_e5m2 \[48\]"),
        (make.eagle3, tensor("t2d", torch.ones(7, dtype=torch.bool)), r"t2d is \[7\]"),
        (make.eagle3, tensor("lm_head.weight", torch.zeros(0, HIDDEN)), r"lm_head.weight is \[0, 64\]; it is empty"),
        (make.eagle3, tensor("lm_head.weight", torch.zeros(9, HIDDEN)), r"lm_head.weight is \[9, 64\]; \[48, 64\]"),
        (make.eagle3, tensor("embed_tokens.weight", torch.zeros(9, HIDDEN)), r"embed_tokens.weight is \[9, 64\]"),
        (make.eagle3, config(eagle_aux_hidden_state_layer_ids=[1, 2]), r"fc.weight is \[64, 192\].*\[64, 128\]"),
        (make.eagle3, config(num_aux_hidden_states=2, eagle_aux_hidden_state_layer_ids=[1, 2, 3]), "is 2, but 3 aux"),
        (make.eagle3, config(eagle_aux_hidden_state_layer_ids=[1, 2, 9]), r"\[1, 2, 9\]; the target .* has 8 layers"),
        (make.eagle3, config(eagle_aux_hidden_state_layer_ids=[3, 2, 1]), r"layers \[3, 2, 1\].* ids, ascending"),
        (make.eagle3, config(eagle_config=[1]), "eagle_config must be an object"),
        (make.eagle3, config(eagle_aux_hidden_state_layer_ids=["1"]), "must be a list of layer numbers"),
    ],
)
def test_refusals(make_head: Any, spoil: Any, words: str, tmp_path: Path, target: Written) -> None:
    head = spoil(make_head(tmp_path / "head"))
    with pytest.raises(StartupError, match=words):
        load(head, target)


def test_a_target_of_few_layers_needs_aux_layers_by_name(tmp_path: Path, target: Written) -> None:
    head = make.eagle3(tmp_path / "head")
    small = make.write(tmp_path / "small", target.config | {"num_hidden_layers": 3}, target.tensors)
    with pytest.raises(
        StartupError, match=r"\[2, 1, 0\].*eagle_aux_hidden_state_layer_ids .* 3 ids, ascending and distinct"
    ):
        load(head, small)
    named = make.rewrite(head, eagle_aux_hidden_state_layer_ids=[0, 1, 3])
    assert str(load(named, small)[1]) == "aux:0,1,3"


def test_a_head_for_another_hidden_size_is_refused_with_both(tmp_path: Path, target: Written) -> None:
    config = target.config | {"hidden_size": 128}
    other = make.write(tmp_path / "other", config, {"model.embed_tokens.weight": torch.zeros(VOCAB, 128)})
    for head in (make.eagle(tmp_path / "eagle"), make.eagle3(tmp_path / "eagle3")):
        with pytest.raises(StartupError, match=r"for a target of hidden_size 64; that of .* is 128"):
            load(head, other)


def test_a_short_target_has_no_usual_layers(tmp_path: Path, target: Written) -> None:
    with pytest.raises(StartupError, match=r"layers \[2, 2, 1\]; the target .* has 4 layers"):
        load(make.eagle3(tmp_path / "head"), make.rewrite(target, num_hidden_layers=4))


def test_a_target_without_what_is_shared_is_refused(tmp_path: Path, target: Written) -> None:
    target = make.rewrite(target, drop=("lm_head.weight",))
    with pytest.raises(StartupError, match=r"shares lm_head.weight with its target, of which .* has 0"):
        load(make.eagle(tmp_path / "head"), target)


def test_experts_and_latent_attention_are_refused(target: Written) -> None:
    head = make.add_nextn(target)
    with pytest.raises(StartupError, match="kv_lora_rank is 512, which is not supported"):
        load(make.rewrite(head, kv_lora_rank=512), target)
    name = f"model.layers.{LAYERS}.mlp.experts.0.up_proj.weight"
    with pytest.raises(StartupError, match=r"mixture of experts .model\.layers\.8\.mlp"):
        load(make.rewrite(head, tensors={name: torch.zeros(4, HIDDEN)}), target)


def test_two_layers_that_would_take_turns_are_refused(target: Written) -> None:
    head = make.add_nextn(target)
    prefix = f"model.layers.{LAYERS}."
    again = {
        name.replace(prefix, f"model.layers.{LAYERS + 1}."): t for name, t in head.tensors.items() if prefix in name
    }
    with pytest.raises(StartupError, match=r"has 2 nextn layers \(\[8, 9\]\); one"):
        load(make.rewrite(head, tensors=again), target)


def test_a_target_without_such_layers_is_no_head(target: Written) -> None:
    with pytest.raises(NoHeadError, match="holds no draft head"):
        HeadFolder.open(target.folder)
    with pytest.raises(NoHeadError, match="names no draft head"):
        HeadFolder.open(target.folder, load_format="dummy")


@pytest.mark.parametrize(
    ("add", "missing", "wrong"),
    [
        (make.add_nextn, "model.layers.8.shared_head.norm.weight", "model.layers.8.eh_proj.weight"),
        (make.add_nextn, "model.layers.8.mlp.up_proj.weight", "model.layers.8.enorm.weight"),
        (make.add_mimo, "model.mtp_layers.0.token_layernorm.weight", "model.mtp_layers.0.input_proj.weight"),
        (make.add_multi_layer, "model.mtp.layers.1.pre_mlp_layernorm.weight", "model.mtp.layers.2.eh_proj.weight"),
    ],
)
def test_prediction_layers_tensors_go_by_the_files_names(add: Any, missing: str, wrong: str, target: Written) -> None:
    head = add(target)
    with pytest.raises(StartupError, match=rf"head are missing: {missing}$"):
        HeadFolder.open(make.rewrite(head, drop=(missing,)).folder)
    with pytest.raises(StartupError, match=rf"1 tensors have the wrong shape: {wrong} is \[3\]"):
        HeadFolder.open(make.rewrite(head, tensors={missing: head.tensors[missing], wrong: torch.ones(3)}).folder)


def test_pickled_weights_are_refused_unless_allowed(tmp_path: Path, target: Written) -> None:
    head = make.eagle3(tmp_path / "head")
    (head.folder / "model.safetensors").unlink()
    torch.save(head.tensors, head.folder / "pytorch_model.bin")
    with pytest.raises(StartupError, match="only pickled weights"):
        load(head, target)
    loaded, _ = load(head, target, load_format="pt")
    assert loaded.tokens is not None
    assert len(loaded.tokens) == NARROW


# ---- FR-Spec's token map


@pytest.mark.parametrize("form", ["list", "tensor", "safetensors"])
def test_a_token_map_keeps_the_head_rows_of_its_tokens(form: str, tmp_path: Path, target: Written) -> None:
    ids = [7, 3, 70, 0]
    path = tmp_path / ("map.safetensors" if form == "safetensors" else "map.pt")
    if form == "safetensors":
        save_file({"token_map": torch.tensor(ids)}, path)
    else:
        torch.save(ids if form == "list" else torch.tensor(ids), path)
    head, _ = load(make.eagle(tmp_path / "head"), target, token_map=str(path))
    assert head.tokens is not None
    assert head.tokens.tolist() == ids
    outputs = torch.randn(2, HIDDEN)
    torch.testing.assert_close(head.logits(outputs), outputs @ target.tensors["lm_head.weight"][ids].T)
    narrow, _ = load(make.eagle3(tmp_path / "eagle3"), target, token_map=str(path))
    assert narrow.tokens is not None
    assert len(narrow.tokens) == NARROW


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([1, VOCAB], "entry 1 is token 80; the target's token ids are from 0 to 79"),
        ([1, -1], "entry 1 is token -1"),
        ([4, 5, 4], "token 4 is named 2 times"),
        ([], "holds torch.float32|it is empty"),
        ([[1, 2]], r"holds torch.int64 \[1, 2\]"),
        ([1.5], "holds torch.float32"),
        ({"a": 1}, "cannot be read as a list"),
    ],
)
def test_bad_token_maps(ids: Any, words: str, tmp_path: Path) -> None:
    path = tmp_path / "map.pt"
    torch.save(ids, path)
    with pytest.raises(StartupError, match=words):
        load_token_map(str(path), VOCAB)


def test_a_token_map_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="does not exist"):
        load_token_map(str(tmp_path / "none.pt"), VOCAB)
    (tmp_path / "bad.safetensors").write_bytes(b"1234")
    with pytest.raises(StartupError, match="cannot be read"):
        load_token_map(str(tmp_path / "bad.safetensors"), VOCAB)
    (tmp_path / "bad.pt").write_bytes(b"1234")
    with pytest.raises(StartupError, match=r"bad\.pt cannot be read .* or a list or tensor .* torch\.save wrote$"):
        load_token_map(str(tmp_path / "bad.pt"), VOCAB)


@pytest.mark.parametrize("sign", ["midlayer", "d2t", "architecture"])
def test_one_sign_of_eagle3_is_enough(sign: str, tmp_path: Path, target: Written) -> None:
    layer = "midlayer" if sign == "midlayer" else "layers.0"
    others = () if sign == "d2t" else ("d2t", "t2d")
    names = ["LlamaForCausalLMEagle3" if sign == "architecture" else "LlamaForCausalLM"]
    head = make.eagle3(tmp_path / "head", spelling=layer, architectures=names)
    with pytest.raises(StartupError, match=rf"1 tensors of the eagle3 head are missing: {layer}\.hidden_norm"):
        load(make.rewrite(head, drop=(f"{layer}.hidden_norm.weight", *others)), target)
