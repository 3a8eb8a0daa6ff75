"""What a config.json may say, and what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from engine.config import ModelConfig
from engine.feature_spec import FeatureSpec
from engine.rope_config import RopeScaling
from outrider.errors import StartupError

GOOD: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}
NO_WINDOW = {"sliding_window": None, "layer_types": ["sliding_attention", "full_attention"]}


def read(folder: Path, generation: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
    raw = {key: value for key, value in {**GOOD, **changes}.items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(raw))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return ModelConfig.from_folder(folder)


def test_a_plain_config(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert (config.head_dim, config.q_size, config.kv_size) == (16, 64, 32)
    assert config.kv_bytes_per_token(2) == 2 * 2 * 32 * 2
    assert config.eos_token_ids == (2,)
    assert config.checkpoint_dtype == "bfloat16"
    assert config.rope_theta == 10000.0
    assert not config.qkv_bias


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({"eos_token_id": [3, 4]}, (3, 4)),
        ({"eos_token_id": 5}, (5,)),
        ({}, (2,)),
        (None, (2,)),
        ({"eos_token_id": [3, -1, 100]}, (3,)),
        ({"eos_token_id": -1}, ()),
    ],
)
def test_end_ids(tmp_path: Path, generation: dict[str, Any] | None, expected: tuple[int, ...]) -> None:
    assert read(tmp_path, generation).eos_token_ids == expected


def test_no_end_id(tmp_path: Path) -> None:
    assert read(tmp_path, eos_token_id="absent").eos_token_ids == ()


def test_biases_follow_the_family(tmp_path: Path) -> None:
    qwen2 = read(tmp_path, architectures=["Qwen2ForCausalLM"])
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.qk_norm) == (True, False, False)
    llama = read(tmp_path, attention_bias=True)
    assert (llama.qkv_bias, llama.output_bias) == (True, True)
    assert read(tmp_path, architectures=["Qwen3ForCausalLM"]).qk_norm
    assert not read(tmp_path, architectures=["MistralForCausalLM"], attention_bias=True).qkv_bias


def test_which_layers_have_a_sliding_window(tmp_path: Path) -> None:
    def windows(architecture: str, **changes: Any) -> tuple[int, ...]:
        return read(tmp_path, architectures=[f"{architecture}ForCausalLM"], sliding_window=128, **changes).windows

    layers = read(tmp_path).num_layers
    assert windows("Mistral") == (128,) * layers
    assert windows("Llama") == windows("Qwen2") == ()
    assert windows("Qwen2", use_sliding_window=True) == (0,) * layers
    assert windows("Qwen3", use_sliding_window=True, max_window_layers=1) == (0,) + (128,) * (layers - 1)
    kinds = ["full_attention", *["sliding_attention"] * (layers - 1)]
    assert windows("Qwen3", use_sliding_window=True, layer_types=kinds) == (0,) + (128,) * (layers - 1)
    assert read(tmp_path, architectures=["MistralForCausalLM"], sliding_window=None).windows == ()


def test_a_window_as_long_as_the_longest_session_makes_no_difference(tmp_path: Path) -> None:
    config = read(tmp_path, architectures=["MistralForCausalLM"], sliding_window=128)
    assert config.for_length(128).windows == ()
    assert config.for_length(129) == config


def test_rope_in_both_spellings(tmp_path: Path) -> None:
    assert read(tmp_path, rope_theta=5e5).rope_theta == 5e5
    new = read(tmp_path, rope_parameters={"rope_type": "linear", "rope_theta": 7.0, "factor": 2})
    assert (new.rope_theta, new.rope_scaling) == (7.0, RopeScaling("linear", 2.0))
    old = read(
        tmp_path,
        rope_scaling={
            "type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4,
            "original_max_position_embeddings": 99,
        },
    )  # fmt: skip
    assert old.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 99)


def test_rotary_settings_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    def rope(**changes: Any) -> tuple[float, Any]:
        config = read(tmp_path, **changes)
        return config.rope_theta, config.rope_scaling

    llama3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
    newer = {"rope_type": "default", "rope_theta": 7.0}
    assert rope(rope_parameters=newer, rope_scaling={"type": "linear", "factor": 2}, rope_theta=5.0) == (
        5.0, RopeScaling("linear", 2.0),
    )  # fmt: skip
    assert rope(rope_parameters=newer, rope_scaling=None) == (7.0, None)
    length = {"original_max_position_embeddings": 99}
    for own, top, expected in (
        ({}, {}, 512),
        (length, {}, 99),
        ({}, length, 99),
        ({**length}, {next(iter(length)): 64}, 64),
    ):
        assert rope(rope_scaling=llama3 | own, **top)[1] == RopeScaling("llama3", 8.0, 1.0, 4.0, expected)


def test_linear_scaling_stretches_the_context_unless_the_length_before_it_is_named(tmp_path: Path) -> None:
    def longest(**changes: Any) -> int:
        return read(tmp_path, **changes).max_position

    linear = {"rope_type": "linear", "factor": 4.0}
    length = {"original_max_position_embeddings": 128}
    assert longest(rope_parameters=linear) == longest(rope_scaling=linear) == 2048
    assert longest(rope_scaling=linear | length) == longest(rope_scaling=linear, **length) == 512
    assert longest(rope_scaling=linear | {"factor": 0.5}) == 512
    assert longest(rope_scaling=linear | {"factor": 1e308}) == 2**27
    for kind in ("llama3", "yarn"):
        assert longest(rope_scaling=linear | {"rope_type": kind}) == 512


def test_a_draft_head_is_no_model(tmp_path: Path) -> None:
    for name, algorithm in (("LlamaForCausalLMEagle", "EAGLE"), ("Eagle3Speculator", "EAGLE3")):
        with pytest.raises(StartupError, match=f"is no model but a draft head, for .*-algorithm {algorithm}$"):
            read(tmp_path, architectures=[name])


def test_a_key_that_is_left_out_is_what_the_familys_class_takes_for_it(tmp_path: Path) -> None:
    absent = dict.fromkeys(("max_position_embeddings", "num_key_value_heads"), "absent")

    def of(family: str, **changes: Any) -> ModelConfig:
        return read(
            tmp_path, architectures=[f"{family}ForCausalLM"], **{**absent, "num_attention_heads": 32, **changes}
        )

    assert [of(family).max_position for family in ("Llama", "Mistral", "Qwen2", "Qwen3")] == [
        2048, 131_072, 32_768, 32_768,
    ]  # fmt: skip
    assert [of(family).num_kv_heads for family in ("Llama", "Mistral", "Qwen2")] == [32, 8, 32]
    assert [of(family).head_dim for family in ("Llama", "Mistral", "Qwen2", "Qwen3")] == [2, 2, 2, 128]
    assert of("Llama").windows == of("Qwen2").windows == ()
    assert of("Mistral").windows == (4096,) * 2
    assert of("Qwen3", use_sliding_window=True, max_window_layers=1).windows == (0, 4096)
    assert of("Qwen3", use_sliding_window=True, max_window_layers=1, sliding_window=None).windows == ()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": []}, "architectures"),
        ({"architectures": "absent"}, "architectures"),
        ({"architectures": [7]}, "architectures"),
        ({"hidden_size": -64}, "hidden_size is -64"),
        ({"hidden_size": 2**40}, "hidden_size"),
        ({"hidden_size": 64.0}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_attention_heads": 10**9}, "num_attention_heads"),
        ({"vocab_size": None}, "vocab_size"),
        ({"vocab_size": "absent"}, "vocab_size"),
        ({"num_key_value_heads": 3}, "no multiple"),
        ({"head_dim": 15}, "odd"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"rope_theta": 10**400}, "rope_theta"),
        ({"rope_scaling": {"type": ["llama3"]}}, "rope_type is .'llama3'.; it must be a name"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"is_causal": False}, "is_causal is false; a model that looks ahead cannot decode"),
        ({"is_causal": None}, "is_causal is null; a model that looks ahead cannot decode"),
        ({"is_causal": 1}, "is_causal is 1; it must be true or false"),
        ({"configuration_files": ["config.4.0.0.json"]}, "configuration_files names other files to read"),
        ({"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config is not supported"),
        ({"model_type": "mine"}, "model_type is 'mine', of which 'LlamaForCausalLM' is not the architecture"),
        ({"attention_bias": 1}, "attention_bias"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        *(
            ({**top, "rope_scaling": {"type": kind, "factor": 4, **inner}}, f"partial_rotary_factor is 0.5 .*{kind}")
            for kind in ("linear", "yarn", "dynamic")
            for top, inner in (({"partial_rotary_factor": 0.5}, {}), ({}, {"partial_rotary_factor": 0.5}))
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 4}}, "'dynamic' is not supported; linear, llama3 and yarn are"),
        ({"rope_scaling": {"type": "yarn", "beta_fast": 0.5}}, "beta_fast 0.5 must be above beta_slow 1.0"),
        ({"rope_scaling": {"type": "yarn"}, "rope_theta": 1}, "rope_theta is 1.0; with yarn it must be above 1"),
        ({"rope_scaling": [1]}, "object"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "llama3", "factor": 8, "high_freq_factor": 1}}, "high_freq_factor"),
        ({"eos_token_id": [1, "x"]}, "eos_token_id"),
        ({"eos_token_id": [None]}, "eos_token_id"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_window"),
        ({"architectures": ["MistralForCausalLM"], **NO_WINDOW}, "layer_types names .*, but sliding_window is null"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, **NO_WINDOW},
            "layer_types names sliding_attention, but sliding_window is null",
        ),
        (
            {"architectures": ["Qwen3ForCausalLM"], **NO_WINDOW, "sliding_window": 9},
            "layer_types names sliding_attention, but use_sliding_window is false",
        ),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 9,
                "use_sliding_window": True,
                "layer_types": ["full_attention"] * 99,
            },
            "layer_types must name",
        ),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "num_hidden_layers": 1,
                "sliding_window": 9,
                "use_sliding_window": True,
                "layer_types": [["full_attention"]],
            },
            "layer_types must name",
        ),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 9,
                "use_sliding_window": True,
                "max_window_layers": -1,
            },
            "max_window_layers is -1",
        ),
    ],
)
def test_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(StartupError, match=words):
        read(tmp_path, **changes)


@pytest.mark.parametrize("text", ["", "[1]", "{", "nonsense", "[" * 100000])
def test_damaged_files(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(StartupError, match=r"config\.json"):
        ModelConfig.from_folder(tmp_path)


def test_a_pipe_is_no_config(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(StartupError, match=r"config\.json is no file"):
        ModelConfig.from_folder(tmp_path)


def test_the_file_that_is_wrong_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"generation_config\.json: eos_token_id is '2'"):
        read(tmp_path, {"eos_token_id": "2"})


def test_no_config(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="does not exist"):
        ModelConfig.from_folder(tmp_path)


def test_feature_specs(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert FeatureSpec.parse("none").width(config) == 0
    assert FeatureSpec.parse("last").width(config) == 64
    assert FeatureSpec.parse("aux:0,2").width(config) == 128
    assert str(FeatureSpec.parse("aux:0,2")) == "aux:0,2"
    with pytest.raises(StartupError, match="--features is aux:1,3; of a model with 2 layers they are 0 to 2"):
        FeatureSpec.parse("aux:1,3").width(config)


@pytest.mark.parametrize("text", ["", "all", "aux", "aux:", "last:1", "aux:2,1", "aux:1,1", "aux:-1", "aux:x"])
def test_bad_feature_specs(text: str) -> None:
    with pytest.raises(StartupError, match="features"):
        FeatureSpec.parse(text)


def test_end_ids_that_the_model_cannot_say_are_left_out(tmp_path: Path) -> None:
    assert read(tmp_path, eos_token_id=10**6).eos_token_ids == ()
    assert read(tmp_path, {"eos_token_id": [3, 10**6]}).eos_token_ids == (3,)
