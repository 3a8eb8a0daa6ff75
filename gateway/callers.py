"""Who may call, and how much: API keys compared in constant time, and a rate of requests and of tokens for each.

A rate is a bucket that fills evenly and holds a minute's worth. Tokens are taken when they are known, prompt first,
answer as it comes; who has taken more than there was waits until the bucket is above zero again.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from starlette.datastructures import Headers

from gateway.errors import HttpError
from outrider.api_keys import KeyEntry, KeyFile
from outrider.args import GatewayArgs
from outrider.errors import ResourceExhausted

Clock = Callable[[], float]


class Bucket:
    """`per_minute` units a minute; as many may be taken at once."""

    def __init__(self, per_minute: int, clock: Clock) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._last = clock()

    @property
    def level(self) -> float:
        """The units that are there now; below zero when more was taken."""
        now = self._clock()
        self._level = min(self.per_minute, self._level + (now - self._last) * self.per_minute / 60)
        self._last = now
        return self._level

    def take(self, units: int) -> None:
        """Takes what is used, whether or not it is there."""
        self._level = self.level - units

    def wait_s(self, units: float) -> float:
        """Seconds until `units` are there."""
        return max(0.0, (units - self.level) * 60 / self.per_minute)


@dataclass(slots=True)
class Caller:
    """One key's holder; without keys everyone is one caller. `name` stands in logs, the key never does."""

    name: str
    requests: Bucket | None = None
    tokens: Bucket | None = None

    def admit(self) -> None:
        """Counts one request. ResourceExhausted, with the time to wait, over a limit."""
        for unit, bucket, needed in (("requests", self.requests, 1.0), ("tokens", self.tokens, 1e-9)):
            if bucket is not None and (wait_s := bucket.wait_s(needed)) > 0:
                raise ResourceExhausted(
                    f"The rate limit of {bucket.per_minute} {unit} a minute is reached.",
                    code="rate_limit_exceeded", retry_after_s=wait_s,
                )  # fmt: skip
        if self.requests is not None:
            self.requests.take(1)

    def use(self, num_tokens: int) -> None:
        """Counts tokens."""
        if self.tokens is not None:
            self.tokens.take(num_tokens)

    def give_back(self, num_tokens: int) -> None:
        """Counts tokens no longer, which were for nothing."""
        if self.tokens is not None:
            self.tokens.take(-num_tokens)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """OpenAI's account of the limits."""
        made: list[tuple[bytes, bytes]] = []
        for unit, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket is not None:
                values = {
                    "limit": str(bucket.per_minute), "remaining": str(max(0, int(bucket.level))),
                    "reset": f"{bucket.wait_s(bucket.per_minute):.3f}s",
                }  # fmt: skip
                made += [(f"x-ratelimit-{name}-{unit}".encode(), value.encode()) for name, value in values.items()]
        return made


@dataclass(slots=True)
class Callers:
    """Finds the caller of a request. `file`: more keys, which may change while the process runs."""

    entries: Sequence[KeyEntry]
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    clock: Clock = time.monotonic
    file: KeyFile | None = None
    _callers: dict[KeyEntry, Caller] = field(default_factory=dict)
    _known: list[tuple[bytes, Caller]] = field(default_factory=list)
    _anyone: Caller = field(init=False)

    def __post_init__(self) -> None:
        self._anyone = self._caller(KeyEntry("", "anyone"))
        self._learn()

    def all_entries(self) -> list[KeyEntry]:
        """The entries of the flags, then the file's."""
        return [*self.entries, *(self.file.entries if self.file is not None else ())]

    def _learn(self) -> None:
        """Takes the keys as they are now; a line that did not change keeps what it has used."""
        self._callers = {entry: self._callers.get(entry) or self._caller(entry) for entry in self.all_entries()}
        self._known = [(_digest(entry.key.encode()), caller) for entry, caller in self._callers.items()]

    def _caller(self, entry: KeyEntry) -> Caller:
        requests = entry.requests_per_minute or self.requests_per_minute
        tokens = entry.tokens_per_minute or self.tokens_per_minute
        return Caller(
            entry.name,
            Bucket(requests, self.clock) if requests is not None else None,
            Bucket(tokens, self.clock) if tokens is not None else None,
        )

    def find(self, headers: Headers) -> Caller:
        """HttpError 401 unless `Authorization: Bearer KEY` holds a known key; without keys everyone is let in."""
        if self.file is not None and self.file.refresh():
            self._learn()
        if not self._known:
            return self._anyone
        scheme, _, given = headers.get("authorization", "").partition(" ")
        digest = _digest(given.strip().encode(errors="replace"))
        # Every key is compared, and each in a time that does not depend on it.
        found = [caller for known, caller in self._known if hmac.compare_digest(digest, known)]
        if scheme.lower() != "bearer" or not found:
            raise HttpError(
                401, "Give a valid API key in the Authorization header: 'Bearer KEY'.", code="invalid_api_key"
            )
        return found[0]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def callers_of(args: GatewayArgs) -> Callers:
    """The callers by the flags and the key file. StartupError for what cannot be read."""
    entries = [KeyEntry(key, f"key-{index}") for index, key in enumerate(args.api_key)]
    file = None if args.api_key_file is None else KeyFile(args.api_key_file)
    return Callers(entries, args.requests_per_minute, args.tokens_per_minute, file=file)
