"""Token ids of one output stream to text, piece by piece, and the search for stop strings in it.

Two rules hold for every way in which the tokens arrive, one by one or many at once:

* the pieces in a row are exactly the text of all tokens decoded at once. A character that spans
  tokens is held back until it is complete, and what was handed out is never taken back;
* nothing of a stop string that ends the output is handed out. Text that could be the beginning of
  one is held back until that is decided, or the output ends.

The cost of a token does not depend on how much text came before it.
"""

import codecs
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from server.tokenizer import Tokenizer

MAX_STOPS: Final = 32
MAX_STOP_LENGTH: Final = 1024
"""In characters; also the most text that can be held back."""

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """Text as it becomes certain: ``decode(a + b) == push(a) + push(b) + finish()``."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        # The decoder keeps the bytes of an incomplete character, and turns bytes that can become
        # none into U+FFFD as soon as they cannot, with the same result as decoding all at once.
        self._utf8 = _utf8_decoder("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """The characters that these tokens complete."""
        known = self._tokenizer
        if self._skip_special_tokens:
            token_ids = (i for i in token_ids if not known.is_special(i))
        return self._utf8.decode(b"".join(map(known.token_bytes, token_ids)))

    def finish(self) -> str:
        """U+FFFD if the output ended inside a character, else nothing."""
        return self._utf8.decode(b"", final=True)


class StopHit(NamedTuple):
    """A stop string that ends the output."""

    matched: str
    tokens: int
    """The match is complete with the first so many output tokens."""


class TextDelta(NamedTuple):
    """Text to hand out now, and the stop string that was found, behind which there is no text."""

    text: str
    stop: StopHit | None = None


class StopMatcher:
    """Finds the first stop string in a text that comes in pieces, and holds back what could be one.

    The match that is complete first wins, and of several that end together the longest: so the
    result does not depend on how the text was cut into pieces, and nothing of a stop string leaks
    because another one is a part of it. Where ``include`` is set the matched text is handed out (as
    ``no_stop_trim`` and ``include_stop_str_in_output`` ask), and never anything behind it.

    A match that is complete with fewer than ``min_tokens`` output tokens is no match: the text is
    handed out, and the search goes on. A match may begin before that point and end after it.

    Raises ValueError for more than 32 stop strings, an empty one, or one of over 1,024 characters.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False, min_tokens: int = 0) -> None:
        if len(stops) > MAX_STOPS:
            raise ValueError(f"stop: at most {MAX_STOPS} stop strings, got {len(stops)}")
        for stop in stops:
            if not 0 < len(stop) <= MAX_STOP_LENGTH:
                raise ValueError(
                    f"stop: a stop string has 1 to {MAX_STOP_LENGTH} characters, got {len(stop)}"
                )
        self._include = include
        self._min_tokens = min_tokens
        # Longest first, so that the first of several matches with a common end is the longest.
        self._cursors = [_Cursor(s) for s in sorted(dict.fromkeys(stops), key=len, reverse=True)]
        self._held = ""

    def push(self, text: str, tokens: int) -> TextDelta:
        """More text, which became known with output token number ``tokens`` (the first is 1)."""
        if not self._cursors:
            return TextDelta(text)
        decided = tokens >= self._min_tokens
        pending = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            matched = ""
            for cursor in self._cursors:
                if cursor.advance(char) and not matched:
                    matched = cursor.stop
            if matched and decided:
                self._held = ""
                kept = end if self._include else end - len(matched)
                return TextDelta(pending[:kept], StopHit(matched, tokens))
        sent = len(pending) - max(cursor.matching for cursor in self._cursors)
        self._held = pending[sent:]
        return TextDelta(pending[:sent])

    def finish(self) -> str:
        """The text that was held back, when no more comes."""
        held, self._held = self._held, ""
        return held


class _Cursor:
    """How much of one stop string the text so far ends with (Knuth, Morris and Pratt)."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matching = 0
        """Length of the longest proper beginning of ``stop`` that the text ends with."""
        self._borders = _borders(stop)

    def advance(self, char: str) -> bool:
        """Whether the text with ``char`` ends with the stop string."""
        stop, matching = self.stop, self.matching
        while matching and stop[matching] != char:
            matching = self._borders[matching]
        matching += stop[matching] == char
        complete = matching == len(stop)
        self.matching = self._borders[matching] if complete else matching
        return complete


@lru_cache(maxsize=256)
def _borders(stop: str) -> Sequence[int]:
    """For every length, that of the longest shorter beginning which is an end of that beginning."""
    borders = [0, 0]
    for end in range(1, len(stop)):
        border = borders[end]
        while border and stop[border] != stop[end]:
            border = borders[border]
        borders.append(border + (stop[border] == stop[end]))
    return borders


class OutputText:
    """Tokens in, text out, stop strings found: one for each output stream.

    The token that ended the generation is pushed like any other; by default a special token has no
    text. Leave it out if ``skip_special_tokens`` is off and it shall not show.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        min_new_tokens: int = 0,
        skip_special_tokens: bool = True,
    ) -> None:
        """Raises ValueError as :class:`StopMatcher` does."""
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens)
        self._matcher = StopMatcher(stops, include=include_stop, min_tokens=min_new_tokens)
        self._one_by_one = bool(stops)
        self.tokens = 0
        """Output tokens pushed, not counting any behind a stop string."""
        self.stop: StopHit | None = None

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """The text that these tokens make certain. The engine may be some tokens ahead of a stop
        string that was found: those change nothing."""
        # Every token is matched alone, because a stop string is reported with the token that
        # completes it, however many arrived together.
        groups = ([i] for i in token_ids) if self._one_by_one else (token_ids,)
        texts = []
        for group in groups:
            if self.stop:
                break
            self.tokens += len(group)
            text, self.stop = self._matcher.push(self._detokenizer.push(group), self.tokens)
            texts.append(text)
        return TextDelta("".join(texts), self.stop if texts else None)

    def finish(self) -> TextDelta:
        """What was still held back, when the output ended for another reason. An unfinished
        character becomes U+FFFD now, and even that can complete a stop string."""
        if self.stop:
            return TextDelta("")
        text, self.stop = self._matcher.push(self._detokenizer.finish(), self.tokens)
        return TextDelta(text if self.stop else text + self._matcher.finish(), self.stop)
