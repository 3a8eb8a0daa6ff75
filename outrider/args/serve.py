"""Flags of `outrider serve`: those of its parts."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from outrider.args.draft import DraftArgs
from outrider.args.gateway import GatewayArgs
from outrider.args.links import check_apart, host_port, is_socket
from outrider.args.speculation import ALGORITHMS
from outrider.args.verify import VerifyArgs
from outrider.default_algorithm import USUAL, fastest_algorithm
from outrider.errors import StartupError
from outrider.flags import ArgsT, arg, at_least, flag_named

_NODE_LIMITS = {name: getattr(VerifyArgs, name) for name in ("max_verify_nodes", "max_proposal_nodes")}
"""Verify's limits on a draft's nodes, and what they are where nobody asks for more."""
_OF_DRAFTS = ("colocate", "speculative_num_draft_tokens", "max_sessions")  # whatever drafts


@dataclass(frozen=True, kw_only=True)
class ServeArgs(VerifyArgs, DraftArgs, GatewayArgs):
    """Settings of `outrider serve`: those of its three parts, less the addresses between them."""

    command: ClassVar[str] = "serve"
    summary: ClassVar[str] = "Serve a model on this machine: verify, draft and gateway as processes of their own."
    algorithms: ClassVar[tuple[str, ...]] = ALGORITHMS
    features_words: ClassVar[tuple[str, ...]] = ("auto", *VerifyArgs.features_words)

    # No fields here: the launcher chooses these addresses.
    listen: ClassVar[None] = None  # pyright: ignore[reportIncompatibleVariableOverride]
    verify_address: ClassVar[tuple[str, ...]] = ()  # pyright: ignore[reportIncompatibleVariableOverride]
    core: ClassVar[None] = None  # pyright: ignore[reportIncompatibleVariableOverride]
    uds: ClassVar[None] = None  # pyright: ignore[reportIncompatibleVariableOverride]
    describe: ClassVar[bool] = False  # pyright: ignore[reportIncompatibleVariableOverride]
    inspect: ClassVar[None] = None  # pyright: ignore[reportIncompatibleVariableOverride]
    verify_ssl_ca_certs: ClassVar[None] = None  # pyright: ignore[reportIncompatibleVariableOverride]
    verify_ssl_certfile: ClassVar[None] = None  # pyright: ignore[reportIncompatibleVariableOverride]
    verify_ssl_keyfile: ClassVar[None] = None  # pyright: ignore[reportIncompatibleVariableOverride]
    verify_ssl_server_name: ClassVar[None] = None  # pyright: ignore[reportIncompatibleVariableOverride]

    speculative_algorithm: str | None = arg(
        None, "speculation", "How drafts are made: NGRAM, STANDALONE, EAGLE, EAGLE3, NEXTN, or NONE for none. Default: "
        "NGRAM; for the embedded model what was measured to be fastest of all that comes with Outrider.",
    )  # fmt: skip
    features: str = arg(
        "auto", "speculation", "Hidden states kept for drafters: auto (as these need them), none, last or aux:I,J,K."
    )
    max_verify_nodes: int | None = arg(  # pyright: ignore[reportIncompatibleVariableOverride]
        None, "speculation",
        f"Most draft nodes verified for one session in one step. Default: {VerifyArgs.max_verify_nodes}, or as many as "
        "flags let a draft have.",
    )  # fmt: skip
    max_proposal_nodes: int | None = arg(  # pyright: ignore[reportIncompatibleVariableOverride]
        None, "speculation",
        f"Most nodes of a proposal. Default: {VerifyArgs.max_proposal_nodes}, or as many as flags let a draft have.",
    )  # fmt: skip
    grpc_address: str | None = arg(
        None, "network", "Address for gRPC clients: host:port or unix:/path. Default: none from outside."
    )
    metrics_port: int | None = arg(
        0, "observing",
        "Port of the verify service's Prometheus metrics, without key or TLS; the draft service's are on the next one, "
        "the gateway's at its own /metrics. 0 takes free ones.",
    )  # fmt: skip
    colocate: bool = arg(
        False, "more",
        "Verify and draft in one process, their stream kept in memory: for small machines. They then share one Python "
        "interpreter.",
    )  # fmt: skip
    core_placement: Literal["auto", "off"] | None = arg(
        None, "model",
        "auto: on 2 to 4 cores, while one or two sessions have drafts, verify and draft keep to one each, their "
        "--core, and kernels' helpers to the others. Default: auto, but off with --colocate.",
    )  # fmt: skip
    shutdown_grace_s: float | None = arg(  # pyright: ignore[reportIncompatibleVariableOverride]
        None, "network",
        f"Time that each part gets to finish on SIGTERM. Default: {VerifyArgs.shutdown_grace_s:g}, and "
        f"{DraftArgs.shutdown_grace_s:g} for draft.",
    )  # fmt: skip
    startup_timeout_s: float = arg(900.0, "network", "Time to become ready, a model's first download included.")

    def check(self) -> None:
        """StartupError for values out of any part's bounds."""
        super().check()
        at_least(self, 1, "startup_timeout_s")
        for name in _OF_DRAFTS:
            if not self.drafts and getattr(self, name) != getattr(ServeArgs, name):
                raise StartupError(f"{flag_named(name)} needs drafts; --speculative-algorithm is NONE")
        if self.core_placement == "auto" and not self.drafts:
            raise StartupError("--core-placement auto needs drafts; --speculative-algorithm is NONE")
        if self.colocate and self.core_placement == "auto":
            raise StartupError("--core-placement auto is for services apart; --colocate makes them one process")
        if self.metrics_port is not None and self.metrics_port > 65534:
            raise StartupError(
                f"--metrics-port is {self.metrics_port}; it must be at most 65534, for the next is used too"
            )
        first = self.metrics_port or 0
        check_apart(
            {
                "--port": host_port(self.host, self.port),
                "--grpc-address": self.grpc_address,
                "--metrics-port": host_port(self.metrics_host, first),
                "the port after --metrics-port": host_port(self.metrics_host, first + 1 if first else 0),
            }
        )
        if self.algorithm == USUAL:
            self.refuse_draft_model_flags()
        else:
            self.refuse_ngram_flags(self.algorithm)
            if self.drafts:
                self.check_tree()
        self._check_node_limits()

    def _check_node_limits(self) -> None:
        """StartupError for a limit below the nodes that other flags ask drafts to have."""
        asking, nodes = self.find_most_nodes()
        for name in _NODE_LIMITS:
            limit = getattr(self, name)
            if limit is not None and limit < nodes:
                asked = f"{flag_named(asking)} is {getattr(self, asking)}"
                raise StartupError(
                    f"{asked}, and a draft then has up to {nodes} nodes beside the root; "
                    f"{flag_named(name)} is {limit}: raise it, or leave it out"
                )

    @property
    def grpc_is_tls(self) -> bool:
        """Whether gRPC clients are served over TLS: as HTTP's are, where they come over TCP."""
        return self.ssl_certfile is not None and self.grpc_address is not None and not is_socket(self.grpc_address)

    @property
    def algorithm(self) -> str:
        """How drafts are made, in capitals; NONE for not at all."""
        if self.speculative_algorithm is not None:
            return self.speculative_algorithm.upper()
        is_embedded = self.model_path is None and not self.speculative_draft_model_path
        if not is_embedded or self.load_format != "auto":
            return USUAL
        return fastest_algorithm(quantized=self.quantization is not None)

    @property
    def drafts(self) -> bool:
        """Whether a draft service runs."""
        return self.algorithm != "NONE"

    def part(self, cls: type[ArgsT], **fixed: Any) -> ArgsT:
        """The settings of one part: `fixed`, what was given here, and the part's own defaults for the rest."""
        defaults = {spec.name: spec.default for spec in dataclasses.fields(self)}
        own = {spec.name for spec in dataclasses.fields(cls)} & defaults.keys()
        given = {name: getattr(self, name) for name in own if getattr(self, name) != defaults[name]}
        if open_limits := own & _NODE_LIMITS.keys() - given.keys():
            most = self.find_most_nodes()[1]
            given |= {name: max(_NODE_LIMITS[name], most) for name in open_limits}
        # Parts need not be told of n-grams, which take no room.
        if "speculative_algorithm" in own and self.algorithm != USUAL:
            given["speculative_algorithm"] = self.algorithm
        return cls(**{**given, **fixed})
