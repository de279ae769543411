"""Tokenizers from model files: GGUF metadata, or the ``tokenizer.json`` of a Hugging Face folder.

Exactness goes before coverage. A vocabulary whose rules we do not follow to the letter is refused
by name, because a tokenizer that is almost right makes a model that is almost right.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken, Regex, models, pre_tokenizers

from server.gguf_metadata import GgufError, Value, read_metadata
from server.model_store import ResolvedModel
from server.tokenizer import (
    BYTE_CHARACTERS,
    NO_TOKEN,
    BpeTokenizer,
    ByteTokenizer,
    PieceStyle,
    Tokenizer,
    TokenizerError,
    Vocabulary,
)


def load_tokenizer(model: ResolvedModel) -> Tokenizer:
    """The tokenizer that belongs to a model, in a fraction of a second, or a TokenizerError."""
    if model.path is None:
        return ByteTokenizer()
    try:
        return _from_gguf(model.path) if model.kind == "gguf" else _from_folder(model.path)
    except (GgufError, TokenizerError) as error:
        raise TokenizerError(f"tokenizer of {model.path}: {error}") from error
    except (KeyError, TypeError, AttributeError) as error:  # a file of another shape than expected
        raise TokenizerError(
            f"tokenizer of {model.path}: unexpected contents: {error!r}"
        ) from error


# --- GGUF ---------------------------------------------------------------------------------------

_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEFAULT_WORDS = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]")

_PRE_TOKENIZERS: Mapping[str, tuple[str, ...]] = {
    "default": _DEFAULT_WORDS,
    "gpt-2": (_GPT2_WORDS,),
    "llama-bpe": (_LLAMA3_WORDS,),
    "qwen2": (_LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}"),),
    "smollm": (r"\p{N}", _GPT2_WORDS),
}
"""``tokenizer.ggml.pre``: every expression splits the pieces that those before it made (as in
llama.cpp's ``llama-vocab.cpp``). ``smollm`` amounts to ``Digits(individual_digits=True)`` and
``ByteLevel``."""

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
"""``tokenizer.ggml.token_type``."""

_ENDS_GENERATION: Final = (
    *("<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|end|>"),
    *("<end_of_turn>", "<EOT>"),
)
"""Tokens that end a generation, and are control tokens, even if a file says neither: as llama.cpp,
because there are such files."""

_CONTROL_LOOK = re.compile(r"<\|.*\|>", re.DOTALL)
"""Written like a control token, as turns of a chat are in some vocabularies that do not call them
special: such a token shows in output, and must not be forged in a message."""


def _from_gguf(path: Path) -> BpeTokenizer:
    metadata = read_metadata(path)
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise TokenizerError(
            f"tokenizer.ggml.model is {kind!r}; only 'gpt2' (byte-level BPE) is supported. "
            f"Serve the model's Hugging Face folder, whose tokenizer.json says how it splits text"
        )
    pre = str(metadata.get("tokenizer.ggml.pre", "default"))
    if pre not in _PRE_TOKENIZERS:
        supported = ", ".join(_PRE_TOKENIZERS)
        raise TokenizerError(f"tokenizer.ggml.pre is {pre!r}; supported are {supported}")

    tokens = [str(token) for token in _list(metadata, "tokenizer.ggml.tokens")]
    types = _list(metadata, "tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise TokenizerError(f"there are {len(tokens)} tokens and {len(types)} token types")
    special = frozenset(
        i
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (_CONTROL, _UNKNOWN) or token in _ENDS_GENERATION
    )
    written = sorted(i for i in special if tokens[i])
    defined = [i for i, kind in enumerate(types) if kind == _USER_DEFINED and tokens[i]]
    control_like = [i for i in defined if _CONTROL_LOOK.fullmatch(tokens[i])]

    backend = _byte_level_bpe(
        {token: i for i, token in enumerate(tokens)} | {NO_TOKEN: len(tokens)},
        [str(merge) for merge in _list(metadata, "tokenizer.ggml.merges")],
        whole_words=pre == "llama-bpe",
    )
    splits = [pre_tokenizers.Split(Regex(words), "isolated") for words in _PRE_TOKENIZERS[pre]]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.add_tokens([AddedToken(tokens[i], normalized=False) for i in defined])
    backend.add_special_tokens([AddedToken(tokens[i], normalized=False) for i in written])

    ids = {
        name: i
        for name in ("bos", "eos", "eot", "eom", "unknown", "padding")
        if isinstance(i := metadata.get(f"tokenizer.ggml.{name}_token_id"), int)
        and 0 <= i < len(tokens)
    }
    eos = [ids[name] for name in ("eos", "eot", "eom") if name in ids]
    eos += [i for i in written if tokens[i] in _ENDS_GENERATION]
    template = metadata.get("tokenizer.chat_template")
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe") and "bos" in ids
    add_eos = metadata.get("tokenizer.ggml.add_eos_token", False) and "eos" in ids
    short_names = {"unknown": "unk", "padding": "pad"}
    return BpeTokenizer(
        Vocabulary(
            vocab_size=len(tokens),
            bos_id=ids.get("bos"),
            eos_ids=tuple(dict.fromkeys(eos)),
            special_tokens={f"{short_names.get(n, n)}_token": tokens[i] for n, i in ids.items()},
            chat_template=template if isinstance(template, str) else None,
            control_texts=tuple(dict.fromkeys(tokens[i] for i in written + control_like)),
        ),
        backend,
        style="byte-level",
        special_ids=special,
        verbatim_ids=special.union(defined),
        prefix=[ids["bos"]] if add_bos else [],
        suffix=[ids["eos"]] if add_eos else [],
    )


def _list(metadata: Mapping[str, Value], key: str) -> list[Value]:
    value = metadata.get(key, [])
    if not isinstance(value, list):
        raise TokenizerError(f"{key} is not an array")
    return value


def _byte_level_bpe(
    vocab: dict[str, int], merges: Sequence[str], *, whole_words: bool
) -> tokenizers.Tokenizer:
    """``whole_words``: a word that is a token becomes that token without merging (Llama 3)."""
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    try:
        model = models.BPE(vocab, pairs, unk_token=NO_TOKEN, ignore_merges=whole_words)
    except Exception as error:  # the package raises nothing more specific
        raise TokenizerError(f"vocabulary and merges do not fit: {error}") from error
    return tokenizers.Tokenizer(model)


# --- Hugging Face folders -----------------------------------------------------------------------


def _from_folder(folder: Path) -> BpeTokenizer:
    spec = _json(folder / "tokenizer.json")
    if not spec:
        raise TokenizerError("there is no tokenizer.json; convert the tokenizer with transformers")
    model = spec["model"]
    kind = model.get("type", "BPE" if "merges" in model else None)
    if kind != "BPE":
        raise TokenizerError(f"tokenizer.json has a model of type {kind!r}; only BPE is supported")
    style = _style(spec.get("decoder"))
    added: list[dict[str, Any]] = spec.get("added_tokens", [])
    special = frozenset(token["id"] for token in added if token["special"])
    vocab: dict[str, int] = model["vocab"]
    vocab_size = 1 + max([*vocab.values(), *(token["id"] for token in added)])

    spec |= {"truncation": None, "padding": None}  # a prompt is never cut behind the client's back
    control = [t for t in added if t["special"] or _CONTROL_LOOK.fullmatch(t["content"])]
    for token in control:  # looked for in the text as it comes, with its markers
        token["normalized"] = False
    if style == "byte-level" and not vocab.keys() >= set(BYTE_CHARACTERS.values()):
        # Added tokens must be in the vocabulary, too, or the new entry would shift their ids.
        vocab |= {token["content"]: token["id"] for token in added} | {NO_TOKEN: vocab_size}
        model |= {"unk_token": NO_TOKEN, "fuse_unk": False}
    try:
        backend = tokenizers.Tokenizer.from_str(json.dumps(spec))
    except Exception as error:  # the package raises nothing more specific
        raise TokenizerError(f"tokenizer.json: {error}") from error

    config = _json(folder / "tokenizer_config.json")
    texts = _special_texts(config)
    bos_id = backend.token_to_id(texts["bos_token"]) if "bos_token" in texts else None
    prefix, suffix = _around(backend)
    if config.get("add_bos_token") is False:
        prefix = [i for i in prefix if i != bos_id]
    elif config.get("add_bos_token") and bos_id is not None and bos_id not in prefix:
        prefix = [bos_id, *prefix]
    return BpeTokenizer(
        Vocabulary(
            vocab_size=vocab_size,
            bos_id=bos_id,
            eos_ids=_eos_ids(folder, backend, texts.get("eos_token")),
            special_tokens=texts,
            chat_template=_chat_template(folder, config),
            control_texts=tuple(token["content"] for token in control),
        ),
        backend,
        style=style,
        special_ids=special,
        verbatim_ids=frozenset(token["id"] for token in added),
        prefix=prefix,
        suffix=suffix,
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise TokenizerError(f"{path.name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path.name} is not a JSON object")
    return value


def _style(decoder: dict[str, Any] | None) -> PieceStyle:
    steps = [decoder, *decoder.get("decoders", [])] if decoder else []
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return "byte-level"
    if "ByteFallback" in kinds:
        return "sentencepiece"
    raise TokenizerError(f"tokenizer.json has a decoder of type {sorted(kinds)}; not supported")


def _around(backend: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """What the post-processor puts before and behind a text."""
    plain = backend.encode("a", add_special_tokens=False).ids
    full = backend.encode("a").ids
    for start in range(len(full)):
        if full[start : start + len(plain)] == plain:
            return full[:start], full[start + len(plain) :]
    raise TokenizerError("the post-processor of tokenizer.json changes the text's own tokens")


def _special_texts(config: Mapping[str, Any]) -> dict[str, str]:
    texts = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            texts[name] = text
    return texts


def _eos_ids(folder: Path, backend: tokenizers.Tokenizer, eos_text: str | None) -> tuple[int, ...]:
    ids: list[int | None] = [backend.token_to_id(eos_text)] if eos_text else []
    for name in ("generation_config.json", "config.json"):
        value = _json(folder / name).get("eos_token_id")
        ids += value if isinstance(value, list) else [value]
    return tuple(dict.fromkeys(i for i in ids if i is not None))


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several by name
        template = {each["name"]: each["template"] for each in template}.get("default")
    return template if isinstance(template, str) else None
