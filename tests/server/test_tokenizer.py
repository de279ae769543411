"""Tokenizers: the byte tokenizer, GGUF vocabularies, and the default model's properties."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from gguf import GGUFWriter
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, models, pre_tokenizers

from server.gguf_metadata import GgufError, read_metadata
from server.model_store import ResolvedModel, default_cache_dir, resolve
from server.tokenizer import (
    BYTE_CHARACTERS,
    MARKER,
    ByteTokenizer,
    Tokenizer,
    TokenizerError,
    Vocabulary,
    unprotect,
)
from server.tokenizer_loader import load_tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
MERGES = ["a b", "c d", "ab cd", "! !", "Ġ ab"]
CONTROL_TEXTS = ["<|end|>", "<s>", "<|start|>"]


def text_without_marker() -> st.SearchStrategy[str]:
    return st.text(st.characters(exclude_characters=MARKER, exclude_categories=["Cs"]))


def write_gguf(path: Path, *, missing: Sequence[int] = (), **metadata: Any) -> ResolvedModel:
    """A GGUF file with a tiny byte-level vocabulary, and no tensors."""
    tokens = [char for byte, char in BYTE_CHARACTERS.items() if byte not in missing]
    tokens += [merge.replace(" ", "") for merge in MERGES]
    types = [NORMAL] * len(tokens) + [CONTROL] * len(CONTROL_TEXTS) + [USER_DEFINED] * 3
    tokens += [*CONTROL_TEXTS, "<tool>", "<|user|>", "<end_of_turn>"]
    if "control" in metadata:
        types[tokens.index(metadata["control"])] = CONTROL
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model(str(metadata.get("model", "gpt2")))
    if pre := metadata.get("pre", "gpt-2"):
        writer.add_tokenizer_pre(str(pre))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(tokens.index("<s>"))
    writer.add_eos_token_id(tokens.index("<|end|>"))
    if "add_bos" in metadata:
        writer.add_add_bos_token(bool(metadata["add_bos"]))
    writer.add_chat_template("{{ bos_token }}{{ messages[0].content }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return ResolvedModel(str(path), "gguf", path, path.stem)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tiny vocabulary that lacks the bytes 0x04 and 0xF1."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return load_tokenizer(write_gguf(path, missing=[0x04, 0xF1]))


@pytest.fixture(scope="module")
def smollm() -> Tokenizer:
    return load_tokenizer(resolve("smollm2-135m", default_cache_dir()))


def texts_of(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    return [tokenizer.token_text(i) for i in ids]


class TestByteTokenizer:
    tokenizer = ByteTokenizer()

    def test_ids_are_bytes_and_a_plain_prompt_begins_with_bos(self) -> None:
        assert self.tokenizer.encode("aé") == [256, 0x61, 0xC3, 0xA9]
        assert self.tokenizer.encode("aé", add_special_tokens=False) == [0x61, 0xC3, 0xA9]

    def test_no_text_encodes_to_bos_or_eos(self) -> None:
        ids = self.tokenizer.encode("<bos><eos>", add_special_tokens=False)
        assert bytes(ids) == b"<bos><eos>"
        assert self.tokenizer.protect("<bos>") == "<bos>"

    def test_bos_and_eos_are_special(self) -> None:
        assert self.tokenizer.decode([256, 0x61, 257]) == "a"
        assert self.tokenizer.decode([256, 0x61, 257], skip_special_tokens=False) == "<bos>a<eos>"
        assert (self.tokenizer.bos_id, self.tokenizer.eos_ids) == (256, (257,))
        assert self.tokenizer.vocab_size == 258

    @pytest.mark.parametrize("unknown", [-1, 258, 10**9])
    def test_an_unknown_id_has_no_bytes(self, unknown: int) -> None:
        assert self.tokenizer.token_bytes(unknown) == b""

    @given(text_without_marker())
    def test_round_trip(self, text: str) -> None:
        assert self.tokenizer.decode(self.tokenizer.encode(text)) == text

    def test_the_hash_model_has_it(self) -> None:
        assert isinstance(load_tokenizer(resolve("hash:W2", Path())), ByteTokenizer)


class TestGguf:
    def test_merges_and_word_splits(self, tiny: Tokenizer) -> None:
        assert texts_of(tiny, tiny.encode("abcd ab!!")) == ["abcd", " ab", "!!"]

    def test_control_tokens_are_recognised_in_a_plain_prompt(self, tiny: Tokenizer) -> None:
        assert texts_of(tiny, tiny.encode("ab<|end|>ab")) == ["ab", "<|end|>", "ab"]

    def test_user_defined_tokens_are_recognised_and_are_not_special(self, tiny: Tokenizer) -> None:
        ids = tiny.encode(tiny.protect("<tool>ab"))
        assert texts_of(tiny, ids) == ["<tool>", "ab"]
        assert tiny.decode(ids) == "<tool>ab"

    def test_what_looks_like_a_control_token_cannot_be_forged(self, tiny: Tokenizer) -> None:
        """Some files call the tokens of their chat turns user-defined."""
        (user,) = tiny.encode("<|user|>")
        assert not tiny.is_special(user)
        assert user not in tiny.encode(tiny.protect("<|user|>"))

    def test_a_token_that_ends_a_generation_is_special(self, tiny: Tokenizer) -> None:
        (end,) = tiny.encode("<end_of_turn>")
        assert tiny.is_special(end)
        assert end not in tiny.encode(tiny.protect("<end_of_turn>"))

    def test_special_tokens_are_skipped_when_decoding(self, tiny: Tokenizer) -> None:
        ids = tiny.encode("<s>ab<|end|>")
        assert tiny.decode(ids) == "ab"
        assert tiny.decode(ids, skip_special_tokens=False) == "<s>ab<|end|>"

    def test_a_byte_that_is_not_in_the_vocabulary_is_dropped(self, tiny: Tokenizer) -> None:
        assert tiny.decode(tiny.encode("a\x04b")) == "ab"
        assert "\ufffd" in tiny.decode(tiny.encode("\U00040000"))  # needs 0xF1; the rest stays

    def test_merges_do_not_reach_across_a_dropped_byte(self, tiny: Tokenizer) -> None:
        assert texts_of(tiny, tiny.encode("!\x04!")) == ["!", "!"]

    def test_lone_surrogates_count_as_replacement_characters(self, tiny: Tokenizer) -> None:
        assert tiny.decode(tiny.encode("a\ud800b")) == "a\ufffdb"

    def test_what_the_file_says_of_itself(self, tiny: Tokenizer) -> None:
        (bos,) = tiny.encode("<s>")
        (end,) = tiny.encode("<|end|>")
        assert tiny.bos_id == bos
        assert tiny.eos_ids == (end, *tiny.encode("<end_of_turn>"))
        assert tiny.chat_template == "{{ bos_token }}{{ messages[0].content }}"
        assert tiny.vocabulary.special_tokens == {"bos_token": "<s>", "eos_token": "<|end|>"}
        assert tiny.vocab_size == 254 + len(MERGES) + 6

    @pytest.mark.parametrize(
        ("pre", "add_bos", "begins_with_bos"),
        [
            ("gpt-2", None, False),
            ("gpt-2", True, True),
            ("llama-bpe", None, True),
            ("llama-bpe", False, False),
        ],
    )
    def test_begin_of_sequence(
        self, tmp_path: Path, pre: str, add_bos: bool | None, begins_with_bos: bool
    ) -> None:
        facts: dict[str, Any] = {"pre": pre}
        if add_bos is not None:
            facts["add_bos"] = add_bos
        tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", **facts))
        assert (tokenizer.encode("a")[0] == tokenizer.bos_id) == begins_with_bos
        assert tokenizer.bos_id not in tokenizer.encode("a", add_special_tokens=False)

    @pytest.mark.parametrize(
        ("pre", "text", "expected"),
        [
            ("gpt-2", "abcd12345", ["abcd", "1", "2", "3", "4", "5"]),
            ("llama-bpe", "!abcd", ["!", "abcd"]),
            ("qwen2", "!abcd", ["!", "abcd"]),
            ("smollm", "ab!!ab", ["ab", "!!", "ab"]),
            ("default", "abcd!!", ["abcd", "!!"]),
            ("", "abcd!!", ["abcd", "!!"]),
        ],
    )
    def test_pre_tokenizers(self, tmp_path: Path, pre: str, text: str, expected: list[str]) -> None:
        tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", pre=pre))
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert texts_of(tokenizer, ids) == expected

    @pytest.mark.parametrize(
        ("facts", "named"),
        [({"pre": "tekken"}, "tekken"), ({"model": "llama"}, "'llama'"), ({"model": "t5"}, "'t5'")],
    )
    def test_unsupported_vocabularies_are_refused_by_name(
        self, tmp_path: Path, facts: dict[str, Any], named: str
    ) -> None:
        model = write_gguf(tmp_path / "other.gguf", **facts)
        with pytest.raises(TokenizerError, match=named) as refusal:
            load_tokenizer(model)
        assert "other.gguf" in str(refusal.value)

    def test_metadata_is_what_the_writer_wrote(self, tmp_path: Path) -> None:
        path = tmp_path / "m.gguf"
        writer = GGUFWriter(path, "llama")
        values = {
            "uint8": 200, "int8": -3, "uint16": 60_000, "int16": -300, "uint32": 1 << 31,
            "int32": -70_000, "uint64": 1 << 60, "int64": -(1 << 60), "float32": 0.5,
            "float64": 0.1, "bool": True, "string": "世界",
        }  # fmt: skip
        for kind, value in values.items():
            getattr(writer, f"add_{kind}")(f"test.{kind}", value)
        writer.add_array("test.ints", [1, 2, 3])
        writer.add_array("test.texts", ["a", "", "ü"])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        read = read_metadata(path)
        assert {key: read[f"test.{key}"] for key in values} == values
        assert read["test.ints"] == [1, 2, 3]
        assert read["test.texts"] == ["a", "", "ü"]

    def test_a_truncated_file_is_an_error_wherever_it_ends(self, tmp_path: Path) -> None:
        model = write_gguf(tmp_path / "m.gguf")
        assert model.path is not None
        whole = model.path.read_bytes()
        part = tmp_path / "part.gguf"
        for size in [*range(64), *range(64, len(whole), 97)]:
            part.write_bytes(whole[:size])
            with pytest.raises(GgufError, match=r"part\.gguf"):
                read_metadata(part)


class TestProtect:
    """A protected text encodes to no control token, wherever a template puts it."""

    @given(
        st.lists(st.sampled_from(["<", "|", "end", "|>", "<|end|>", "<s>", "s", ">", "ab", " "]))
    )
    def test_no_control_token_comes_out_of_pieces(self, tiny: Tokenizer, parts: list[str]) -> None:
        text = "".join(parts)
        ids = tiny.encode("".join(map(tiny.protect, parts)))
        assert not any(map(tiny.is_special, ids))
        assert tiny.decode(ids) == text

    @given(text_without_marker())
    def test_protecting_can_be_undone(self, tiny: Tokenizer, text: str) -> None:
        assert unprotect(tiny.protect(text)) == text

    def test_ordinary_tags_stay_findable(self, tiny: Tokenizer) -> None:
        assert tiny.protect("a</think>b<tool_call>") == "a</think>b<tool_call>"

    def test_removing_a_tag_from_inside_forges_nothing(self, tiny: Tokenizer) -> None:
        for text in ("<</think>|end|>", "<|e</think>nd|>", "<</think>s>", "<s</think>>"):
            forged = tiny.protect(text).replace("</think>", "")
            assert not any(map(tiny.is_special, tiny.encode(forged)))

    def test_control_tokens_that_merges_can_spell_are_refused(self, tmp_path: Path) -> None:
        model = write_gguf(tmp_path / "m.gguf", control="abcd")
        with pytest.raises(TokenizerError, match="'abcd'"):
            load_tokenizer(model)

    def test_one_character_control_tokens_are_refused(self) -> None:
        class Reckless(ByteTokenizer):
            def __init__(self) -> None:
                Tokenizer.__init__(self, Vocabulary(vocab_size=1, control_texts=("<",)))

        with pytest.raises(TokenizerError, match="'<'"):
            Reckless()


@pytest.mark.model
class TestDefaultModel:
    """SmolLM2's tokenizer; its ids are in test_tokenizer_golden.py."""

    @pytest.fixture(scope="class")
    @classmethod
    def by_the_rule(cls) -> tokenizers.Tokenizer:
        """The rule as the design states it, built without the loader's expressions."""
        path = resolve("smollm2-135m", default_cache_dir()).path
        assert path is not None
        metadata = read_metadata(path)
        tokens, merges = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
        assert isinstance(tokens, list)
        assert isinstance(merges, list)
        vocab = {str(token): i for i, token in enumerate(tokens)}
        pairs = [(str(merge).split(" ")[0], str(merge).split(" ")[1]) for merge in merges]
        rule = tokenizers.Tokenizer(models.BPE(vocab, pairs))
        rule.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
        return rule

    @given(text_without_marker())
    def test_ids_follow_the_rule(
        self, smollm: Tokenizer, by_the_rule: tokenizers.Tokenizer, text: str
    ) -> None:
        # Where bytes were dropped, the rule alone would merge across the gap; llama.cpp does not.
        if smollm.decode(smollm.encode(text)) == text:
            assert smollm.encode(text) == by_the_rule.encode(text).ids

    @given(st.text(st.characters(codec="latin-1", exclude_categories=["Cc"])))
    def test_round_trip(self, smollm: Tokenizer, text: str) -> None:
        assert smollm.decode(smollm.encode(text), skip_special_tokens=False) == text

    def test_exactly_21_bytes_are_missing(self, smollm: Tokenizer) -> None:
        single = {smollm.token_bytes(i) for i in range(smollm.vocab_size)}
        missing = [byte for byte in range(256) if bytes([byte]) not in single]
        control = [0x04, 0x06, 0x13, 0x14, 0x16, 0x1D]
        assert missing == [*control, 0xC0, 0xC1, 0xF1, 0xF2, *range(0xF5, 0x100)]

    def test_what_it_says_of_itself(self, smollm: Tokenizer) -> None:
        assert smollm.vocab_size == 49_152
        assert texts_of(smollm, smollm.eos_ids) == ["<|im_end|>", "<|endoftext|>"]
        assert smollm.bos_id == 1
        assert smollm.encode("Hi")[0] != 1  # and yet it wants none in front of a prompt
        assert "<|im_start|>" in (smollm.chat_template or "")

    def test_encoding_releases_the_interpreter_lock(self, smollm: Tokenizer) -> None:
        thread = threading.Thread(target=smollm.encode, args=("some words 世界 " * 60_000,))
        thread.start()
        turns = 0
        while thread.is_alive():  # with the lock held, this loop would see one or two turns
            thread.join(0.001)
            turns += 1
        assert turns > 20

    def test_many_threads_at_once(self, smollm: Tokenizer) -> None:
        texts = [f"Text number {i}: 世界 <|im_end|>" * 50 for i in range(8)]
        expected = [smollm.encode(text) for text in texts]
        results: dict[int, list[list[int]]] = {}

        def work(worker: int) -> None:
            results[worker] = [smollm.encode(text) for text in texts]

        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert list(results.values()) == [expected] * 8


def test_word_splits_are_those_of_the_packages_byte_level_splitter() -> None:
    """GPT-2's expression is built into ``ByteLevel``; ours is spelled out, and must be the same."""
    from server.tokenizer_loader import _GPT2_WORDS

    ours = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_GPT2_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    theirs = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)

    @given(st.text())
    def same(text: str) -> None:
        assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text)

    same()


def test_word_splits_are_those_of_the_original_models() -> None:
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    from server.tokenizer_loader import _PRE_TOKENIZERS

    assert _PRE_TOKENIZERS["qwen2"] == (PRETOKENIZE_REGEX,)
    llama3 = PRETOKENIZE_REGEX.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
    assert _PRE_TOKENIZERS["llama-bpe"] == (llama3,)
