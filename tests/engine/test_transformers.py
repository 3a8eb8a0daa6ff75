"""Models of other families, run by transformers over our pool: its own logits, trees, features, and what is refused."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from structlog.testing import capture_logs

from engine.config import ModelConfig
from engine.feature_spec import FeatureSpec
from engine.model_folder import resolve_model
from engine.models.transformers_decoder import windows_of
from engine.runner import ModelRunner
from outrider.errors import StartupError
from tests.engine.test_quantization import plain_greedy, tree_greedy
from tests.engine.tiny import SHAPE, VOCAB_SIZE, random_tokens, sessions

TOLERANCE = 2e-4
WINDOW = 12
# Phi keeps a key head for each query head; its partial rotation needs none of SHAPE's head_dim.
PHI = {key: value for key, value in SHAPE.items() if key not in {"head_dim", "num_key_value_heads"}}


def configs() -> dict[str, transformers.PretrainedConfig]:
    """Shapes of families that the engine has no decoder for."""
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
    return {
        "gemma2": transformers.Gemma2Config(
            **SHAPE, sliding_window=WINDOW, attn_logit_softcapping=3.0, final_logit_softcapping=5.0,
            query_pre_attn_scalar=16,
        ),
        "gemma3": transformers.Gemma3TextConfig(
            **SHAPE, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
        ),
        "phi": transformers.PhiConfig(**PHI),
        "phi3": transformers.Phi3Config(**SHAPE, sliding_window=WINDOW, pad_token_id=0),
        "qwen3-moe": transformers.Qwen3MoeConfig(**SHAPE, **experts),
        # Its window is in its mask alone.
        "phimoe": transformers.PhimoeConfig(
            **SHAPE, sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2
        ),
        # Its window is in no mask of transformers'.
        "moshi": transformers.MoshiConfig(**SHAPE, sliding_window=WINDOW),
        # Its router asks for the dtype of a linear layer's weight.
        "hunyuan-moe": transformers.HunYuanMoEV1Config(**SHAPE, num_experts=4, moe_topk=2),
        # A family of ours with what our decoders do not have.
        "llama": transformers.LlamaConfig(
            **SHAPE, mlp_bias=True, hidden_act="gelu",
            rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
                             "original_max_position_embeddings": 256},
        ),
        "gpt2": transformers.GPT2Config(
            vocab_size=VOCAB_SIZE, n_embd=96, n_layer=3, n_head=6, n_positions=512, bos_token_id=1, eos_token_id=2
        ),
    }  # fmt: skip


def save(name: str, folder: Path) -> Any:
    torch.manual_seed(len(name))
    model = transformers.AutoModelForCausalLM.from_config(configs()[name], dtype=torch.float32).eval()
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module", params=sorted(configs()))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    model = save(request.param, folder)
    # sdpa leaves soft caps out.
    model.set_attn_implementation("eager")
    return folder, model


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("gemma")
    return folder, save("gemma2", folder)


def load(folder: Path, **options: Any) -> ModelRunner:
    settings: dict[str, Any] = {"dtype": "float32", "num_slots": 600, "max_sessions": 4, "max_len": 200} | options
    return ModelRunner.load(folder, **settings)


def logits_of(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens]), use_cache=False).logits[0]


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=0)


def test_chunks_decoding_and_sessions_together(pair: tuple[Path, Any]) -> None:
    folder, model = pair
    runner = load(folder)
    assert runner.backend.startswith("transformers")
    assert not runner.config.is_native
    first, second = sessions(runner, 2)
    tokens, others = random_tokens(50, 1), random_tokens(30, 2)
    expected, other_expected = logits_of(model, tokens), logits_of(model, others)
    close(runner.forward([first.segment(tokens[:30])]), expected[:30])
    together = runner.forward([second.segment(others), first.segment(tokens[30:31])])
    close(together, torch.cat([other_expected, expected[30:31]]))
    for position in range(31, 50):
        close(runner.forward([first.segment([tokens[position]])])[0], expected[position])
    assert runner.forward([second.segment([3], 0)]).shape == (0, VOCAB_SIZE)


def test_logits_of_some_tokens_alone(gemma: tuple[Path, Any]) -> None:
    folder, _ = gemma
    wanted, tokens = torch.tensor([40, 3, 77]), random_tokens(20, 9)
    some, every = load(folder, output_rows=wanted), load(folder)
    (session,), (other,) = sessions(some, 1), sessions(every, 1)
    close(some.forward([session.segment(tokens)]), every.forward([other.segment(tokens)])[:, wanted])
    assert some.num_outputs == 3


def test_every_path_of_a_tree_equals_its_own_sequence(pair: tuple[Path, Any]) -> None:
    folder, model = pair
    runner = load(folder)
    (session,) = sessions(runner, 1)
    prefix, tokens = random_tokens(25, 3), random_tokens(14, 4)
    runner.forward([session.segment(prefix, 0)])
    rng = np.random.default_rng(5)
    parents = [-1, *(int(rng.integers(0, row)) for row in range(1, 14))]
    logits = runner.forward([session.tree(tokens, parents)])
    for row in range(14):
        path, node = [], row
        while node >= 0:
            path.insert(0, tokens[node])
            node = parents[node]
        close(logits[row], logits_of(model, prefix + path)[-1])


def test_speculation_changes_no_token(pair: tuple[Path, Any]) -> None:
    runner = load(pair[0])
    plain, drafted, _ = sessions(runner, 3)
    prompt = random_tokens(20, 6)
    expected = plain_greedy(runner, plain, prompt, 40)
    said, num_accepted = tree_greedy(runner, drafted, prompt, 40, expected, 7)
    assert said == expected
    assert num_accepted > 3


@pytest.mark.parametrize("spec", ["last", "aux:0,1,3"])
def test_features(gemma: tuple[Path, Any], spec: str) -> None:
    folder, model = gemma
    runner = load(folder, features=FeatureSpec.parse(spec))
    (session,) = sessions(runner, 1)
    tokens = random_tokens(30, 8)
    segment = session.segment(tokens, 0)
    runner.forward([segment])
    entering: list[torch.Tensor] = []
    noted = [*model.model.layers, model.model.norm]
    hooks = [module.register_forward_pre_hook(lambda _m, args: entering.append(args[0][0])) for module in noted]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        final = model.model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]
    for hook in hooks:
        hook.remove()
    expected = final if spec == "last" else torch.cat([entering[i] for i in (0, 1, 3)], dim=-1)
    assert runner.features is not None
    torch.testing.assert_close(runner.features[segment.slots], expected, atol=1e-3, rtol=1e-4)


def test_other_dtypes_formats_and_quantisation(gemma: tuple[Path, Any], tmp_path: Path) -> None:
    folder, model = gemma
    tokens, ids = random_tokens(40, 9), set()
    model.set_attn_implementation("eager")
    expected = logits_of(model, tokens)
    pickled = tmp_path / "pickled"
    shutil.copytree(folder, pickled)
    (pickled / "model.safetensors").unlink()
    torch.save(model.state_dict(), pickled / "pytorch_model.bin")
    for where, options, bound in (
        (folder, {}, 1e-4), (pickled, {"load_format": "pt"}, 1e-4), (folder, {"dtype": "bfloat16"}, 0.1),
        (folder, {"quantization": "int8"}, 0.1), (folder, {"quantization": "int4"}, 0.8),
    ):  # fmt: skip
        runner = load(where, **options)
        ids.add(runner.numerics_id)
        (session,) = sessions(runner, 1)
        found = runner.forward([session.segment(tokens)])
        assert (found - expected).std() < bound * expected.std()
    assert len(ids) == 5
    dummy = [load(folder, load_format="dummy") for _ in range(2)]
    assert dummy[0].numerics_id == dummy[1].numerics_id
    (one, other) = (runner.forward([sessions(runner, 1)[0].segment(tokens)]) for runner in dummy)
    assert torch.equal(one, other)


def test_pickled_files_need_to_be_allowed(gemma: tuple[Path, Any], tmp_path: Path) -> None:
    shutil.copytree(gemma[0], tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").rename(tmp_path / "m" / "pytorch_model.bin")
    with pytest.raises(StartupError, match="--load-format pt"):
        load(tmp_path / "m")


LATENT: dict[str, Any] = {
    **PHI, "num_hidden_layers": 1, "num_key_value_heads": 6, "kv_lora_rank": 16, "q_lora_rank": None,
    "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 2, "n_group": 1,
    "topk_group": 1, "num_experts_per_tok": 1, "moe_intermediate_size": 16,
}  # fmt: skip
SINKS: dict[str, Any] = {
    **SHAPE, "num_local_experts": 2, "num_experts_per_tok": 1, "layer_types": ["full_attention"] * 3
}  # fmt: skip
SMALL: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "hidden_size": 32}


def count_rows_for_positions(kind: str) -> transformers.PretrainedConfig:
    """A decoder that passes over the positions that it is given."""
    return getattr(transformers, kind)(
        vocab_size=VOCAB_SIZE, d_model=32, decoder_layers=2, decoder_attention_heads=2, encoder_attention_heads=2,
        decoder_ffn_dim=64, max_position_embeddings=128, is_decoder=True, is_encoder_decoder=False, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, num_hidden_layers=2,
    )  # fmt: skip


REFUSED: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    r"MambaForCausalLM.*num_attention_heads": lambda: transformers.MambaConfig(
        **SMALL, num_hidden_layers=2, state_size=4
    ),
    r"DeepseekV3ForCausalLM.*keys of 6 heads of 32": lambda: transformers.DeepseekV3Config(**LATENT),
    r"GptOssForCausalLM.*s_aux": lambda: transformers.GptOssConfig(**SINKS),
    r"DogeForCausalLM.*hands attention_mask": lambda: transformers.DogeConfig(**SHAPE),
    r"Llama4ForCausalLM.*attn_temperature_tuning": lambda: transformers.Llama4TextConfig(
        **SHAPE, intermediate_size_mlp=96, layer_types=["full_attention"] * 3, no_rope_layers=[1, 0, 1]
    ),
    r"GPTJForCausalLM.*takes no attention but its own": lambda: transformers.GPTJConfig(
        **SMALL, n_layer=1, n_head=2, rotary_dim=8, n_positions=64, bos_token_id=1, eos_token_id=2
    ),
    r"FalconForCausalLM.*takes no attention but its own": lambda: transformers.FalconConfig(
        **SMALL, num_hidden_layers=1, num_attention_heads=2, bos_token_id=1, eos_token_id=2
    ),
    **{
        rf"{name}ForCausalLM.*away from transformers' own": partial(count_rows_for_positions, f"{name}Config")
        for name in ("Bart", "MBart", "Marian", "PLBart", "Blenderbot")
    },
    r"BloomForCausalLM.*max_position_embeddings": lambda: transformers.BloomConfig(**SMALL, n_layer=2, n_head=2),
}


@pytest.mark.parametrize("message", REFUSED)
def test_other_attention_is_refused_by_name(message: str, tmp_path: Path) -> None:
    config = REFUSED[message]()
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    with pytest.raises(StartupError, match=message):
        load(tmp_path)


@pytest.mark.parametrize(
    ("config", "window"),
    [
        (transformers.PhimoeConfig(sliding_window=WINDOW), WINDOW),
        (transformers.PhimoeConfig(), None),
        (transformers.Qwen3MoeConfig(sliding_window=WINDOW, use_sliding_window=False), None),
        (transformers.Qwen2Config(sliding_window=WINDOW, use_sliding_window=False, num_hidden_layers=3), 0),
        (transformers.LlamaConfig.from_dict({"sliding_window": WINDOW}), None),
    ],
)
def test_a_window_without_layer_types_is_every_layers_where_the_family_reads_it(
    config: transformers.PretrainedConfig, window: int | None, gemma: tuple[Path, Any]
) -> None:
    assert windows_of(config, load(gemma[0]).config) == (() if window is None else (window,) * 3)


@pytest.mark.parametrize("hidden_act", ["silu", "swish"])
def test_a_window_that_the_family_does_not_have_is_not_used_and_a_line_says_so(hidden_act: str, tmp_path: Path) -> None:
    torch.manual_seed(4)
    config = transformers.LlamaConfig(**SHAPE, hidden_act=hidden_act)  # swish: on transformers' network
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    plain = json.loads(path.read_text())
    for window in (None, WINDOW):
        path.write_text(json.dumps({**plain, "sliding_window": window}))
        with capture_logs() as logs:
            runner = load(tmp_path)
        assert runner.config.is_native == (hidden_act == "silu")
        assert [line["sliding_window"] for line in logs if "sliding_window" in line] == ([window] if window else [])
        tokens = random_tokens(40, 5)
        close(runner.forward([sessions(runner, 1)[0].segment(tokens)]), logits_of(model, tokens))


def test_gpt2s_matrices_are_quantised_too_and_a_model_with_others_is_refused(tmp_path: Path) -> None:
    save("gpt2", tmp_path / "gpt2")
    tokens, found = random_tokens(20, 5), list[torch.Tensor]()
    for quantization in (None, "int8", "int4"):
        runner = load(tmp_path / "gpt2", quantization=quantization)
        found.append(runner.forward([sessions(runner, 1)[0].segment(tokens)]))
    apart = [(logits - found[0]).abs().max() for logits in found[1:]]
    assert 0 < 4 * apart[0] < apart[1]
    attention = {"kv_n_heads": 2, "rope_theta": 1e4}
    experts = {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 96}
    config = transformers.DbrxConfig(
        vocab_size=VOCAB_SIZE, d_model=96, n_heads=6, n_layers=2, max_seq_len=512, attn_config=attention,
        ffn_config=experts,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "dbrx")
    with pytest.raises(StartupError, match=r"--quantization does not cover .*experts.* \[256, 96\], as in mixtures"):
        load(tmp_path / "dbrx", quantization="int8")


STRAY = {"sliding_window": WINDOW, "layer_types": ["sliding_attention"] * 3}


@pytest.mark.parametrize(
    ("name", "stray"),
    [
        ("granite", STRAY),
        ("olmo2", STRAY),
        ("olmoe", STRAY),
        ("olmoe", {"sliding_window": WINDOW}),
        ("phimoe", {"layer_types": ["full_attention"] * 3}),
        ("phimoe", {"use_sliding_window": False}),
        ("phimoe", {"return_dict": False}),
        ("llama", {"per_layer_config": {"0": {}}}),
    ],
)
def test_keys_that_a_family_does_not_read_change_nothing(name: str, stray: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(7)
    shape = {**SHAPE, "sliding_window": WINDOW} if name == "phimoe" else SHAPE
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(name, **shape)).eval()
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **stray}))
    tokens = random_tokens(40, 5)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    theirs.config.return_dict = True
    runner = load(tmp_path)
    close(runner.forward([sessions(runner, 1)[0].segment(tokens)]), logits_of(theirs, tokens))


def test_a_model_type_other_than_the_architectures_is_what_transformers_goes_by(tmp_path: Path) -> None:
    torch.manual_seed(8)
    transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SHAPE)).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    del raw["rms_norm_eps"]
    path.write_text(json.dumps({**raw, "model_type": "olmo"}))  # its norms have no weights
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    runner, tokens = load(tmp_path), random_tokens(40, 5)
    assert not runner.config.is_native
    close(runner.forward([sessions(runner, 1)[0].segment(tokens)]), logits_of(theirs, tokens))
    path.write_text(json.dumps({**raw, "model_type": "olmo2"}))
    with pytest.raises(StartupError, match=r"missing \(by model_type 'olmo2' it is a Olmo2.*architectures a LlamaFor"):
        load(tmp_path)
    path.write_text(json.dumps({**raw, "model_type": "mine"}))
    with pytest.raises(StartupError, match=r"model_type is 'mine', of which 'LlamaForCausalLM' is not.*does not take"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "said", "words"),
    [
        ("gemma2", {"is_causal": False}, "is_causal is false; a model that looks ahead cannot decode"),
        ("gemma2", {"is_causal": None}, "is_causal is null; a model that looks ahead cannot decode"),
        ("gemma2", {"configuration_files": ["config.4.0.0.json"]}, "configuration_files names other files to read"),
        ("phimoe", {"per_layer_config": {"1": {"sliding_window": 4}}}, "per_layer_config gives its layers a sliding"),
    ],
)
def test_what_config_json_says_that_cannot_be_served(
    name: str, said: dict[str, Any], words: str, tmp_path: Path
) -> None:
    save(name, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **said}))
    with pytest.raises(StartupError, match=words):
        load(tmp_path)


def test_weights_that_config_json_names(gemma: tuple[Path, Any], tmp_path: Path) -> None:
    folder = shutil.copytree(gemma[0], tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "mine.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "transformers_weights": "mine.safetensors"}))
    (folder / "model.safetensors").write_bytes(b"another")
    tokens = random_tokens(20, 5)
    runner = load(folder)
    close(runner.forward([sessions(runner, 1)[0].segment(tokens)]), logits_of(gemma[1], tokens))


@pytest.mark.parametrize(("dtype", "quantization"), [("bfloat16", None), ("float32", "int8_dynamic")])
def test_large_activations_are_not_taken_for_other_attention(
    dtype: str, quantization: str | None, tmp_path: Path
) -> None:
    source = resolve_model(None)
    for path in source.iterdir():
        (tmp_path / path.name).symlink_to(path)
    changed = {**json.loads((source / "config.json").read_text()), "hidden_act": "swish"}
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(changed))
    runner = load(tmp_path, dtype=dtype, quantization=quantization, num_slots=32, max_len=16)
    assert runner.backend.startswith("transformers")


def test_what_transformers_does_not_run_itself_is_refused_by_name(tmp_path: Path) -> None:
    save("gemma2", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "sliding_window": None}))
    with pytest.raises(StartupError, match=r"Gemma2ForCausalLM.*transformers itself does not run it.*sliding_window"):
        load(tmp_path)


def test_the_length_before_long_rope_counts_at_the_top_too(tmp_path: Path) -> None:
    save("llama", tmp_path)
    path = tmp_path / "config.json"
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [3.0] * 8}
    changes = {"rope_parameters": rope, "original_max_position_embeddings": 150}
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    assert ModelConfig.from_folder(tmp_path).max_position == 150


@pytest.fixture
def long_rope(tmp_path: Path) -> Callable[..., tuple[Path, Any]]:
    def make(kind: str) -> tuple[Path, Any]:
        half = SHAPE["head_dim"] // 2
        rope = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 1.0,
                "original_max_position_embeddings": 64,
                "short_factor": [1.0 + 0.1 * i for i in range(half)],
                "long_factor": [2.0 + i for i in range(half)]}  # fmt: skip
        config = configs()[kind]
        config.sliding_window, config.rope_parameters = None, rope
        config.original_max_position_embeddings = 64
        if kind == "phimoe":
            rope.update(short_mscale=1.0, long_mscale=1.3)
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        model.save_pretrained(tmp_path)
        return tmp_path, model

    return make


def test_long_rope_has_its_long_factors_where_a_long_context_is_asked_for(
    long_rope: Callable[..., tuple[Path, Any]],
) -> None:
    folder, model = long_rope("phi3")
    model.set_attn_implementation("eager")
    limit = SHAPE["max_position_embeddings"]
    config = ModelConfig.from_folder(folder)
    assert (config.max_position, config.long_position) == (64, limit)
    assert config.for_context(65).max_position == limit
    for as_it_is in (None, 64, limit + 1):
        assert config.for_context(as_it_is) is config

    short, long = load(folder), load(folder, context_length=150)
    assert short.numerics_id != long.numerics_id
    tokens = random_tokens(120, 1)
    expected = logits_of(model, tokens)  # transformers' own table for so long a sequence, from its first token on
    session, other = sessions(long, 2)
    close(long.forward([session.segment(tokens[:40])]), expected[:40])
    close(
        long.forward([session.segment(tokens[40:]), other.segment(tokens[:30])]),
        torch.cat([expected[40:], expected[:30]]),
    )
    (session,) = sessions(short, 1)
    close(short.forward([session.segment(tokens[:30])]), logits_of(model, tokens[:30]))
    assert not torch.allclose(expected[:30], logits_of(model, tokens[:30]), atol=0.01)


def test_long_rope_of_another_kind_is_refused_for_long_contexts(
    long_rope: Callable[..., tuple[Path, Any]],
) -> None:
    folder, _ = long_rope("phimoe")
    load(folder)
    with pytest.raises(StartupError, match=r"PhimoeForCausalLM.*away from transformers' own"):
        load(folder, context_length=150)


def test_linear_scaling_stretches_the_context_and_dynamic_does_not(tmp_path: Path) -> None:
    save("llama", tmp_path)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())

    def read(**rope: Any) -> tuple[int, str | None]:
        path.write_text(json.dumps(raw | {"rope_parameters": {"rope_theta": 1e4, "factor": 4.0, **rope}}))
        config = ModelConfig.from_folder(tmp_path)
        return config.max_position, config.changing_rope

    limit = raw["max_position_embeddings"]
    assert read(rope_type="linear") == (4 * limit, None)
    assert read(rope_type="linear", original_max_position_embeddings=64) == (limit, None)
    assert read(rope_type="dynamic") == (limit, "dynamic")


def test_an_end_id_of_zero_is_the_generation_configs(tmp_path: Path) -> None:
    save("phi", tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    assert ModelConfig.from_folder(tmp_path).eos_token_ids == (0,)


def test_a_tensor_that_is_missing_or_not_finite_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import load_file, save_file

    save("phi", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    spoilt = {**tensors, "model.final_layernorm.weight": tensors["model.final_layernorm.weight"] * torch.inf}
    save_file(spoilt, path, {"format": "pt"})
    with pytest.raises(StartupError, match="NaN or infinity"):
        load(tmp_path)
    spoilt = {**tensors, "model.final_layernorm.weight": tensors["model.final_layernorm.weight"] + 1e6}
    save_file(spoilt, path, {"format": "pt"})
    with pytest.raises(StartupError, match=r"final_layernorm\.weight, in torch\.float16, holds NaN or infinity"):
        load(tmp_path, dtype="float16")
    del tensors["model.layers.1.mlp.fc1.weight"]
    save_file(tensors, path, {"format": "pt"})
    transformers.utils.logging.set_verbosity_warning()
    monkeypatch.setattr(logging.getLogger("transformers"), "handlers", [caplog.handler])
    with pytest.raises(StartupError, match=r"1 tensors are missing: model\.layers\.1\.mlp\.fc1"):
        load(tmp_path)
    save_file({**tensors, "model.layers.1.mlp.fc1.weight": torch.ones(3)}, path, {"format": "pt"})
    with pytest.raises(StartupError, match=r"wrong shape: .*fc1\.weight is \[3\], config\.json calls for \[160, 96\]"):
        load(tmp_path)
    assert not caplog.records  # transformers has a report of its own, of many lines


CODE = """
from pathlib import Path
Path({marker!r}).write_text("ran")
from transformers import PhiConfig, PhiForCausalLM
class OwnConfig(PhiConfig):
    model_type = "own-phi"
class OwnModel(PhiForCausalLM):
    config_class = OwnConfig
"""


def test_code_of_the_folder_runs_only_when_it_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, marker = tmp_path / "own", tmp_path / "marker"
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    save("phi", folder)
    (folder / "own.py").write_text(CODE.format(marker=str(marker)))
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    raw |= {"model_type": "own-phi", "architectures": ["OwnModel"]}
    raw["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    path.write_text(json.dumps(raw))
    with pytest.raises(StartupError, match="--trust-remote-code"):
        load(folder)
    assert not marker.exists()
    runner = load(folder, trust_remote_code=True)
    assert marker.exists()
    (session,) = sessions(runner, 1)
    assert runner.forward([session.segment([1, 2, 3])]).isfinite().all()


def test_configs_that_say_too_little_or_too_much(gemma: tuple[Path, Any], tmp_path: Path) -> None:
    raw = json.loads((gemma[0] / "config.json").read_text())
    for change, message in (
        ({"num_hidden_layers": 10**7}, "num_hidden_layers"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised"),
        ({"model_type": "no-such", "architectures": ["NoSuchForCausalLM"]}, "transformers"),
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "no causal language model"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**raw, **change}))
        with pytest.raises(StartupError, match=message):
            ModelConfig.from_folder(tmp_path)
