"""Token ids → text, as they come, without ever giving out a broken character."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec


class Pieces(Protocol):
    """What a detokenizer needs of a tokenizer (token_pieces.TokenPieces)."""

    @property
    def strips_first_space(self) -> bool: ...

    @property
    def special_ids(self) -> frozenset[int]: ...

    def __getitem__(self, token_id: int) -> bytes: ...


class DetokenizerState(msgspec.Struct, frozen=True, kw_only=True):
    """All that a detokenizer remembers between tokens; it moves with its sequence."""

    pending: bytes = b""
    #: How many of the pending bytes come from the prompt: they are nobody's output if they turn out to be broken.
    num_prompt_bytes: int = 0
    at_start: bool = False


class IncrementalDetokenizer:
    """Detokenizes one sequence's output behind its prompt.

    The texts that `push` returns, joined, are the output's text: the UTF-8 decoding of the tokens' bytes, with U+FFFD
    for bytes that cannot become a character. Bytes that may still become one are held back. A character that the prompt
    left unfinished comes out whole with the token that completes it; nothing else of the prompt ever does.
    """

    __slots__ = ("_at_start", "_num_prompt_bytes", "_pending", "_pieces", "_skip")

    def __init__(
        self, pieces: Pieces, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._pieces = pieces
        self._skip = pieces.special_ids if skip_special_tokens else frozenset()
        self._pending = _unfinished_tail(pieces, prompt_token_ids, self._skip)
        self._num_prompt_bytes = len(self._pending)
        self._at_start = pieces.strips_first_space and not any(
            token_id not in self._skip and pieces[token_id] for token_id in prompt_token_ids
        )

    def push(self, token_id: int) -> str:
        """The text that this token makes certain; often empty or one word."""
        if token_id in self._skip:
            return ""
        data = self._pieces[token_id]
        if self._at_start and data:
            self._at_start = False
            if data[:1] == b" ":
                data = data[1:]
        if not self._pending:
            try:
                return data.decode()
            except UnicodeDecodeError:
                pass
        return self._decode(self._pending + data)

    def flush(self) -> str:
        """What is left at the end: nothing. Bytes of a character that was cut off are no text and are dropped."""
        self._pending = b""
        self._num_prompt_bytes = 0
        return ""

    @property
    def num_pending_bytes(self) -> int:
        """Bytes held back; 0 means that everything pushed has come out."""
        return len(self._pending)

    def state(self) -> DetokenizerState:
        return DetokenizerState(pending=self._pending, num_prompt_bytes=self._num_prompt_bytes, at_start=self._at_start)

    @classmethod
    def from_state(
        cls, pieces: Pieces, state: DetokenizerState, *, skip_special_tokens: bool = True
    ) -> IncrementalDetokenizer:
        """Goes on where `state` was taken, in this process or another."""
        detokenizer = cls(pieces, skip_special_tokens=skip_special_tokens)
        detokenizer._pending = state.pending
        detokenizer._num_prompt_bytes = state.num_prompt_bytes
        detokenizer._at_start = state.at_start
        return detokenizer

    def _decode(self, data: bytes) -> str:
        out = []
        num_prompt_bytes = self._num_prompt_bytes
        while True:
            try:
                out.append(data.decode())
                data = b""
                break
            except UnicodeDecodeError as error:
                out.append(data[: error.start].decode())
                if error.reason == "unexpected end of data":
                    data = data[error.start :]
                    num_prompt_bytes = max(0, num_prompt_bytes - error.start)
                    break
                if error.end > num_prompt_bytes:
                    out.append("\ufffd")
                data = data[error.end :]
                num_prompt_bytes = max(0, num_prompt_bytes - error.end)
        self._pending = data
        self._num_prompt_bytes = num_prompt_bytes if data else 0
        return "".join(out)


def _unfinished_tail(pieces: Pieces, token_ids: Sequence[int], skip: frozenset[int]) -> bytes:
    """The bytes at the prompt's end that begin a character without finishing it (at most 3)."""
    tail = b""
    for token_id in reversed(token_ids):
        if token_id not in skip:
            tail = pieces[token_id] + tail
        if len(tail) >= 4:
            break
    for length in range(1, min(3, len(tail)) + 1):
        end = tail[-length:]
        try:
            end.decode()
        except UnicodeDecodeError as error:
            if error.start == 0 and error.reason == "unexpected end of data":
                return end
    return b""
