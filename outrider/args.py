"""Settings: one frozen dataclass per process that refuses nonsense, and the command-line flags made from it.

Flags that SGLang has keep its names, meanings and defaults. A dataclass field `max_running_requests` is the flag
`--max-running-requests`; its group, help and choices stand in the field's metadata.
"""

from __future__ import annotations

import argparse
import dataclasses
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar, Union, get_args, get_origin, get_type_hints

from outrider.errors import StartupError

ArgsT = TypeVar("ArgsT", bound="Args")


def arg(default: Any, group: str, help: str, *, flag: str | None = None, aliases: tuple[str, ...] = ()) -> Any:
    """A field that is a flag. A bool is a switch; a tuple is a flag that may be repeated."""
    return field(default=default, metadata={"group": group, "help": help, "flag": flag, "aliases": aliases})


@dataclass(frozen=True, kw_only=True)
class Args:
    """Settings of one process."""

    command: ClassVar[str]
    summary: ClassVar[str]

    def check(self) -> None:
        """Raises StartupError naming the flag and the fix."""

    def __post_init__(self) -> None:
        self.check()

    @classmethod
    def parse(cls, argv: list[str]) -> Self:
        """From command-line words; exits with 2 and a usage line when they are wrong."""
        namespace = parser_for(cls).parse_args(argv)
        return cls(**{f.name: getattr(namespace, f.name) for f in dataclasses.fields(cls)})

    def to_argv(self) -> list[str]:
        """The command-line words that give these settings; defaults are left out."""
        words: list[str] = []
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            if value == spec.default:
                continue
            for item in value if isinstance(value, tuple) else (value,):
                words += [_flag(spec)] if item is True else [f"{_flag(spec)}={item}"]
        return words

    def as_flags(self) -> dict[str, str]:
        """Every setting by flag, for server info."""
        return {_flag(spec).lstrip("-"): str(getattr(self, spec.name)) for spec in dataclasses.fields(self)}


def parser_for(cls: type[Args]) -> argparse.ArgumentParser:
    """The argument parser of a settings class, grouped as its fields say."""
    parser = argparse.ArgumentParser(
        prog=f"outrider {cls.command}", usage="%(prog)s [FLAGS]", description=cls.summary, allow_abbrev=False
    )
    groups: dict[str, argparse._ArgumentGroup] = {}
    hints = get_type_hints(cls)
    for spec in dataclasses.fields(cls):
        name = spec.metadata["group"]
        if name not in groups:
            groups[name] = parser.add_argument_group(name)
        groups[name].add_argument(
            _flag(spec), *spec.metadata["aliases"], dest=spec.name, default=spec.default,
            help=_help(spec), **_kind(hints[spec.name]),
        )  # fmt: skip
    return parser


def _help(spec: dataclasses.Field[Any]) -> str:
    text = spec.metadata["help"].replace("%", "%%")
    if spec.default in (None, False, ()):
        return text
    default = " ".join(spec.default) if isinstance(spec.default, tuple) else spec.default
    return f"{text} (default: {default})"


def _flag(spec: dataclasses.Field[Any]) -> str:
    return spec.metadata["flag"] or "--" + spec.name.replace("_", "-")


def _kind(hint: Any) -> dict[str, Any]:
    """argparse's keywords for a field's type."""
    if hint is bool:
        return {"action": "store_true"}
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = [option for option in get_args(hint) if option is not type(None)]
    if get_origin(hint) is tuple:
        return {"action": _Repeat, "type": get_args(hint)[0], "metavar": _metavar(get_args(hint)[0])}
    if get_origin(hint) is Literal:
        return {"choices": list(get_args(hint)), "type": type(get_args(hint)[0])}
    return {"type": hint, "metavar": _metavar(hint)}


def _metavar(kind: type) -> str:
    return {int: "N", float: "X", str: "TEXT", Path: "PATH"}[kind]


class _Repeat(argparse.Action):
    """Collects a repeated flag in a tuple; the default goes when the flag is given."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        given = getattr(namespace, f"_{self.dest}_given", ())
        setattr(namespace, f"_{self.dest}_given", (*given, values))
        setattr(namespace, self.dest, (*given, values))


def at_least(settings: Args, minimum: int, *names: str) -> None:
    """StartupError for the first of the named settings that is below `minimum`."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and value < minimum:
            raise StartupError(f"--{name.replace('_', '-')} is {value}; it must be at least {minimum}")


# ---- What several processes take


@dataclass(frozen=True, kw_only=True)
class SpeculativeArgs(Args):
    """Flags of speculation, named as SGLang names them."""

    speculative_algorithm: str | None = arg(
        None,
        "speculation",
        "NGRAM, STANDALONE, EAGLE, EAGLE3, NEXTN (the same as EAGLE), or none for no speculation. "
        "Default: NGRAM with `serve`.",
    )
    speculative_num_steps: int | None = arg(
        None, "speculation", "Depth of a drafted tree. Default: as suits the algorithm and the target; set all three."
    )
    speculative_eagle_topk: int | None = arg(None, "speculation", "Branches of each node that a tree is grown from.")
    speculative_num_draft_tokens: int | None = arg(
        None, "speculation", "Nodes verified in one step, root included. NGRAM: 12."
    )
    speculative_draft_model_path: str | None = arg(
        None, "speculation: draft model", "Folder or hub id of the draft model or head. Default: the target's own.",
        aliases=("--speculative-draft-model",),
    )  # fmt: skip
    speculative_draft_model_revision: str | None = arg(None, "speculation: draft model", "Revision of its hub id.")
    speculative_draft_load_format: Literal["auto", "safetensors", "pt", "dummy"] | None = arg(
        None, "speculation: draft model", "As --load-format. Default: the target's."
    )
    speculative_draft_attention_backend: str | None = arg(
        None, "speculation: draft model", "As --attention-backend. Default: as suits the device; `serve`: the target's."
    )
    speculative_draft_model_quantization: str | None = arg(
        None, "speculation: draft model", "As --quantization, or unquant for none. Default: as --quantization."
    )
    speculative_moe_runner_backend: str | None = arg(
        None, "speculation: draft model", "What runs a draft model's experts: auto (torch's grouped products)."
    )
    speculative_moe_a2a_backend: str | None = arg(
        None, "speculation: draft model", "What moves rows between experts on several devices: none (they are on one)."
    )
    speculative_token_map: str | None = arg(
        None, "speculation: draft model", "File with the token ids that may be drafted (FR-Spec)."
    )
    enable_multi_layer_eagle: bool = arg(
        False, "speculation: draft model", "Require a head with a layer for each step; one that has them is used so."
    )
    enable_dp_attention: bool = arg(
        False, "speculation", "SGLang's; refused: replicas of the verify service take the place of data parallelism."
    )
    speculative_ngram_min_match_window_size: int = arg(1, "speculation: NGRAM", "Shortest suffix that is looked up.")
    speculative_ngram_max_match_window_size: int = arg(12, "speculation: NGRAM", "Longest suffix that is looked up.")
    speculative_ngram_min_bfs_breadth: int = arg(1, "speculation: NGRAM", "Fewest branches followed at a node.")
    speculative_ngram_max_bfs_breadth: int = arg(10, "speculation: NGRAM", "Most branches followed at a node.")
    speculative_ngram_match_type: Literal["BFS", "PROB"] = arg(
        "BFS", "speculation: NGRAM", "Which continuations are taken: the most recent (BFS) or most frequent (PROB)."
    )
    speculative_ngram_branch_length: int = arg(18, "speculation: NGRAM", "Depth of the trie.")
    speculative_ngram_capacity: int = arg(10_000_000, "speculation: NGRAM", "Nodes of the trie, least used go first.")
    speculative_ngram_scope: Literal["global", "session"] = arg(
        "global", "speculation: NGRAM", "Whether requests draw drafts from one another's text."
    )

    def check(self) -> None:
        """Ranges of trees, and of SGLang's n-gram cache."""
        at_least(self, 1, "speculative_num_steps", "speculative_eagle_topk")
        at_least(self, 2, "speculative_num_draft_tokens", "speculative_ngram_branch_length")
        at_least(self, 1, "speculative_ngram_min_match_window_size", "speculative_ngram_min_bfs_breadth")
        low, high = self.speculative_ngram_min_match_window_size, self.speculative_ngram_max_match_window_size
        if high < low:
            raise StartupError(f"--speculative-ngram-max-match-window-size is {high}, below the minimum window, {low}")
        if high >= self.speculative_ngram_branch_length:
            raise StartupError(
                f"--speculative-ngram-max-match-window-size is {high}; it must be below "
                f"--speculative-ngram-branch-length, {self.speculative_ngram_branch_length}"
            )
        low, high = self.speculative_ngram_min_bfs_breadth, self.speculative_ngram_max_bfs_breadth
        if high < low:
            raise StartupError(f"--speculative-ngram-max-bfs-breadth is {high}, below the minimum breadth, {low}")
        at_least(self, self.speculative_ngram_branch_length + 1, "speculative_ngram_capacity")
        check_algorithm(self.speculative_algorithm)
        for name, value, there in _MOE_BACKENDS:
            given = getattr(self, name)
            if given not in (None, value):
                raise StartupError(
                    f"--{name.replace('_', '-')} is {given!r}, which is not offered here; {value!r}, {there}, is"
                )
        algorithm = (self.speculative_algorithm or "").upper()
        if self.enable_dp_attention:
            with_it = f" with {algorithm}" if algorithm not in ("", "NONE") else ""
            raise StartupError(
                f"--enable-dp-attention is not supported{with_it}: run several verify services (--verify-address "
                "may be repeated) instead of data-parallel attention in one"
            )
        if algorithm in ("NGRAM", "NONE"):
            self.refuse_draft_model_flags()

    def refuse_draft_model_flags(self) -> None:
        """StartupError for a flag that only draft models have."""
        for spec in dataclasses.fields(SpeculativeArgs):
            needs_model = spec.metadata["group"] == "speculation: draft model" or spec.name in _TREE_FLAGS
            if needs_model and getattr(self, spec.name) != spec.default:
                raise StartupError(f"{_flag(spec)} is for draft models; --speculative-algorithm NGRAM has none")


_TREE_FLAGS = ("speculative_num_steps", "speculative_eagle_topk")
# NEXTN is EAGLE's other name in SGLang's flags: which kind of head it is, its checkpoint says.
HEAD_ALGORITHMS = ("EAGLE", "EAGLE3", "NEXTN")
ALGORITHMS = ("NGRAM", "STANDALONE", *HEAD_ALGORITHMS, "NONE")
# SGLang has many; of each, this one is there.
_MOE_BACKENDS = (
    ("speculative_moe_runner_backend", "auto", "torch's own operators"),
    ("speculative_moe_a2a_backend", "none", "all experts on one device"),
)


def check_algorithm(name: str | None) -> None:
    """StartupError for a --speculative-algorithm that there is not."""
    if name is not None and name.upper() not in ALGORITHMS:
        raise StartupError(f"--speculative-algorithm is {name!r}; it must be one of {', '.join(ALGORITHMS)}")


# ---- The processes


@dataclass(frozen=True, kw_only=True)
class VerifyArgs(Args):
    """Settings of `outrider verify`."""

    command: ClassVar[str] = "verify"
    summary: ClassVar[str] = "Serve the target model: prefill, verification of drafts, the truth about every session."

    listen: str = arg("127.0.0.1:50051", "network", "Address to serve gRPC on: host:port or unix:/path.")
    model_path: str | None = arg(
        None, "model", "Local Hugging Face folder, or a hub id. Default: the embedded SmolLM2-135M-Instruct.",
        aliases=("--model",),
    )  # fmt: skip
    revision: str | None = arg(None, "model", "Revision of a hub id.")
    load_format: Literal["auto", "safetensors", "pt", "dummy"] = arg(
        "auto", "model", "`pt` allows pickled weights (read with weights_only); `dummy` makes random ones."
    )
    dtype: Literal["auto", "bfloat16", "float32", "float16"] = arg("auto", "model", "Compute dtype.")
    quantization: str | None = arg(
        None, "model",
        "Quantise the weights at load: int8, int8_dynamic (activations too), int4, or fp8 on a GPU. Default: none.",
    )  # fmt: skip
    trust_remote_code: bool = arg(False, "model", "Run Python code that comes in the model's folder.")
    device: str = arg("auto", "model", "cpu, cuda or cuda:N.")
    context_length: int | None = arg(None, "model", "Longest session, prompt and output. Default: the model's.")
    threads: int | None = arg(None, "model", "CPU threads for the forward pass. Default: all cores.")
    max_total_tokens: int | None = arg(
        None, "memory and scheduling", "Tokens that the KV pool holds. Default: as memory allows."
    )
    mem_fraction_static: float | None = arg(
        None, "memory and scheduling",
        "Share of the free memory for weights and KV pool. Default: by SGLang's rule; on CPU a quarter for the pool.",
    )  # fmt: skip
    speculative_algorithm: str | None = arg(
        None, "memory and scheduling", "Whose drafter GPU memory is left for; drafters themselves say what they are."
    )
    page_size: Literal[1, 16, 32, 64] = arg(1, "memory and scheduling", "Tokens in a page of the KV pool.")
    disable_radix_cache: bool = arg(
        False, "memory and scheduling", "Share no KV between requests with the same beginning."
    )
    schedule_policy: Literal["fcfs", "lpm"] = arg(
        "fcfs", "memory and scheduling", "Who is admitted next: first come, or longest cached prefix."
    )
    max_running_requests: int = arg(48, "memory and scheduling", "Sessions that run at once.")
    max_queued_requests: int = arg(1024, "memory and scheduling", "Sessions that may wait; more are refused.")
    max_choices: int = arg(64, "memory and scheduling", "Most choices (n) of one request.")
    chunked_prefill_size: int | None = arg(
        None, "memory and scheduling", "Most prompt tokens computed in one step. Default: 256 on CPU, 2048 on a GPU."
    )
    attention_backend: str = arg(
        "auto", "kernels",
        "auto, torch_native, triton or flashinfer. auto: triton on a GPU; on CPU the C decoder where it has the model.",
    )  # fmt: skip
    prefill_attention_backend: str | None = arg(
        None, "kernels", "Attention of prompts' chunks. Default: --attention-backend."
    )
    decode_attention_backend: str | None = arg(
        None, "kernels", "Attention of single tokens. Default: --attention-backend."
    )
    speculative_attention_mode: Literal["prefill", "decode"] = arg(
        "prefill", "kernels",
        "Whose attention verifies trees, prefill's or decode's; of one backend, triton's wide or its narrow tiles.",
    )  # fmt: skip
    kv_cache_dtype: Literal["auto", "fp8_e4m3", "fp8_e5m2"] = arg(
        "auto",
        "kernels",
        "What keys and values are kept in; fp8 needs torch_native or triton. auto: the compute dtype.",
    )
    disable_cuda_graph: bool = arg(False, "kernels", "Launch each step's kernels one by one.")
    cuda_graph_max_bs: int | None = arg(
        None, "kernels",
        "Most sessions of a step that is replayed from a CUDA graph. Default: --max-running-requests, at most 160.",
    )  # fmt: skip
    enable_torch_compile: bool = arg(
        False, "kernels", "Run layers compiled by torch.compile; on CPU this replaces the C decoder, which is faster."
    )
    torch_compile_max_bs: int = arg(32, "kernels", "Most sessions of a step that runs compiled layers.")
    features: str = arg(
        "none", "speculation", "Hidden states kept for drafters: none, last, or aux:I,J,K (entering those layers)."
    )
    max_verify_nodes: int = arg(32, "speculation", "Most draft nodes verified for one session in one step.")
    max_proposal_nodes: int = arg(256, "speculation", "Most nodes of a proposal.")
    max_assumed_tokens: int = arg(64, "speculation", "Most tokens that a proposal may assume.")
    max_proposals_per_session: int = arg(8, "speculation", "Proposals kept beside the one being verified.")
    drafter_outbox_bytes: int = arg(8 * 2**20, "speculation", "Bytes waiting for a slow drafter before it is dropped.")
    max_draft_wait_ms: float = arg(
        20.0, "speculation", "Longest wait for a drafter; measured savings bound it further."
    )
    disable_speculation_brake: bool = arg(False, "speculation", "Verify drafts as they come, whether or not they pay.")
    shutdown_grace_s: float = arg(30.0, "network", "Time that running requests get to finish on SIGTERM.")

    def check(self) -> None:
        """Bounds."""
        at_least(
            self, 1, "max_total_tokens", "max_running_requests", "max_choices", "context_length", "threads",
            "chunked_prefill_size", "max_verify_nodes", "max_proposal_nodes", "max_proposals_per_session",
            "cuda_graph_max_bs", "torch_compile_max_bs",
        )  # fmt: skip
        check_algorithm(self.speculative_algorithm)
        if self.mem_fraction_static is not None and not 0 < self.mem_fraction_static < 1:
            raise StartupError(f"--mem-fraction-static is {self.mem_fraction_static}; it must lie between 0 and 1")
        at_least(self, 0, "max_queued_requests", "max_assumed_tokens", "max_draft_wait_ms", "shutdown_grace_s")
        check_graphs(self)
        if self.torch_compile_max_bs != VerifyArgs.torch_compile_max_bs and not self.enable_torch_compile:
            raise StartupError("--torch-compile-max-bs needs --enable-torch-compile")


@dataclass(frozen=True, kw_only=True)
class DraftArgs(SpeculativeArgs):
    """Settings of `outrider draft`."""

    command: ClassVar[str] = "draft"
    summary: ClassVar[str] = "Serve drafts: dials verify services and proposes token trees for their sessions."

    listen: str = arg("127.0.0.1:50052", "network", "Address to serve gRPC on: host:port or unix:/path.")
    verify_address: tuple[str, ...] = arg(
        ("127.0.0.1:50051",), "network", "Verify service to enlist with; a DNS name may stand for several. Repeatable."
    )
    model_path: str | None = arg(
        None, "model", "The target that is drafted for: a head shares its files. Default: the embedded model.",
        aliases=("--model",),
    )  # fmt: skip
    revision: str | None = arg(None, "model", "Revision of the target's hub id.")
    load_format: Literal["auto", "safetensors", "pt", "dummy"] = arg("auto", "model", "Form of the target's weights.")
    dtype: Literal["auto", "bfloat16", "float32", "float16"] = arg(
        "auto", "model", "Compute dtype of the draft model. Default: its own; of a head, the target's."
    )
    quantization: str | None = arg(None, "model", "What the target is quantised to; a draft model is too, by default.")
    trust_remote_code: bool = arg(False, "model", "Run Python code that comes in the draft model's folder.")
    device: str = arg("auto", "model", "cpu, cuda or cuda:N.")
    threads: int | None = arg(None, "model", "CPU threads for the forward pass. Default: all cores.")
    disable_cuda_graph: bool = arg(False, "model", "Launch each step's kernels one by one.")
    cuda_graph_max_bs: int | None = arg(
        None, "model", "Most sessions of a step replayed from a CUDA graph. Default: --max-sessions, at most 64."
    )
    draft_max_total_tokens: int = arg(65_536, "model", "Tokens that the draft model's KV pool holds.")
    max_sessions: int = arg(256, "network", "Sessions taken at once from each verify service.")
    describe: bool = arg(
        False, "more", "Print what these drafts need of verify (its --features) as JSON, and exit; nothing is loaded."
    )
    inspect: str | None = arg(None, "more", "Print the tree that would be proposed after this text, and exit.")
    shutdown_grace_s: float = arg(5.0, "network", "Time that verify services get to end the streams on SIGTERM.")
    speculative_ngram_external_corpus_path: tuple[str, ...] = arg(
        (), "speculation: NGRAM",
        "Text to draw drafts from: a .txt file, or a .jsonl file of strings or of objects with `text`. Repeatable.",
    )  # fmt: skip
    speculative_ngram_external_corpus_max_tokens: int = arg(
        10_000_000, "speculation: NGRAM", "Most tokens that corpora hold, files and AddCorpus together."
    )
    max_pending_tokens: int = arg(
        8_000_000, "speculation: NGRAM", "Tokens waiting to be inserted into the trie; texts over it are left out."
    )

    def check(self) -> None:
        """Bounds."""
        super().check()
        at_least(
            self, 1, "max_sessions", "max_pending_tokens", "draft_max_total_tokens", "threads", "cuda_graph_max_bs"
        )  # fmt: skip
        check_graphs(self)
        at_least(self, 0, "shutdown_grace_s", "speculative_ngram_external_corpus_max_tokens")


def check_graphs(settings: VerifyArgs | DraftArgs) -> None:
    """StartupError for graphs that are both wanted and not."""
    if settings.disable_cuda_graph and settings.cuda_graph_max_bs is not None:
        raise StartupError("--cuda-graph-max-bs and --disable-cuda-graph exclude each other; give one")


@dataclass(frozen=True, kw_only=True)
class GatewayArgs(Args):
    """Settings of `outrider gateway`."""

    command: ClassVar[str] = "gateway"
    summary: ClassVar[str] = "Serve the OpenAI API over HTTP in front of verify services."

    host: str = arg("127.0.0.1", "network", "Address to serve HTTP on.")
    port: int = arg(8000, "network", "Port to serve HTTP on; 0 takes a free one.")
    uds: str | None = arg(None, "network", "Unix socket to serve HTTP on, instead of host and port.")
    verify_address: tuple[str, ...] = arg(
        ("127.0.0.1:50051",), "network", "Verify service; a DNS name may stand for several. Repeatable."
    )
    served_model_name: str | None = arg(
        None, "model", "Name in the API. Default: the hub id, or the model folder's name."
    )
    tokenizer_path: str | None = arg(None, "model", "Folder with tokenizer.json. Default: the verify service's model.")
    chat_template: str | None = arg(None, "model", "File with a chat template. Default: the model's.")
    tool_call_parser: str | None = arg(
        None, "model", "How the model writes calls of tools: hermes, llama3_json, mistral, pythonic, qwen3_coder, "
        "deepseekv3, kimi_k2... Default: what the chat template shows.",
    )  # fmt: skip
    reasoning_parser: str | None = arg(
        None,
        "model",
        "How the model marks its reasoning: deepseek-r1, qwen3, mistral... Default: it is not told apart.",
    )
    api_key: tuple[str, ...] = arg((), "limits", "Key that clients must send. Repeatable. Default: none.")
    api_key_file: str | None = arg(
        None, "limits", "File with such keys, one on a line, each with limits of its own if need be: "
        "KEY name=WHO requests_per_minute=N tokens_per_minute=N.",
    )  # fmt: skip
    requests_per_minute: int | None = arg(None, "limits", "Requests of one key in a minute. Default: no limit.")
    tokens_per_minute: int | None = arg(
        None, "limits", "Tokens of one key in a minute, of prompts and answers. Default: no limit."
    )
    max_prompt_tokens: int | None = arg(None, "limits", "Longest prompt. Default: as the context holds.")
    max_schema_bytes: int = arg(64 * 1024, "limits", "Largest JSON schema or grammar of a request.")
    max_body_bytes: int = arg(8 * 2**20, "limits", "Largest request body.")
    max_connections: int = arg(2048, "limits", "HTTP connections open at once.")
    stream_buffer_bytes: int = arg(2**20, "limits", "Bytes that wait for a slow reader before its stream is dropped.")
    receive_timeout_s: float = arg(30.0, "limits", "Time for a request's headers to arrive, and again for its body.")
    request_timeout_s: float = arg(600.0, "limits", "Time for an answer, waiting included.")
    strict_fields: bool = arg(False, "limits", "Refuse unknown body fields instead of ignoring them.")
    shutdown_grace_s: float = arg(30.0, "network", "Time that running requests get to finish on SIGTERM.")

    def check(self) -> None:
        """Bounds."""
        at_least(self, 0, "port", "shutdown_grace_s", "receive_timeout_s", "request_timeout_s")
        at_least(
            self, 1, "max_body_bytes", "max_connections", "stream_buffer_bytes", "requests_per_minute",
            "tokens_per_minute", "max_prompt_tokens", "max_schema_bytes",
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ServeArgs(VerifyArgs, DraftArgs, GatewayArgs):
    """Settings of `outrider serve`: those of its three parts, less the addresses between them."""

    command: ClassVar[str] = "serve"
    summary: ClassVar[str] = "Serve a model on this machine: verify, draft and gateway as processes of their own."

    # No fields here: the launcher chooses these addresses.
    listen: ClassVar[str] = ""  # pyright: ignore[reportIncompatibleVariableOverride]
    verify_address: ClassVar[tuple[str, ...]] = ()  # pyright: ignore[reportIncompatibleVariableOverride]
    uds: ClassVar[None] = None  # pyright: ignore[reportIncompatibleVariableOverride]
    describe: ClassVar[bool] = False  # pyright: ignore[reportIncompatibleVariableOverride]
    inspect: ClassVar[None] = None  # pyright: ignore[reportIncompatibleVariableOverride]

    speculative_algorithm: str | None = arg(
        "NGRAM", "speculation", "How drafts are made: NGRAM, STANDALONE, EAGLE, EAGLE3, NEXTN, or NONE for none."
    )
    features: str = arg(
        "auto", "speculation", "Hidden states kept for drafters: auto (as these need them), none, last or aux:I,J,K."
    )
    grpc_address: str | None = arg(
        None, "network", "Address for gRPC clients: host:port or unix:/path. Default: none from outside."
    )
    startup_timeout_s: float = arg(900.0, "network", "Time to become ready, a model's first download included.")

    def check(self) -> None:
        """Bounds of all parts."""
        VerifyArgs.check(self)
        DraftArgs.check(self)
        GatewayArgs.check(self)
        at_least(self, 1, "startup_timeout_s")

    @property
    def drafts(self) -> bool:
        """Whether a draft service runs."""
        return (self.speculative_algorithm or "NONE").upper() != "NONE"

    def part(self, cls: type[ArgsT], **fixed: Any) -> ArgsT:
        """The settings of one part: `fixed`, what was given here, and the part's own defaults for the rest."""
        defaults = {spec.name: spec.default for spec in dataclasses.fields(self)}
        own = {spec.name for spec in dataclasses.fields(cls)} & defaults.keys()
        given = {name: getattr(self, name) for name in own if getattr(self, name) != defaults[name]}
        return cls(**{**given, **fixed})


@dataclass(frozen=True, kw_only=True)
class ChatArgs(Args):
    """Settings of `outrider chat`."""

    command: ClassVar[str] = "chat"
    summary: ClassVar[str] = "Chat with a running server; the answer's tokens are coloured by where they came from."

    url: str = arg("http://127.0.0.1:8000", "connection", "Address of the gateway.")
    api_key: str | None = arg(None, "connection", "Key, where the server asks for one.")
    model: str | None = arg(None, "connection", "Model to talk to. Default: the first that the server names.")
    prompt: str | None = arg(None, "conversation", "Ask this once and end, instead of a conversation.")
    system: str | None = arg(None, "conversation", "System message.")
    max_tokens: int | None = arg(None, "conversation", "Longest answer, in tokens. Default: as the context allows.")
    temperature: float = arg(0.0, "conversation", "Sampling temperature; 0 always takes the likeliest token.")
    no_speculation: bool = arg(False, "conversation", "Ask the server to decode plainly.")

    def check(self) -> None:
        """Bounds."""
        at_least(self, 1, "max_tokens")
        at_least(self, 0, "temperature")


@dataclass(frozen=True, kw_only=True)
class ConvertArgs(Args):
    """Settings of `outrider convert`."""

    command: ClassVar[str] = "convert"
    summary: ClassVar[str] = "Write a published draft head (EAGLE's own files, speculators', SGLang's) as safetensors."

    source: str | None = arg(None, "files", "Folder or hub id of the head.")
    destination: str | None = arg(None, "files", "Folder to write, which must not exist.")
    revision: str | None = arg(None, "files", "Revision of the hub id.")

    def check(self) -> None:
        """Both sides are needed."""
        for name in ("source", "destination"):
            if getattr(self, name) is None:
                raise StartupError(f"--{name} is needed")
