"""Which replica has a prompt's beginning in its prefix cache: remembered from where prompts were sent.

A prompt is cut into blocks; each block's key is a hash of everything up to its end, so that the longest common
beginning is the last key that is known. A guess only: the replica may have evicted it, and then computes it again.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

BLOCK_TOKENS = 64
_MAX_BLOCKS = 64  # of one prompt: what lies beyond is the same replica's anyway
_BLOCK_BYTES = 4 * BLOCK_TOKENS


class PrefixMap:
    """Blocks and the address that each was last sent to; the least recently used are forgotten."""

    def __init__(self, max_entries: int = 65_536) -> None:
        self._max_entries = max_entries
        self._addresses: OrderedDict[bytes, str] = OrderedDict()

    def find(self, keys: list[bytes], usable: Callable[[str], bool]) -> str | None:
        """The address that has most of the prompt, of those that are usable."""
        for key in reversed(keys):
            address = self._addresses.get(key)
            if address is not None and usable(address):
                return address
        return None

    def remember(self, keys: list[bytes], address: str) -> None:
        """Notes that the prompt goes to `address`."""
        for key in keys:
            self._addresses[key] = address
            self._addresses.move_to_end(key)
        while len(self._addresses) > self._max_entries:
            self._addresses.popitem(last=False)


@dataclass
class PromptKeys:
    """A prompt's keys, made when they are first asked for: with one replica, never."""

    prompt_tokens: bytes
    cache_salt: str

    @cached_property
    def keys(self) -> list[bytes]:
        """See block_keys."""
        return block_keys(self.prompt_tokens, self.cache_salt)


def block_keys(prompt_tokens: bytes, cache_salt: str = "") -> list[bytes]:
    """A key for each whole block of a prompt (int32 ids), in order. The last token is left out: it is always computed.

    Prompts of different salts share none. At most 64 blocks of 64 tokens: 16 KiB are hashed, in some 20 µs.
    """
    digest = hashlib.blake2b(cache_salt.encode(), digest_size=16)
    keys: list[bytes] = []
    usable = max(0, len(prompt_tokens) - 4)
    for end in range(_BLOCK_BYTES, min(usable, _MAX_BLOCKS * _BLOCK_BYTES) + 1, _BLOCK_BYTES):
        digest.update(prompt_tokens[end - _BLOCK_BYTES : end])
        keys.append(digest.copy().digest())
    return keys
