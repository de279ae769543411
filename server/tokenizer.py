"""Text to token ids and back. Text lives in the server; the engine sees the ids.

Whatever the vocabulary's style, here a token is a string of bytes (:meth:`Tokenizer.token_bytes`),
and the text of many tokens is their bytes in a row, decoded as UTF-8 with U+FFFD for what is not
UTF-8. That is what makes incremental detokenization exact (:mod:`server.detokenizer`).

**Control tokens in text.** A prompt given as one text (``/v1/completions``, ``/generate``,
``/tokenize``) belongs to the client as a whole, who may write ``<|im_end|>`` and mean the token: it
is recognised, as in llama.cpp and ``transformers``. In a chat message only the template may do
that: a message that opens and closes turns would forge them. :meth:`Tokenizer.protect` makes a text
harmless before it goes into the template: it puts a marker (U+10FFFF, which Unicode reserves for
internal use like this) behind every character that could begin a control token.
:meth:`Tokenizer.encode` looks for control tokens first and drops the markers then, so
``encode(protect(text))`` are the ids of the text as mere text, and stay so however the template
cuts, trims and joins it. The price: U+10FFFF itself is never encoded.

**What the vocabulary cannot say.** The default model has no token for 21 of the 256 bytes (0x04,
0xC0, 0xF1, …). As in llama.cpp such a byte is dropped, merges do not reach across the gap, and no
unknown token takes its place. What is left of a character that lost a byte decodes to U+FFFD.

**Threads.** A tokenizer does not change after construction: any number of threads may call any
method. Encoding releases the interpreter lock, so long prompts belong in an executor (1 MB takes
about 1 s).
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import tokenizers
from tokenizers import normalizers

MARKER: Final = "\U0010ffff"

_PLAIN_TAG = re.compile(r"[<\[]/?\w+[>\]]")

NO_TOKEN: Final = "<no token>"
"""Stands for a byte that the vocabulary lacks while pairs merge; then it is dropped. No text
encodes to it, because in byte-level text a blank is not a blank."""


class TokenizerError(ValueError):
    """A tokenizer that cannot be read, or cannot be imitated exactly: the message says which."""


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """What a tokenizer says of itself, however it encodes."""

    vocab_size: int
    """Ids are below this. A model may have more rows; an id without a token has no bytes."""
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    """Every token that ends a generation; the model's own end-of-sequence token comes first."""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """Texts by the names that chat templates use: ``bos_token``, ``eos_token``, …"""
    chat_template: str | None = None
    """Jinja source; None when the model came without one."""
    control_texts: tuple[str, ...] = ()
    """Texts of the control tokens that :meth:`Tokenizer.encode` recognises."""


class Tokenizer(ABC):
    """Text to ids and back, for one vocabulary. Built by :mod:`server.tokenizer_loader`."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        texts = vocabulary.control_texts
        if short := [text for text in texts if len(text) < 2]:
            raise TokenizerError(f"the control tokens {short} cannot be told from ordinary text")
        self.vocabulary: Final = vocabulary
        self._control_prefixes = {text[:end] for text in texts for end in range(1, len(text) + 1)}
        openers = sorted({re.escape(text[0]) for text in texts})
        self._opener = re.compile("|".join(openers)) if openers else None

    @property
    def vocab_size(self) -> int:
        return self.vocabulary.vocab_size

    @property
    def bos_id(self) -> int | None:
        return self.vocabulary.bos_id

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self.vocabulary.eos_ids

    @property
    def chat_template(self) -> str | None:
        return self.vocabulary.chat_template

    @abstractmethod
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text. Control tokens in it are recognised, unless :meth:`protect`-ed.

        ``add_special_tokens`` adds what the model expects around a plain prompt (often nothing, or
        the beginning-of-sequence token); a rendered chat template has it already. A lone surrogate
        counts as U+FFFD. Never raises.
        """

    @abstractmethod
    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token, which may be a part of a character; empty for an unknown id."""

    @abstractmethod
    def is_special(self, token_id: int) -> bool:
        """Whether ``skip_special_tokens`` leaves this token out."""

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of ``ids`` as the continuation of a text: a sentencepiece vocabulary's leading
        blank stays. Unknown ids count as nothing."""
        kept = (i for i in ids if not (skip_special_tokens and self.is_special(i)))
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")

    def token_text(self, token_id: int) -> str:
        """One token for people, in ``logprobs`` and logs; U+FFFD where it splits a character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def protect(self, text: str) -> str:
        """The text with a marker wherever a control token could begin, see above; :func:`unprotect`
        takes the markers out. Ordinary ``<tags>`` get none, because chat templates look for tags
        such as ``</think>`` in messages."""
        return self._opener.sub(self._mark, text) if self._opener else text

    def _mark(self, opener: re.Match[str]) -> str:
        tag = _PLAIN_TAG.match(opener.string, opener.start())
        if tag and tag[0] not in self._control_prefixes:
            return opener[0]
        return opener[0] + MARKER


def unprotect(text: str) -> str:
    """A rendered prompt as people should see it."""
    return text.replace(MARKER, "")


class ByteTokenizer(Tokenizer):
    """The hash model's: ids 0–255 are bytes, 256 and 257 begin and end a sequence.

    No text encodes to those two, except that a plain prompt gets the begin token in front. The chat
    template writes ``role: content`` lines.
    """

    BOS: Final = 256
    EOS: Final = 257
    _TEXTS: Final = {BOS: "<bos>", EOS: "<eos>"}
    CHAT_TEMPLATE: Final = (
        "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )

    def __init__(self) -> None:
        super().__init__(
            Vocabulary(
                vocab_size=258,
                bos_id=self.BOS,
                eos_ids=(self.EOS,),
                special_tokens={"bos_token": "<bos>", "eos_token": "<eos>"},
                chat_template=self.CHAT_TEMPLATE,
            )
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = list(_well_formed(unprotect(text)).encode())
        return [self.BOS, *ids] if add_special_tokens else ids

    def token_bytes(self, token_id: int) -> bytes:
        if 0 <= token_id < self.BOS:
            return bytes([token_id])
        return self._TEXTS.get(token_id, "").encode()

    def is_special(self, token_id: int) -> bool:
        return token_id in self._TEXTS


PieceStyle = Literal["byte-level", "sentencepiece"]
"""How a vocabulary writes bytes in its tokens' texts: GPT-2's 256 printable characters, or UTF-8
with U+2581 for a blank and ``<0x0A>`` for a lone byte."""


class BpeTokenizer(Tokenizer):
    """Byte-pair encoding, from a GGUF file or a ``tokenizer.json``."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        backend: tokenizers.Tokenizer,
        *,
        style: PieceStyle,
        special_ids: frozenset[int],
        verbatim_ids: frozenset[int],
        prefix: Sequence[int] = (),
        suffix: Sequence[int] = (),
    ) -> None:
        """``verbatim_ids`` are tokens whose text is plain text, not in the vocabulary's ``style``;
        ``prefix`` and ``suffix`` go around plain prompts. Takes possession of ``backend``.

        Raises :class:`TokenizerError` when plain text can encode to a control token."""
        super().__init__(vocabulary)
        drop_markers = [normalizers.Replace(MARKER, "")]
        own = [backend.normalizer] if backend.normalizer else []
        backend.normalizer = normalizers.Sequence(drop_markers + own)
        self._backend = backend
        self._special_ids = special_ids
        self._prefix, self._suffix = list(prefix), list(suffix)
        self._no_token = backend.token_to_id(NO_TOKEN)
        self._bytes = [b""] * vocabulary.vocab_size
        to_bytes = _byte_level_bytes if style == "byte-level" else _sentencepiece_bytes
        for text, i in backend.get_vocab(with_added_tokens=True).items():
            if i < vocabulary.vocab_size:
                self._bytes[i] = text.encode() if i in verbatim_ids else to_bytes(text)
        self._refuse_forgeable_control_tokens()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        # Only the batch call releases the interpreter lock; "fast" leaves out character offsets.
        batch = [_well_formed(text)]
        ids: list[int] = self._backend.encode_batch_fast(batch, add_special_tokens=False)[0].ids
        if self._no_token is not None:
            ids = [i for i in ids if i != self._no_token]
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens else ids

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def _refuse_forgeable_control_tokens(self) -> None:
        for text in self.vocabulary.control_texts:
            ids = self.encode(self.protect(text), add_special_tokens=False)
            if not self._special_ids.isdisjoint(ids):
                raise TokenizerError(f"ordinary text can encode to the control token {text!r}")


def _byte_characters() -> dict[int, str]:
    """GPT-2's character for each byte: itself where printable, else the next one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return {byte: chr(byte if byte in printable else next(others)) for byte in range(256)}


BYTE_CHARACTERS: Final = _byte_characters()
_BYTE_OF = str.maketrans({text: chr(byte) for byte, text in BYTE_CHARACTERS.items()})
_LONE_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_level_bytes(text: str) -> bytes:
    try:
        return text.translate(_BYTE_OF).encode("latin-1")
    except UnicodeEncodeError:  # not in byte-level style after all
        return text.encode()


def _sentencepiece_bytes(text: str) -> bytes:
    if lone := _LONE_BYTE.fullmatch(text):
        return bytes.fromhex(lone[1])
    return text.replace("\u2581", " ").encode()


def _well_formed(text: str) -> str:
    """The text without lone surrogates, which JSON can carry and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
