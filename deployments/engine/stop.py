"""When a choice ends, and which text may leave before it does."""

from __future__ import annotations

from collections.abc import Sequence


class StopText:
    """Finds stop strings in text that comes in pieces, whichever way the pieces are cut.

    The first match to be complete wins; of two that are complete at the same character, the one that began first.
    Text that may be the beginning of a stop string is held back until it is certain.
    """

    __slots__ = ("_held", "_include", "_stops")

    def __init__(self, stops: Sequence[str], *, include_in_output: bool = False) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._include = include_in_output
        #: Longest end of the text so far that begins a stop string; already out if stop strings are included.
        self._held = ""

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Takes new text; returns the text that may leave and the stop string found, if any.

        With `may_stop` false a match that ends within this text is ignored (min_tokens).
        """
        if not self._stops:
            return text, None
        if not text:
            return "", None
        num_held = len(self._held)
        buffer = self._held + text
        if may_stop and (match := self._find(buffer, num_held)) is not None:
            end, stop = match
            self._held = ""
            if self._include:
                return buffer[num_held:end], stop
            return buffer[: end - len(stop)], stop
        self._held = self._beginning_of_a_stop(buffer)
        if self._include:
            return text, None
        return buffer[: len(buffer) - len(self._held)], None

    def flush(self) -> str:
        """The text still held back; it turned out to be no stop string."""
        held, self._held = self._held, ""
        return "" if self._include else held

    def _find(self, buffer: str, num_held: int) -> tuple[int, str] | None:
        """(end, stop) of the first match that ends behind the first `num_held` characters."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = buffer.find(stop, max(0, num_held + 1 - len(stop)))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else (best[0], best[2])

    def _beginning_of_a_stop(self, buffer: str) -> str:
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(buffer)), longest, -1):
                if buffer.endswith(stop[:length]):
                    longest = length
                    break
        return buffer[len(buffer) - longest :]
