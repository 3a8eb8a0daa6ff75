"""Text to ids. Control tokens come from the chat template or from a caller who writes the whole prompt, never from a
message; long text is encoded in a thread that leaves the event loop alone.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from gateway.detokenizer import DetokenizerFactory, detokenizer_factory
from gateway.offload import offload
from gateway.shield import Cover, Shield
from gateway.template import ChatTemplate
from outrider.errors import InvalidArgument, StartupError, reason_of
from outrider.telemetry import get_logger
from outrider.text_files import fingerprint_of, fitted, load_tokenizer

log = get_logger(__name__)

_PANIC = "PanicException"  # of libraries in Rust: no Exception, and of a module that cannot be imported
_COST = 16  # a character costs that many times what a byte of JSON does


class TokenizerPanic(Exception):
    """A fault of the tokenizers library, or want of threads for it."""


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What a model folder says about text."""

    tokenizer: Tokenizer
    template: ChatTemplate | None

    @classmethod
    def load(
        cls, folder: Path, chat_template: Path | None = None, vocab_size: int | None = None, fingerprint: str = ""
    ) -> TokenizerFiles:  # fmt: skip
        """Reads tokenizer.json and the chat template.

        For a model of so many ids, and with a vocabulary of that fingerprint, where there is one. StartupError names
        the file that is missing, broken, or another model's.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise StartupError(f"no tokenizer at {path}; --tokenizer-path names a folder with tokenizer.json")
        tokenizer = load_tokenizer(path)
        if fingerprint and fingerprint_of(tokenizer) != fingerprint:
            raise StartupError(
                f"{path} has another vocabulary than the model that verify serves; "
                "--tokenizer-path names a folder with that model's tokenizer.json"
            )
        if vocab_size is not None:
            tokenizer = fitted(tokenizer, vocab_size, path)
        try:
            encode(tokenizer, "a", special=False)  # with the first text come its threads, or never
        except TokenizerPanic as error:
            raise StartupError(f"{path} cannot be used: {error}. May this process start threads?") from error
        except Exception as error:
            log.debug("the tokenizer has no such text", text="a", reason=reason_of(error))
        return cls(tokenizer, ChatTemplate.of_folder(folder, chat_template))


class TextCodec:
    """Both directions for one model. `max_chars` characters cannot be fewer than `context_length` tokens."""

    def __init__(self, tokenizer: Tokenizer, *, context_length: int, template: ChatTemplate | None = None) -> None:
        self.context_length = context_length
        self._tokenizer = tokenizer
        vocab = tokenizer.get_vocab(with_added_tokens=True)
        self._longest_token = max(map(len, vocab), default=1)
        control = [added for added in tokenizer.get_added_tokens_decoder().values() if added.special]
        self._nonces = {added.content: f"<{secrets.token_hex(16)}>" for added in control}
        self._marked, self._nonce_ids = _with_nonces(tokenizer, control, self._nonces)
        templates = template.all() if template else ()
        strings = [text for each in templates for text in each.strings]
        self._shield = Shield(self._nonces, strings, "".join(each.source for each in templates))
        self._detokenizers: DetokenizerFactory = detokenizer_factory(tokenizer)
        self.detokenizer = self._detokenizers.make
        self.piece = self._detokenizers.piece  # a token's bytes

    @property
    def max_chars(self) -> int:
        """The most characters of a text: more are more tokens than the context holds, without counting them."""
        return self.context_length * self._longest_token

    def is_control(self, text: str) -> bool:
        """Whether `text` is a control token, which no grammar over text can ask for."""
        return text in self._nonces

    def covering(self, *values: object) -> Cover:
        """Stand-ins for one request's messages, to render a template with."""
        return self._shield.covering(*values)

    async def encode_chat(self, rendered: str, cover: Cover) -> list[int]:
        """Ids of a rendered template: its control tokens, and everything else as plain text."""
        return await offload(_COST * len(rendered), self._encode_chat, rendered, cover)

    async def encode_prompt(self, text: str) -> list[int]:
        """Ids of a whole prompt that the caller wrote: control tokens count, and the model's own are added in front."""
        return await offload(_COST * len(text), encode, self._tokenizer, text, special=True)

    async def encode_plain(self, text: str) -> list[int]:
        """Ids of text in which nothing is a control token."""
        return await offload(_COST * len(text), encode, self._marked, text, special=False)

    def check_length(self, text: str, field: str) -> None:
        """InvalidArgument for text that cannot fit the context, before anything is encoded."""
        if len(text) > self.max_chars:
            raise self.over_max_chars(len(text), field)

    def over_max_chars(self, num_chars: int, field: str) -> InvalidArgument:
        """The error of text with so many characters, more than `max_chars`."""
        at_least = -(-num_chars // self._longest_token)
        return too_long(self.context_length, at_least, None, field, qualifier="at least ")

    def _encode_chat(self, rendered: str, cover: Cover) -> list[int]:
        ids = encode(self._marked, cover.mark_control(rendered, self._nonces), special=False)
        return [self._nonce_ids.get(token, token) for token in ids] if self._nonce_ids else ids


def encode(tokenizer: Tokenizer, text: str, *, special: bool) -> list[int]:
    """Ids of `text`. The batch call gives the interpreter lock free while it works; the single one does not.

    TokenizerPanic where the library panics.
    """
    try:
        return tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ != _PANIC:
            raise
        raise TokenizerPanic(f"the tokenizer failed: {reason_of(error)}") from error


def _with_nonces(
    tokenizer: Tokenizer, control: list[AddedToken], nonces: dict[str, str]
) -> tuple[Tokenizer, dict[int, int]]:
    """A copy that knows the nonces instead of the control tokens, and nonce id -> control id."""
    marked = Tokenizer.from_str(tokenizer.to_str())
    marked.encode_special_tokens = True
    marked.add_tokens(
        [
            AddedToken(nonces[added.content], lstrip=added.lstrip, rstrip=added.rstrip, normalized=False, special=False)
            for added in control
        ]
    )
    ids: dict[int, int] = {}
    for content, nonce in nonces.items():
        ours, real = marked.token_to_id(nonce), tokenizer.token_to_id(content)
        assert ours is not None
        assert real is not None
        ids[ours] = real
    return marked, ids


def too_long(
    context_length: int, prompt_len: int, max_tokens: int | None, field: str, *, qualifier: str = ""
) -> InvalidArgument:
    """The error of a request that does not fit the context, with both counts."""
    asked = f"{qualifier}{prompt_len} in the prompt"
    if max_tokens is not None:
        asked += f" and {max_tokens} in the completion" if max_tokens else ", and one token is made in any case"
    return InvalidArgument(
        f"This model's maximum context length is {context_length} tokens. The request has {asked}.",
        field=field,
        code="context_length_exceeded",
    )
