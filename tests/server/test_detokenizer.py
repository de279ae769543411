"""Incremental text (B116) and stop strings (B117, B92), against the naive way of doing each."""

import itertools
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.detokenizer import (
    MAX_STOP_LENGTH,
    IncrementalDetokenizer,
    OutputText,
    StopHit,
    StopMatcher,
)
from server.tokenizer import ByteTokenizer, Tokenizer, Vocabulary

BYTES = ByteTokenizer()
STOPS = ("own fox", "世界", "\n\n")


class Pieces(Tokenizer):
    """A vocabulary made for one test: token i is the i-th of these byte strings."""

    def __init__(self, pieces: Sequence[bytes], special: Sequence[int] = ()) -> None:
        super().__init__(Vocabulary(vocab_size=len(pieces)))
        self._pieces = pieces
        self._special = special

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        raise NotImplementedError

    def token_bytes(self, token_id: int) -> bytes:
        return self._pieces[token_id]

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special


def cut(data: bytes, borders: Sequence[int]) -> list[bytes]:
    """``data`` in pieces, cut at these places."""
    ends = [*sorted({border for border in borders if 0 < border < len(data)}), len(data)]
    return [data[start:end] for start, end in itertools.pairwise([0, *ends])]


def all_cuts(data: bytes, cuts: int) -> Iterator[list[bytes]]:
    """``data`` cut at every choice of so many places, and byte by byte."""
    for borders in itertools.combinations(range(1, len(data)), cuts):
        yield cut(data, borders)
    yield cut(data, range(len(data)))


def streamed(pieces: Sequence[bytes]) -> list[str]:
    detokenizer = IncrementalDetokenizer(Pieces(pieces))
    return [*(detokenizer.push([i]) for i in range(len(pieces))), detokenizer.finish()]


class TestIncrementalDetokenizer:
    @pytest.mark.parametrize("text", ["A 世a", "A 世a…é😀\n", "\u200d👩‍💻"])
    def test_b116_every_split_streams_the_text_of_the_full_decode(self, text: str) -> None:
        for pieces in all_cuts(text.encode(), cuts=3):
            assert "".join(streamed(pieces)) == text

    def test_a_character_appears_with_the_token_that_completes_it(self) -> None:
        assert streamed([b"A \xe4", b"\xb8", b"\x96a"]) == ["A ", "", "世a", ""]

    def test_an_unfinished_character_becomes_one_replacement_at_the_end(self) -> None:
        assert streamed([b"a\xe4", b"\xb8"]) == ["a", "", "\ufffd"]

    def test_invalid_bytes_do_not_wait(self) -> None:
        assert streamed([b"\xff", b"a", b"\xe4", b"b"]) == ["\ufffd", "a", "", "\ufffdb", ""]

    @given(st.binary(max_size=24), st.lists(st.integers(1, 23), max_size=12))
    def test_any_bytes_in_any_pieces(self, data: bytes, borders: list[int]) -> None:
        assert "".join(streamed(cut(data, borders))) == data.decode("utf-8", "replace")

    @given(st.text(), st.lists(st.integers(1, 60)))
    def test_any_text_in_any_groups_of_tokens(self, text: str, borders: list[int]) -> None:
        detokenizer = IncrementalDetokenizer(BYTES)
        deltas = [detokenizer.push(list(group)) for group in cut(text.encode(), borders)]
        assert "".join(deltas) == text
        assert detokenizer.finish() == ""

    def test_special_tokens_are_skipped_even_inside_a_character(self) -> None:
        pieces = [b"\xe4\xb8", b"<eos>", b"\x96"]
        for skip, text in ((True, "世"), (False, "\ufffd<eos>\ufffd")):
            tokenizer = Pieces(pieces, special=[1])
            detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
            assert detokenizer.push([0, 1, 2]) + detokenizer.finish() == text
            assert tokenizer.decode([0, 1, 2], skip) == text


def naive(
    pieces: Sequence[bytes], stops: Sequence[str], include: bool, min_tokens: int
) -> tuple[str, StopHit | None]:
    """The output's text and stop, from the whole of it: try every place where a match can end."""
    text = b"".join(pieces).decode()
    for end in range(1, len(text) + 1):
        size = len(text[:end].encode())
        tokens = next(n for n in range(len(pieces) + 1) if len(b"".join(pieces[:n])) >= size)
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found and tokens >= min_tokens:
            matched = max(found, key=len)
            kept = end if include else end - len(matched)
            return text[:kept], StopHit(matched, tokens)
    return text, None


def run(
    pieces: Sequence[bytes],
    stops: Sequence[str],
    *,
    include: bool = False,
    min_tokens: int = 0,
    group: int = 1,
) -> tuple[list[str], StopHit | None]:
    """All deltas, and the stop; tokens arrive ``group`` at a time."""
    output = OutputText(
        Pieces(pieces), stops=stops, include_stop=include, min_new_tokens=min_tokens
    )
    deltas, hits = [], []
    for start in range(0, len(pieces), group):
        text, stop = output.push(range(start, min(start + group, len(pieces))))
        deltas.append(text)
        hits.append(stop)
    text, stop = output.finish()
    found = [hit for hit in [*hits, stop] if hit]
    assert len(found) <= 1
    assert output.stop == (found[0] if found else None)
    return [*deltas, text], output.stop


def chars(text: str) -> list[bytes]:
    return [char.encode() for char in text]


class TestStopStrings:
    @pytest.mark.parametrize("include", [False, True])
    @pytest.mark.parametrize("stop", STOPS)
    def test_b117_all_token_splits(self, stop: str, include: bool) -> None:
        text = f"a brown {stop}, 世b"
        for pieces in all_cuts(text.encode(), cuts=2):
            deltas, hit = run(pieces, [stop], include=include)
            expected, expected_hit = naive(pieces, [stop], include, 0)
            assert ("".join(deltas), hit) == (expected, expected_hit)

    def test_a_false_start_is_released_with_the_token_that_ends_it(self) -> None:
        deltas, hit = run([b"br", b"own", b" fo", b"g", b"s"], ["own fox"])
        assert (deltas, hit) == (["br", "", "", "own fog", "s", ""], None)

    def test_a_false_start_can_be_the_beginning_of_the_real_one(self) -> None:
        assert run(chars("aaab!"), ["aab"]) == (["", "", "a", "", "", ""], StopHit("aab", 4))

    def test_held_text_is_released_at_the_end(self) -> None:
        assert run([b"br", b"own fo"], ["own fox"]) == (["br", "", "own fo"], None)

    @pytest.mark.parametrize(("include", "text"), [(False, "br"), (True, "brown fox")])
    def test_a_stop_at_the_very_last_token(self, include: bool, text: str) -> None:
        deltas, hit = run([b"brown", b" fox"], ["own fox"], include=include)
        assert ("".join(deltas), hit) == (text, StopHit("own fox", 2))

    @pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "a\n\n")])
    def test_text_behind_a_stop_in_the_same_token_is_dropped(
        self, include: bool, text: str
    ) -> None:
        deltas, hit = run([b"a\n\nbc", b"d"], ["\n\n"], include=include)
        assert (deltas, hit) == ([text, "", ""], StopHit("\n\n", 1))

    def test_the_match_that_is_complete_first_wins(self) -> None:
        assert run([b"xabcdy"], ["abcd", "bc"]) == (["xa", ""], StopHit("bc", 1))

    def test_of_matches_that_end_together_the_longest_wins(self) -> None:
        for stops in (["fox", "own fox"], ["own fox", "fox"]):
            assert run([b"brown fox"], stops) == (["br", ""], StopHit("own fox", 1))

    def test_the_unfinished_character_at_the_end_counts(self) -> None:
        assert run([b"ab\xe4"], ["b\ufffd"]) == (["a", ""], StopHit("b\ufffd", 1))

    def test_tokens_are_counted_one_by_one_when_they_arrive_together(self) -> None:
        _, hit = run([b"a", b"\n", b"\n", b"b", b"c"], ["\n\n"], group=5)
        assert hit == StopHit("\n\n", 3)

    def test_tokens_behind_a_stop_change_nothing(self) -> None:
        output = OutputText(BYTES, stops=["b"])
        assert output.push(list(b"abcab")) == ("a", StopHit("b", 2))
        assert output.push(list(b"xyz")) == ("", None)
        assert output.finish() == ("", None)
        assert output.tokens == 2

    def test_without_stop_strings_nothing_is_held(self) -> None:
        assert run([b"own", b" fo"], []) == (["own", " fo", ""], None)

    @given(
        pieces=st.lists(
            st.sampled_from(["a", "b", "ab", "世", "世a", "\n", "aab", ""]), max_size=12
        ),
        borders=st.lists(st.integers(0, 30), max_size=12),
        stops=st.lists(st.text("ab世\n", min_size=1, max_size=4), min_size=1, max_size=3),
        include=st.booleans(),
        min_tokens=st.integers(0, 8),
        group=st.integers(1, 4),
    )
    def test_any_text_is_matched_as_the_naive_way_does(
        self,
        pieces: list[str],
        borders: list[int],
        stops: list[str],
        include: bool,
        min_tokens: int,
        group: int,
    ) -> None:
        tokens = cut("".join(pieces).encode(), borders)
        deltas, hit = run(tokens, stops, include=include, min_tokens=min_tokens, group=group)
        assert ("".join(deltas), hit) == naive(tokens, stops, include, min_tokens)

    @given(
        text=st.text("ab\n", max_size=20),
        stops=st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=3),
    )
    def test_no_more_is_held_back_than_could_be_a_stop(self, text: str, stops: list[str]) -> None:
        output = OutputText(BYTES, stops=stops)
        sent = ""
        for end, char in enumerate(text, start=1):
            delta, hit = output.push([ord(char)])
            sent += delta
            if hit:
                break
            starts = {stop[:size] for stop in stops for size in range(len(stop))}
            held = max((start for start in starts if text[:end].endswith(start)), key=len)
            assert sent + held == text[:end]


class TestMinimum:
    """B92: no stop string ends the output before ``min_new_tokens`` tokens."""

    def test_a_match_before_the_minimum_is_no_match(self) -> None:
        pieces = [b"a", b"\n", *[b"b"] * 17, b"c", b"\n", b"d"]
        deltas, hit = run(pieces, ["\n"], min_tokens=20)
        assert ("".join(deltas), hit) == ("a\n" + "b" * 17 + "c", StopHit("\n", 21))

    @pytest.mark.parametrize(("min_tokens", "stops"), [(2, True), (3, False)])
    def test_a_match_that_is_complete_with_the_last_required_token_counts(
        self, min_tokens: int, stops: bool
    ) -> None:
        _, hit = run([b"a", b"\n", b"b"], ["\n"], min_tokens=min_tokens)
        assert (hit is not None) == stops

    def test_a_match_may_begin_before_the_minimum(self) -> None:
        assert run(chars("a\n\nb"), ["\n\n"], min_tokens=3)[1] == StopHit("\n\n", 3)

    def test_an_ignored_match_can_be_the_beginning_of_the_next(self) -> None:
        deltas, hit = run(chars("\n\n\nb"), ["\n\n"], min_tokens=3)
        assert ("".join(deltas), hit) == ("\n", StopHit("\n\n", 3))


class TestLimits:
    @pytest.mark.parametrize(
        "stops", [["x"] * 33, [""], ["x" * (MAX_STOP_LENGTH + 1)]], ids=["many", "empty", "long"]
    )
    def test_too_many_or_too_long_stop_strings_are_refused(self, stops: list[str]) -> None:
        with pytest.raises(ValueError, match=r"^stop: "):
            StopMatcher(stops)

    def test_the_largest_allowed(self) -> None:
        stops = [f"{i:02}" + "x" * (MAX_STOP_LENGTH - 2) for i in range(32)]
        assert run([b"a" + stops[-1].encode()], stops) == (["a", ""], StopHit(stops[-1], 1))

    def test_the_work_for_a_character_does_not_grow_with_the_text_held_back(self) -> None:
        """The worst text for a naive search: every character nearly completes a match."""
        comparisons = 0

        class Char(str):
            __slots__ = ()

            def __eq__(self, other: object) -> bool:
                nonlocal comparisons
                comparisons += 1
                return str.__eq__(self, other)

            def __ne__(self, other: object) -> bool:
                nonlocal comparisons
                comparisons += 1
                return str.__ne__(self, other)

            __hash__ = str.__hash__

        from server.detokenizer import _Cursor

        cursor = _Cursor("a" * 500 + "b")
        for _ in range(5_000):
            cursor.advance(Char("a"))
        assert comparisons <= 4 * 5_000
