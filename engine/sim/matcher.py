"""Finding stop strings in the byte text of the hash model, whose every token is one byte."""

from collections.abc import Sequence
from typing import Final


class StopSearch:
    """Looks at output tokens one by one for the first stop string that is complete.

    A stop string that is complete before ``min_tokens`` tokens exist does not count (B92), as in
    the server's detokenizer. At the same token the string named first wins.
    """

    def __init__(self, stops: Sequence[bytes], min_tokens: int) -> None:
        self._stops: Final = tuple(stops)
        self._min_tokens: Final = min_tokens
        self._text = bytearray()
        self._tokens = 0

    def push(self, tokens: Sequence[int]) -> tuple[int, str] | None:
        """The number of tokens that complete a stop string, and the string; None so far."""
        for token in tokens:
            self._tokens += 1
            if token > 255:
                continue  # a special token has no text
            self._text.append(token)
            for stop in self._stops:
                if self._tokens >= self._min_tokens and self._text.endswith(stop):
                    return self._tokens, stop.decode("latin-1")
        return None
