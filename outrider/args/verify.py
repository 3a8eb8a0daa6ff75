"""Flags of `outrider verify`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from outrider.args.links import ServingArgs, check_address, check_apart, check_tls_is_used, host_port
from outrider.args.observing import ObservingArgs
from outrider.args.quantization import quantization_method
from outrider.args.speculation import check_algorithm
from outrider.errors import StartupError
from outrider.flags import MAX_THREADS, arg, at_least, at_most, check_device
from outrider.wire import MAX_CHOICES

if TYPE_CHECKING:
    from outrider.args.draft import DraftArgs

LEAST_WATCHDOG_S = 1.0  # a first step, or a turn of the event loop at the start, may take half a second


@dataclass(frozen=True, kw_only=True)
class VerifyArgs(ObservingArgs, ServingArgs):
    """Settings of `outrider verify`."""

    features_words: ClassVar[tuple[str, ...]] = ("none", "last")
    """What --features may be beside names of layers."""

    command: ClassVar[str] = "verify"
    summary: ClassVar[str] = "Serve the target model: prefill, verification of drafts, the truth about every session."

    listen: str = arg("127.0.0.1:50051", "network", "Address to serve gRPC on: host:port or unix:/path.")
    grpc_address: str | None = arg(
        None, "network", "A second address to serve gRPC on: host:port or unix:/path. Default: none."
    )
    admin_token_file: str | None = arg(
        None, "security",
        "Tokens of operators, one on a line, read again when it changes: `outrider drafters` must send one. Default: "
        "none, and it is served over Unix sockets alone.",
    )  # fmt: skip
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
    threads: int | None = arg(
        None, "model", "CPU threads for the forward pass. Default: all cores, or a control group's CPU limit."
    )
    core: int | None = arg(
        None, "model",
        "Core that this process's threads keep to while one or two sessions have drafts verified, and the C kernels' "
        "helpers to others. "
        "Default: none; `serve --core-placement auto` chooses.",
    )  # fmt: skip
    busy_poll: Literal["auto", "on", "off"] = arg(
        "auto", "model",
        "Look without sleeping for the frame that answers one, which spares each round the time of waking up. "
        "auto: where the model runs on a device.",
    )  # fmt: skip
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
    max_choices: int = arg(
        MAX_CHOICES, "memory and scheduling", f"Most choices (n) of one request; over HTTP {MAX_CHOICES} at most."
    )
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
        "What keys and values are kept in; flashinfer reads no fp8. auto: the compute dtype.",
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
    drafter_outbox_bytes: int | None = arg(
        None, "speculation",
        "Bytes waiting for a slow drafter before it is dropped. Default: 8 MiB, or four rounds' feature rows.",
    )  # fmt: skip
    max_draft_wait_ms: float = arg(
        20.0, "speculation", "Longest wait for a drafter; measured savings bound it further."
    )
    speculative_accept_threshold_single: float = arg(
        1.0, "speculation",
        "Of requests that name none: a draft of at least this probability is accepted. Below 1 drafts change output.",
    )  # fmt: skip
    speculative_accept_threshold_acc: float = arg(
        1.0, "speculation", "The same: drafts are accepted as if they were so many times likelier (1 over this)."
    )
    disable_speculation_brake: bool = arg(False, "speculation", "Verify drafts as they come, whether or not they pay.")
    watchdog_timeout: float = arg(
        300.0, "network",
        "Seconds without progress, of a step or of the event loop, after which the process ends with exit code 1, so "
        "that answers go on elsewhere and it is started again; a process paused for three times as long ends when it "
        "goes on; 0: never.",
    )  # fmt: skip
    shutdown_grace_s: float = arg(30.0, "network", "Time that running requests get to finish on SIGTERM.")
    decode_log_interval: int = arg(40, "observing", "Steps between log lines about decoding; 0: none.")

    @property
    def most_choices(self) -> int:
        """The most choices of one request: no more than run and wait at once."""
        return min(self.max_choices, self.max_running_requests + self.max_queued_requests)

    def check(self) -> None:
        """StartupError for values out of bounds."""
        super().check()
        for name, address in (("--listen", self.listen), ("--grpc-address", self.grpc_address)):
            if address is not None:
                check_address(name, address, least_port=0)
        addresses = tuple(address for address in (self.listen, self.grpc_address) if address is not None)
        if self.listen is not None:  # as `serve` has it, which chooses addresses
            check_tls_is_used("--ssl-certfile", self.ssl_certfile, addresses)
            metrics = host_port(self.metrics_host, self.metrics_port or 0)
            check_apart({"--listen": self.listen, "--grpc-address": self.grpc_address, "--metrics-port": metrics})
        at_most(self, MAX_THREADS, "threads")
        at_least(self, 2, "max_total_tokens", "context_length")  # a token of the prompt and one of the answer
        at_least(
            self, 1, "max_running_requests", "max_choices", "threads", "chunked_prefill_size", "max_verify_nodes",
            "max_proposal_nodes", "max_proposals_per_session", "cuda_graph_max_bs", "torch_compile_max_bs",
            "drafter_outbox_bytes",
        )  # fmt: skip
        at_least(self, 0, "speculative_accept_threshold_single", "speculative_accept_threshold_acc")
        at_most(self, 1, "speculative_accept_threshold_single", "speculative_accept_threshold_acc")
        check_algorithm(self.speculative_algorithm)
        if self.model_path == "":
            raise StartupError("--model-path is empty; it must be a folder or a hub id")
        if self.mem_fraction_static is not None and not 0 < self.mem_fraction_static < 1:
            raise StartupError(f"--mem-fraction-static is {self.mem_fraction_static}; it must lie between 0 and 1")
        at_least(
            self, 0, "max_queued_requests", "max_assumed_tokens", "max_draft_wait_ms", "shutdown_grace_s",
            "watchdog_timeout", "decode_log_interval",
        )  # fmt: skip
        if 0 < self.watchdog_timeout < LEAST_WATCHDOG_S:
            raise StartupError(
                f"--watchdog-timeout is {self.watchdog_timeout:g}; it must be 0, for never, or at least "
                f"{LEAST_WATCHDOG_S:g}"
            )
        check_features(self.features, self.features_words)
        check_model(self)
        if self.torch_compile_max_bs != VerifyArgs.torch_compile_max_bs and not self.enable_torch_compile:
            raise StartupError("--torch-compile-max-bs needs --enable-torch-compile")


def check_features(features: str, words: tuple[str, ...]) -> None:
    """StartupError unless --features is one of these words or names layers; which there are, the model says."""
    if features not in words and not re.fullmatch(r"aux:[0-9]{1,9}(,[0-9]{1,9})*", features):
        raise StartupError(f"--features is {features!r}; it must be {', '.join(words)} or aux:I,J,K")


def check_model(settings: VerifyArgs | DraftArgs) -> None:
    """StartupError for a quantisation or a kind of device that there is not, and graphs both wanted and not."""
    if settings.quantization is not None:
        quantization_method(settings.quantization)
    check_device(settings.device)
    if settings.disable_cuda_graph and settings.cuda_graph_max_bs is not None:
        raise StartupError("--cuda-graph-max-bs and --disable-cuda-graph exclude each other; give one")
