"""Flags of `outrider draft`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from outrider.args.links import DialingArgs, ServingArgs, check_address, check_apart, check_tls_is_used, host_port
from outrider.args.observing import ObservingArgs
from outrider.args.speculation import DRAFTED, SpeculativeArgs, check_algorithm
from outrider.args.verify import check_model
from outrider.errors import StartupError
from outrider.flags import MAX_THREADS, arg, at_least, at_most

OF_DRAFT_MODELS = (
    "load_format", "dtype", "quantization", "trust_remote_code", "threads", "disable_cuda_graph", "cuda_graph_max_bs",
)  # fmt: skip
"""Settings beside those of speculation that nothing reads where no model drafts, and that are refused then. --device
is not: a deployment names it whatever drafts there."""


@dataclass(frozen=True, kw_only=True)
class DraftArgs(SpeculativeArgs, ObservingArgs, ServingArgs, DialingArgs):
    """Settings of `outrider draft`."""

    command: ClassVar[str] = "draft"
    summary: ClassVar[str] = "Serve drafts: dials verify services and proposes token trees for their sessions."
    algorithms: ClassVar[tuple[str, ...]] = DRAFTED
    """What --speculative-algorithm may be."""

    speculative_algorithm: str | None = arg(
        None, "speculation", "NGRAM, STANDALONE, EAGLE, EAGLE3, or NEXTN (the same as EAGLE). Default: NGRAM."
    )
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
    threads: int | None = arg(
        None, "model", "CPU threads for the forward pass. Default: all cores, or a control group's CPU limit."
    )
    core: int | None = arg(
        None, "model",
        "Core that this process's threads keep to while it drafts for one or two sessions, and the C kernels' helpers "
        "to others. "
        "Default: none; `serve --core-placement auto` chooses.",
    )  # fmt: skip
    busy_poll: Literal["auto", "on", "off"] = arg(
        "auto", "model",
        "Look without sleeping for the frame that answers one, which spares each round the time of waking up. "
        "auto: where the model runs on a device.",
    )  # fmt: skip
    disable_cuda_graph: bool = arg(False, "model", "Launch each step's kernels one by one.")
    cuda_graph_max_bs: int | None = arg(
        None, "model", "Most sessions of a step replayed from a CUDA graph. Default: --max-sessions, at most 64."
    )
    draft_max_total_tokens: int = arg(
        65_536, "speculation: draft model", "Tokens that the draft model's KV pool holds."
    )
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
        """StartupError for values out of bounds."""
        check_algorithm(self.speculative_algorithm, self.algorithms)
        super().check()
        if self.listen is not None:  # as `serve` has it, which chooses addresses
            check_address("--listen", self.listen, least_port=0)
            metrics = host_port(self.metrics_host, self.metrics_port or 0)
            check_apart({"--listen": self.listen, "--metrics-port": metrics})
            check_tls_is_used("--ssl-certfile", self.ssl_certfile, (self.listen,))
            for address in self.verify_address:
                check_address("--verify-address", address)
            check_tls_is_used("--verify-ssl-ca-certs", self.verify_ssl_ca_certs, self.verify_address)
        at_most(self, MAX_THREADS, "threads")
        at_least(self, 2, "draft_max_total_tokens")  # a token of the session's, and one drafted
        at_least(
            self, 1, "max_sessions", "max_pending_tokens", "threads", "cuda_graph_max_bs",
            "speculative_ngram_external_corpus_max_tokens",
        )  # fmt: skip
        if self.describe and self.inspect is not None:
            raise StartupError("--describe and --inspect exclude each other; give one")
        check_model(self)
        at_least(self, 0, "shutdown_grace_s")
