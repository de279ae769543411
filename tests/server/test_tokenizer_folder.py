"""Tokenizers from Hugging Face folders, built here from small vocabularies."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from server.model_store import ResolvedModel
from server.tokenizer import BYTE_CHARACTERS, Tokenizer, TokenizerError
from server.tokenizer_loader import load_tokenizer

CORPUS = ["the quick brown fox jumps over the lazy dog", "pack my box with five dozen jugs"] * 4


def byte_level(*, alphabet: list[str]) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<|end|>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens([AddedToken("<|start|>", normalized=True)])
    backend.add_tokens(["<think>", "<|user|>"])
    return backend


def sentencepiece_style() -> tokenizers.Tokenizer:
    """As Llama 2: U+2581 for blanks, one in front, and bytes for what is not in the vocabulary."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{b:02X}>": 3 + b for b in range(256)}
    for piece in ("\u2581", "a", "b", "ab", "\u2581ab"):
        vocab[piece] = len(vocab)
    merges = [("a", "b"), ("\u2581", "ab")]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return backend


def save(folder: Path, backend: tokenizers.Tokenizer, **files: Any) -> ResolvedModel:
    backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return ResolvedModel(str(folder), "hf", folder, folder.name)


@pytest.fixture
def whole(tmp_path: Path) -> Tokenizer:
    backend = byte_level(alphabet=list(BYTE_CHARACTERS.values()))
    return load_tokenizer(save(tmp_path, backend))


def test_ids_are_the_packages_own(tmp_path: Path) -> None:
    backend = byte_level(alphabet=list(BYTE_CHARACTERS.values()))
    tokenizer = load_tokenizer(save(tmp_path, backend))
    for text in ("the quick fox", "<|start|>box<|end|>", "<think>世界</think> 12", "  \n é"):
        assert tokenizer.encode(text) == backend.encode(text).ids
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_protected_text_is_mere_text(whole: Tokenizer) -> None:
    text = "<|start|>the <think><|end|><|user|>"
    ids = whole.encode(whole.protect(text))
    assert not any(map(whole.is_special, ids))
    assert whole.decode(ids) == text
    assert "<|user|>" not in map(whole.token_text, ids)
    assert "<think>" in map(whole.token_text, ids)


def test_a_missing_byte_is_dropped_and_is_no_control_token(tmp_path: Path) -> None:
    """The unknown token of this folder is ``<|end|>``, and a text must not be able to write it."""
    alphabet = [char for byte, char in BYTE_CHARACTERS.items() if byte != 0x04]
    tokenizer = load_tokenizer(save(tmp_path, byte_level(alphabet=alphabet)))
    ids = tokenizer.encode("the\x04 fox")
    assert not any(map(tokenizer.is_special, ids))
    assert tokenizer.decode(ids) == "the fox"
    assert tokenizer.decode(tokenizer.encode("<|start|>\x04<think>"), False) == "<|start|><think>"


def test_what_the_folder_says_of_itself(tmp_path: Path) -> None:
    backend = byte_level(alphabet=list(BYTE_CHARACTERS.values()))
    model = save(
        tmp_path,
        backend,
        tokenizer_config={
            "bos_token": {"content": "<|start|>"},
            "eos_token": "<|end|>",
            "pad_token": None,
            "chat_template": "{{ messages }}",
        },
        generation_config={"eos_token_id": [0, 5]},
        config={"eos_token_id": 5},
    )
    tokenizer = load_tokenizer(model)
    assert tokenizer.bos_id == backend.token_to_id("<|start|>")
    assert tokenizer.eos_ids == (0, 5)
    assert tokenizer.chat_template == "{{ messages }}"
    assert tokenizer.vocab_size == backend.get_vocab_size()
    expected = {"bos_token": "<|start|>", "eos_token": "<|end|>"}
    assert tokenizer.vocabulary.special_tokens == expected


@pytest.mark.parametrize(("add_bos", "present"), [(True, True), (False, False), (None, False)])
def test_add_bos_token(tmp_path: Path, add_bos: bool | None, present: bool) -> None:
    backend = byte_level(alphabet=list(BYTE_CHARACTERS.values()))
    config = {"bos_token": "<|start|>", "add_bos_token": add_bos}
    tokenizer = load_tokenizer(save(tmp_path, backend, tokenizer_config=config))
    assert (tokenizer.encode("fox")[0] == tokenizer.bos_id) == present


def test_the_template_file_goes_before_the_configuration(tmp_path: Path) -> None:
    backend = byte_level(alphabet=list(BYTE_CHARACTERS.values()))
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    model = save(tmp_path, backend, tokenizer_config={"chat_template": named})
    assert load_tokenizer(model).chat_template == "D"
    (tmp_path / "chat_template.jinja").write_text("J")
    assert load_tokenizer(model).chat_template == "J"


def test_a_long_prompt_is_not_truncated(tmp_path: Path) -> None:
    backend = byte_level(alphabet=list(BYTE_CHARACTERS.values()))
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    tokenizer = load_tokenizer(save(tmp_path, backend))
    assert tokenizer.decode(tokenizer.encode("the lazy dog " * 5)) == "the lazy dog " * 5
    assert tokenizer.decode(tokenizer.encode("a"), skip_special_tokens=False) == "a"


class TestSentencepieceStyle:
    @pytest.fixture
    def tokenizer(self, tmp_path: Path) -> Tokenizer:
        config = {"bos_token": "<s>", "eos_token": "</s>"}
        return load_tokenizer(save(tmp_path, sentencepiece_style(), tokenizer_config=config))

    def test_ids_and_begin_of_sequence(self, tokenizer: Tokenizer) -> None:
        assert tokenizer.encode("ab ab") == sentencepiece_style().encode("ab ab").ids
        assert tokenizer.encode("ab")[0] == tokenizer.bos_id == 1

    def test_bytes_of_pieces(self, tokenizer: Tokenizer) -> None:
        ids = tokenizer.encode("ab é", add_special_tokens=False)
        pieces = [tokenizer.token_bytes(i) for i in ids]
        assert pieces == [b" ab", b" ", b"\xc3", b"\xa9"]

    def test_the_leading_blank_of_a_continuation_stays(self, tokenizer: Tokenizer) -> None:
        assert tokenizer.decode(tokenizer.encode("ab")) == " ab"

    def test_protected_text_is_mere_text(self, tokenizer: Tokenizer) -> None:
        ids = tokenizer.encode(tokenizer.protect("ab<s></s>"), add_special_tokens=False)
        assert not any(map(tokenizer.is_special, ids))
        assert tokenizer.decode(ids) == " ab<s></s>"


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (None, "no tokenizer.json"),
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ('{"model": {"type": "Unigram", "vocab": []}}', "'Unigram'"),
        ('{"version": "1.0"}', "'model'"),
        ('{"model": {"merges": []}, "decoder": {"type": "WordPiece"}}', "WordPiece"),
        ('{"model": {"type": "BPE", "merges": []}, "decoder": {"type": "ByteLevel"}}', "vocab"),
        ('{"model": {"vocab": {"a": 0}, "merges": 1}, "decoder": {"type": "ByteLevel"}}', "json"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_place(
    tmp_path: Path, content: str | None, named: str
) -> None:
    folder = tmp_path / "some-model"
    folder.mkdir()
    if content is not None:
        (folder / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match=named) as refusal:
        load_tokenizer(ResolvedModel("m", "hf", folder, "m"))
    assert "some-model" in str(refusal.value)
