from __future__ import annotations

import dataclasses
import math
import re
from typing import ClassVar

import pytest

from outrider.args import ChatArgs, ConvertArgs, DraftArgs, GatewayArgs, ServeArgs, VerifyArgs
from outrider.errors import StartupError
from outrider.flag_advice import _OTHERS, meant
from outrider.flags import Args, arg, parser_for

KINDS: list[type[Args]] = [VerifyArgs, DraftArgs, GatewayArgs, ServeArgs, ChatArgs]
ADDRESSES = {"listen", "verify_address", "uds"}
PRINT_AND_EXIT = {"describe", "inspect"}


@pytest.mark.parametrize("kind", KINDS)
def test_no_words_are_the_defaults_and_the_defaults_need_no_words(kind: type[Args]) -> None:
    assert kind.parse([]) == kind()
    assert kind().to_argv() == []


def test_words_and_back() -> None:
    args = VerifyArgs(model_path="/m", max_running_requests=3, disable_speculation_brake=True, max_draft_wait_ms=2.5)
    assert VerifyArgs.parse(args.to_argv()) == args
    gateway = GatewayArgs(verify_address=("a:1", "b:2"), api_key=("-odd", "b"))
    assert GatewayArgs.parse(gateway.to_argv()) == gateway


def test_a_repeated_flag_replaces_the_default() -> None:
    args = DraftArgs.parse(["--verify-address", "a:1", "--verify-address", "b:2"])
    assert args.verify_address == ("a:1", "b:2")


def test_sglangs_other_name_for_the_model() -> None:
    assert VerifyArgs.parse(["--model", "x"]).model_path == "x"


@pytest.mark.parametrize(
    "words", [["--nonsense"], ["--max-running-requests", "many"], ["--dtype", "float8"], ["--max-running-req", "3"]]
)
def test_wrong_words_exit_with_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        VerifyArgs.parse(words)
    assert ended.value.code == 2
    assert "usage: outrider verify" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["--max-running-request", "3"], "; did you mean --max-running-requests?"),
        (["--modl=x", "--dtipe=y"], "; did you mean --model, --dtype?"),
        (["--nonsense-that-nobody-means"], ""),
        (
            ["--max-model-len=8", "--gpu-memory-utilization=0.9"],
            "; did you mean --context-length, --mem-fraction-static?",
        ),
        (["--ctx-size", "8", "--max-model-len", "8"], "; did you mean --context-length?"),
        (["--max-num-seqs=3", "--dtipe=y"], "; did you mean --max-running-requests, --dtype?"),
        (["--tp=2"], "; --tp: a model runs whole in one process, on one device"),
        (
            ["--enable-prefix-caching"],
            "; --enable-prefix-caching: prefixes are cached unless --disable-radix-cache is given",
        ),
        (["--speculative-config={}"], ""),  # verify has no flags for it
        (
            ["--log-level=debug", "--modl=x"],
            "; --log-level: set the variable OUTRIDER_LOG_LEVEL; did you mean --model?",
        ),
    ],
)
def test_flags_that_look_like_another_name_it(words: list[str], meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        VerifyArgs.parse(words)
    assert capsys.readouterr().err.endswith(f"unrecognized arguments: {' '.join(words)}{meant}\n")


def test_other_servers_names_lead_to_flags_that_there_are() -> None:
    ours = {"--" + spec.name.replace("_", "-") for spec in dataclasses.fields(ServeArgs)}
    for name, said in _OTHERS.items():
        assert set(re.findall(r"--[a-z-]+", said)) <= ours
        assert name not in ours
        assert meant([name], ours)


@pytest.mark.parametrize(
    ("kind", "settings", "flag"),
    [
        (VerifyArgs, {"max_total_tokens": 1}, "--max-total-tokens is 1; it must be at least 2"),
        (VerifyArgs, {"context_length": 1}, "--context-length is 1; it must be at least 2"),
        (DraftArgs, {"draft_max_total_tokens": 1}, "--draft-max-total-tokens is 1; it must be at least 2"),
        (VerifyArgs, {"watchdog_timeout": 0.001}, "--watchdog-timeout is 0.001; it must be 0, for never, or at least"),
        *(
            (VerifyArgs, {"features": features}, f"--features is '{features}'; it must be none, last or aux:I,J,K")
            for features in ("bogus", "auto", "aux:", "aux:1,x")
        ),
        (ServeArgs, {"features": "bogus"}, "--features is 'bogus'; it must be auto, none, last or aux:I,J,K"),
        (DraftArgs, {"describe": True, "inspect": "a"}, "--describe and --inspect exclude each other"),
        *((kind, {"served_model_name": ""}, "--served-model-name is empty") for kind in (GatewayArgs, ServeArgs)),
        (GatewayArgs, {"uds": ""}, "--uds is empty; it must be a path"),
        (GatewayArgs, {"uds": "/a", "port": 1}, "--port and --uds exclude each other"),
        (GatewayArgs, {"uds": "/a", "host": "::"}, "--host and --uds exclude each other"),
        (DraftArgs, {"speculative_num_steps": 0}, "--speculative-num-steps is 0; it must be at least 1"),
        (
            DraftArgs,
            {"speculative_num_steps": -1, "speculative_adaptive": True},
            "--speculative-num-steps is -1; it must be at least 0",
        ),
        (
            VerifyArgs,
            {"max_queued_requests": 2**31},
            "--max-queued-requests is 2147483648; it must be at",
        ),
        (VerifyArgs, {"drafter_outbox_bytes": 2**63}, "--drafter-outbox-bytes is"),
        (VerifyArgs, {"threads": 1025}, "--threads is 1025; it must be at most 1024"),
        (DraftArgs, {"threads": 1025}, "--threads is 1025"),
        (GatewayArgs, {"max_schema_bytes": 65537}, "--max-schema-bytes is 65537; it must be at most 65536"),
        (DraftArgs, {"speculative_eagle_topk": 4097}, "--speculative-eagle-topk is 4097; it must be at most 4096"),
        (VerifyArgs, {"max_draft_wait_ms": -1.0}, "--max-draft-wait-ms"),
        (VerifyArgs, {"cuda_graph_max_bs": 0}, "--cuda-graph-max-bs"),
        (VerifyArgs, {"cuda_graph_max_bs": 8, "disable_cuda_graph": True}, "--disable-cuda-graph exclude"),
        (DraftArgs, {"cuda_graph_max_bs": 0}, "--cuda-graph-max-bs"),
        (DraftArgs, {"cuda_graph_max_bs": 8, "disable_cuda_graph": True}, "--disable-cuda-graph exclude"),
        (VerifyArgs, {"torch_compile_max_bs": 8}, "--torch-compile-max-bs needs --enable-torch-compile"),
        (VerifyArgs, {"mem_fraction_static": 1.5}, "--mem-fraction-static"),
        (ServeArgs, {"shutdown_grace_s": math.inf}, "--shutdown-grace-s is inf; it must be a finite number"),
        (GatewayArgs, {"request_timeout_s": math.nan}, "--request-timeout-s is nan; it must be a finite number"),
        *(
            (kind, {name: value}, f"--{name.replace('_', '-')} is {value}; it must be above 0")
            for kind in (GatewayArgs, ServeArgs)
            for name, value in (("request_timeout_s", 0.0), ("receive_timeout_s", -1.0))
        ),
        (VerifyArgs, {"model_path": ""}, "--model-path is empty"),
        *(
            (kind, {name: address}, f"at most 107 bytes, not {length}")
            for kind, name, address, length in (
                (VerifyArgs, "listen", f"unix:/{'a' * 107}", 108),
                (VerifyArgs, "listen", f"unix:///{'a' * 107}", 108),
                (ServeArgs, "grpc_address", "unix:" + "\u00e4" * 54, 108),
                (DraftArgs, "listen", f"unix-abstract:{'a' * 109}", 109),
                (GatewayArgs, "verify_address", (f"unix:/{'a' * 107}",), 108),
            )
        ),
        (GatewayArgs, {"verify_address": ("a:1", "")}, "--verify-address is ''; it must be host:port"),
        (
            ServeArgs,
            {"speculative_algorithm": "none", "speculative_num_steps": 3},
            "--speculative-num-steps is for draft models; --speculative-algorithm NONE has none",
        ),
        (
            ServeArgs,
            {"speculative_num_draft_tokens": 8},
            "--speculative-num-draft-tokens 8 needs --speculative-num-steps and --speculative-eagle-topk too",
        ),
        (
            DraftArgs,
            {"speculative_algorithm": "EAGLE", "speculative_num_steps": 3},
            "--speculative-num-steps 3 needs --speculative-eagle-topk and --speculative-num-draft-tokens too",
        ),
        (
            ServeArgs,
            {"speculative_draft_model_path": "head"},
            "--speculative-draft-model-path is for draft models: add --speculative-algorithm STANDALONE, EAGLE",
        ),
        (VerifyArgs, {"speculative_algorithm": "MAGIC"}, "--speculative-algorithm"),
        *(
            (
                ServeArgs,
                {"speculative_algorithm": "NONE", **given},
                f"{flag} needs drafts; --speculative-algorithm is NONE",
            )
            for given, flag in (
                ({"speculative_num_draft_tokens": 8}, "--speculative-num-draft-tokens"),
                ({"max_sessions": 8}, "--max-sessions"),
                ({"core_placement": "auto"}, "--core-placement auto"),
            )
        ),
        *(
            (
                kind,
                {"speculative_algorithm": algorithm, "draft_max_total_tokens": 512},
                f"--draft-max-total-tokens is for draft models; --speculative-algorithm {algorithm} has none",
            )
            for kind, algorithm in ((ServeArgs, "NONE"), (ServeArgs, "NGRAM"), (DraftArgs, "NGRAM"))
        ),
        *(
            (
                ServeArgs,
                {"speculative_algorithm": algorithm, "enable_multi_layer_eagle": True},
                f"--enable-multi-layer-eagle is for EAGLE's heads; --speculative-algorithm is {algorithm}",
            )
            for algorithm in ("STANDALONE", "NGRAM", "NONE")
        ),
        *(
            (DraftArgs, {"speculative_algorithm": name}, "must be one of NGRAM, STANDALONE, EAGLE, EAGLE3, NEXTN$")
            for name in ("FOO", "none")
        ),
        (ServeArgs, {"speculative_algorithm": "FOO"}, "must be one of NGRAM, .*, NEXTN, NONE$"),
        (DraftArgs, {"quantization": "int7"}, "--quantization 'int7' is unknown"),
        *(
            (kind, {"device": device}, f"--device is '{device}'; it must be auto, cpu, cuda or cuda:N")
            for kind in (VerifyArgs, DraftArgs, ServeArgs)
            for device in ("foo", "cuda:x", "cpu:1", "mps", "")
        ),
        (DraftArgs, {"speculative_moe_runner_backend": "deep_gemm"}, "--speculative-moe-runner-backend is 'deep_gemm'"),
        (DraftArgs, {"speculative_moe_a2a_backend": "deepep"}, "--speculative-moe-a2a-backend is 'deepep'"),
        (
            ServeArgs,
            {"speculative_algorithm": "NGRAM", "speculative_draft_model_quantization": "unquant"},
            "--speculative-draft-model-quantization is for draft models",
        ),
        (DraftArgs, {"max_sessions": 0}, "--max-sessions"),
        (DraftArgs, {"speculative_algorithm": "MAGIC"}, "--speculative-algorithm"),
        (DraftArgs, {"speculative_ngram_max_match_window_size": 18}, "--speculative-ngram-branch-length"),
        (DraftArgs, {"speculative_ngram_min_bfs_breadth": 11}, "--speculative-ngram-max-bfs-breadth"),
        (GatewayArgs, {"max_body_bytes": 0}, "--max-body-bytes"),
        (GatewayArgs, {"tokens_per_minute": 0}, "--tokens-per-minute"),
        (GatewayArgs, {"max_prompt_tokens": 0}, "--max-prompt-tokens"),
        (ServeArgs, {"max_body_bytes": 0}, "--max-body-bytes"),
        (ServeArgs, {"max_total_tokens": 0}, "--max-total-tokens"),
        (ServeArgs, {"speculative_algorithm": "MAGIC"}, "--speculative-algorithm"),
        (ServeArgs, {"startup_timeout_s": 0}, "--startup-timeout-s"),
        (VerifyArgs, {"listen": "127.0.0.1:99999"}, "--listen is '127.0.0.1:99999'; .*ports are 0 to 65535"),
        (VerifyArgs, {"grpc_address": "foo"}, "--grpc-address is 'foo'; it must be host:port"),
        (DraftArgs, {"listen": "127.0.0.1"}, "--listen is '127.0.0.1'"),
        (ServeArgs, {"grpc_address": "127.0.0.1:65536"}, "--grpc-address is '127.0.0.1:65536'"),
        (GatewayArgs, {"api_key": ("fine", "schl\u00fcssel")}, "--api-key must be printable ASCII"),
        (ServeArgs, {"quantization": "int7"}, "--quantization 'int7' is unknown; there are int8, "),
        (
            DraftArgs,
            {"speculative_draft_model_quantization": "int7"},
            "--speculative-draft-model-quantization 'int7' is",
        ),
        (ServeArgs, {"tool_call_parser": "magic"}, "--tool-call-parser is 'magic'; it must be one of hermes"),
        (GatewayArgs, {"reasoning_parser": "magic"}, "--reasoning-parser is 'magic'; it must be one of deepseek-r1"),
        (GatewayArgs, {"chat_template": "/nowhere"}, "--chat-template is '/nowhere', which is no file"),
        (
            ServeArgs,
            {"speculative_ngram_external_corpus_path": ("a.txt",), "speculative_algorithm": "EAGLE3"},
            "--speculative-ngram-external-corpus-path is for n-gram drafts, and drafts are EAGLE3 here",
        ),
        (DraftArgs, {"max_pending_tokens": 5, "speculative_algorithm": "EAGLE"}, "--max-pending-tokens is for n-gram"),
        (ServeArgs, {"speculative_ngram_capacity": 1000}, "add --speculative-algorithm NGRAM"),
        (ServeArgs, {"metrics_port": 65535}, "--metrics-port is 65535; it must be at most 65534"),
        (
            ServeArgs,
            {"metrics_port": 8000, "port": 8001},
            "--port is 127.0.0.1:8001, and the port after --metrics-port is 127.0.0.1:8001; one of them",
        ),
        (
            ServeArgs,
            {"grpc_address": "0.0.0.0:8000", "port": 8000},
            "--port is 127.0.0.1:8000, and --grpc-address is 0.0.0.0:8000; one of them must be another",
        ),
        (VerifyArgs, {"listen": "unix:/tmp/a", "grpc_address": "unix:/tmp/a"}, "--listen is unix:/tmp/a, and --grpc"),
        (DraftArgs, {"listen": "localhost:9100", "metrics_port": 9100, "metrics_host": "localhost"}, "--listen is"),
        (ChatArgs, {"max_tokens": 0}, "--max-tokens"),
        (ChatArgs, {"temperature": -0.5}, "--temperature"),
    ],
)
def test_nonsense_is_refused_by_flag(kind: type[Args], settings: dict[str, object], flag: str) -> None:
    with pytest.raises(StartupError, match=flag):
        kind(**settings)


def test_serve_has_every_flag_of_its_parts_but_the_addresses() -> None:
    own = {spec.name for spec in dataclasses.fields(ServeArgs)}
    for kind in (VerifyArgs, DraftArgs, GatewayArgs):
        missing = {spec.name for spec in dataclasses.fields(kind)} - own
        assert {name for name in missing if not name.startswith("verify_ssl_")} <= ADDRESSES | PRINT_AND_EXIT | {"core"}
    assert not own & (ADDRESSES | PRINT_AND_EXIT)


def test_a_flag_that_parts_share_means_one_thing() -> None:
    """Serve has one flag by that name, so the parts' must be of one type."""
    kinds: dict[str, set[object]] = {}
    for kind in (VerifyArgs, DraftArgs, GatewayArgs):
        for spec in dataclasses.fields(kind):
            kinds.setdefault(spec.name, set()).add(spec.type)
    assert {name for name, types in kinds.items() if len(types) > 1} == set()


def test_a_part_keeps_its_own_default_for_what_serve_was_not_given() -> None:
    given = ServeArgs(model_path="/models/other")
    assert given.part(DraftArgs) == DraftArgs(model_path="/models/other")
    for grace_s in (1.0, VerifyArgs.shutdown_grace_s):
        assert ServeArgs(shutdown_grace_s=grace_s).part(DraftArgs).shutdown_grace_s == grace_s
    assert given.part(VerifyArgs, listen="unix:/a") == VerifyArgs(model_path="/models/other", listen="unix:/a")


@pytest.mark.parametrize(("algorithm", "drafts"), [("NGRAM", True), ("ngram", True), ("NONE", False), (None, True)])
def test_whether_serve_drafts(algorithm: str | None, drafts: bool) -> None:
    assert ServeArgs(speculative_algorithm=algorithm).drafts is drafts


def test_every_flag_has_help() -> None:
    for kind in KINDS:
        for spec in dataclasses.fields(kind):
            assert spec.metadata["help"].endswith("."), f"{kind.__name__}.{spec.name}"


def test_a_flag_without_a_default_is_told_to_be_required() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Needing(Args):
        command: ClassVar[str] = "needing"
        summary: ClassVar[str] = "Needs a folder."
        data: str = arg("", "what", "Folder.")

    assert parser_for(Needing).format_help().rstrip().endswith("--data TEXT  Folder. (required)")


def test_a_host_may_stand_in_brackets() -> None:
    args = ServeArgs.parse(["--host", "[::1]", "--metrics-host=[::]"])
    assert (args.host, args.metrics_host) == ("::1", "::")


def test_an_empty_host_is_all_of_them() -> None:
    args = ServeArgs.parse(["--host=", "--metrics-host", ""])
    assert (args.host, args.metrics_host) == ("0.0.0.0", "0.0.0.0")


def test_settings_as_flags() -> None:
    flags = VerifyArgs(dtype="float32").as_flags()
    assert flags["dtype"] == "float32"
    assert flags["max-running-requests"] == "48"


@pytest.mark.parametrize(
    "args",
    [
        VerifyArgs(),
        VerifyArgs(features="aux:1,2", dtype="float32", context_length=77, disable_speculation_brake=True),
        DraftArgs(verify_address=("a:1", "b:2"), speculative_algorithm="NGRAM", max_sessions=3),
    ],
    ids=range(3),
)
def test_flags_are_settings_again(args: Args) -> None:
    assert args.from_flags(args.as_flags()) == dataclasses.asdict(args)


def test_corpora_hold_a_token_at_least() -> None:
    with pytest.raises(StartupError, match=r"external-corpus-max-tokens is 0; .* at least 1"):
        DraftArgs(speculative_ngram_external_corpus_max_tokens=0)


def test_flags_of_another_version_stay_text() -> None:
    told = VerifyArgs.from_flags({"new-flag": "12", "max-running-requests": "many"})
    assert told == {"new_flag": "12", "max_running_requests": "many"}


@pytest.mark.parametrize("algorithm", ["STANDALONE", "NGRAM"])
def test_data_parallel_attention_is_refused(algorithm: str) -> None:
    """SGLang refuses it with these two; here replicas take its place, whatever drafts."""
    with pytest.raises(StartupError, match=f"--enable-dp-attention is not supported with {algorithm}"):
        DraftArgs(speculative_algorithm=algorithm, enable_dp_attention=True)


def test_a_head_is_converted_by_words_and_both_folders_are_needed() -> None:
    with pytest.raises(StartupError, match="--destination is needed"):
        ConvertArgs(source="head")
    assert ConvertArgs.parse(["--source=a", "--destination=b"]).destination == "b"


def test_a_scope_of_n_grams_is_taken_whatever_drafts() -> None:
    for algorithm in (None, "NGRAM", "EAGLE3", "NONE"):
        assert ServeArgs(speculative_ngram_scope="session", speculative_algorithm=algorithm)


def test_a_sockets_path_may_be_as_long_as_the_system_takes() -> None:
    for address in (f"unix:/{'a' * 106}", f"unix:///{'a' * 106}", f"unix-abstract:{'a' * 107}"):
        assert VerifyArgs(listen=address).listen == address


@pytest.mark.parametrize("path", ["/tmp/a,b", "/tmp/a#b", "/tmp/a?b", "/tmp/a%20b"])
def test_a_sockets_path_that_grpc_reads_otherwise_is_refused(path: str) -> None:
    for kind in (VerifyArgs, DraftArgs):
        with pytest.raises(StartupError, match="gRPC takes no Unix socket with one of"):
            kind(listen=f"unix:{path}")
    with pytest.raises(StartupError, match="gRPC takes no Unix socket with one of"):
        GatewayArgs(verify_address=(f"unix:{path}",))


@pytest.mark.parametrize("endpoint", ["http://[::1", "http://", "http://host:port/", "ftp://host/", "host:4318"])
def test_an_endpoint_of_traces_is_a_url(endpoint: str) -> None:
    with pytest.raises(StartupError, match="must be an http or https URL"):
        VerifyArgs(otlp_traces_endpoint=endpoint)
    assert VerifyArgs(otlp_traces_endpoint="http://[::1]:4318/v1/traces").otlp_traces_endpoint is not None
