"""numba's compiler, as drafters use it: what it compiled is kept for the next start, where that can be written."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from numba import config, njit
from numba.core.caching import FunctionCache, IndexDataCacheFile

from outrider.telemetry import get_logger

log = get_logger(__name__)

F = TypeVar("F", bound=Callable[..., Any])

_DIGEST_BYTES = hashlib.sha256().digest_size


class _Digested(IndexDataCacheFile):
    """Kept code begins with a digest: what loads it does not look, and damaged code would end the process.

    It is of the sources too. Their stamp is in the list of what is kept, which is written first: until the code is, or
    for good after a power cut, an older version's stands there.
    """

    def _load_data(self, name: str) -> Any:
        kept = Path(self._data_path(name)).read_bytes()
        digest, data = kept[:_DIGEST_BYTES], kept[_DIGEST_BYTES:]
        if digest != self._digest(data):
            raise ValueError("its digest is another one")
        return pickle.loads(data)  # noqa: S301  # of the folder that numba loads code from

    def _save_data(self, name: str, data: Any) -> None:
        dumped = self._dump(data)
        with self._open_for_write(self._data_path(name)) as file:
            file.write(self._digest(dumped) + dumped)

    def _digest(self, data: bytes) -> bytes:
        return hashlib.sha256(repr(self._source_stamp).encode() + data).digest()


class _Kept(FunctionCache):
    """A full disk, files of another user, or damaged ones, cost this start or the next some seconds; numba's own would
    raise.

    And numba looks at the function's own file alone, though what it calls is compiled into it.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        stamp = self._impl.locator.get_source_stamp(), _stamp_of_calls()
        self._cache_file = _Digested(self._cache_path, self._impl.filename_base, stamp)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except OSError as error:
            _warn(_reason(error))
        except Exception as error:  # what a power cut emptied or cut off fails in many ways
            _tell_damage(_reason(error))
            self._forget()
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except Exception as error:  # or what is there is damaged, and cannot be written
            _warn(_reason(error))

    def _forget(self) -> None:
        """Empties the function's list of what is kept, or numba would read it again before it keeps more."""
        try:
            self.flush()
        except OSError as error:
            _warn(_reason(error))


def _reason(error: Exception) -> str:
    """Without the file's name, which is another one for each function."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


@cache
def _stamp_of_calls() -> tuple[tuple[str, str], ...]:
    """Names and digests of the files whose compiled functions call one another's, and of this one, which keeps them."""
    files = [Path(__file__), *sorted(Path(__file__).parent.glob("trie*.py"))]
    return tuple((file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in files)


@cache
def _warn(reason: str) -> None:
    log.warning("compiled code is not kept, so the next start compiles again", reason=reason)


@cache
def _tell_damage(reason: str) -> None:
    log.warning("compiled code is damaged, so it is compiled again", reason=reason)


def compiled(function: F) -> F:
    """The function compiled on its first call; it runs without the interpreter's lock."""
    dispatcher: Any = njit(nogil=True)(function)
    try:
        dispatcher._cache = _Kept(function)  # as numba's cache=True does it with its own
    except (RuntimeError, AttributeError):  # no folder that numba knows can be written; or it keeps stamps elsewhere
        _warn(f"{getattr(config, 'CACHE_DIR', '')} cannot be written")
    return dispatcher
