"""Token id → the raw bytes it stands for, whichever way the vocabulary spells them."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

from tokenizers import Tokenizer

from remora.platform.base.errors import ModelError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
_WORD_MARK = "\u2581"


@cache
def byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's alphabet: printable character → byte (Radford et al. 2019; GPT-2's encoder)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return alphabet


def _decoder_steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _decoder_steps(inner)]
    return [decoder]


class TokenPieces:
    """Bytes of every token. Byte-level and SentencePiece-style vocabularies; others are refused.

    Thread-safe: the table is filled on use, and filling an entry twice gives the same bytes.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises ModelError for a decoder whose tokens have no bytes of their own (WordPiece, CTC, ...)."""
        decoder = json.loads(tokenizer.to_str())["decoder"]
        steps = _decoder_steps(decoder)
        kinds = {step["type"] for step in steps}
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        if not self._byte_level and not kinds & {"Metaspace", "ByteFallback", "Replace"}:
            name = decoder["type"] if decoder else "none"
            raise ModelError(
                f"the tokenizer's decoder ({name}) is neither byte-level nor SentencePiece-style; it cannot be served."
            )
        #: A text that starts with a word mark loses that space when it is decoded from its beginning.
        self.strips_first_space = any(
            (step["type"] == "Strip" and step.get("content") == " " and step.get("start", 0) > 0)
            or (step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")
            for step in steps
        )
        added = tokenizer.get_added_tokens_decoder()
        self._added = {token_id: token.content.encode() for token_id, token in added.items()}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._tokenizer = tokenizer
        self.num_tokens = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._pieces: list[bytes | None] = [None] * self.num_tokens

    def __getitem__(self, token_id: int) -> bytes:
        """The token's bytes; empty for an id that a model's padded vocabulary has and the tokenizer has not."""
        if not 0 <= token_id < self.num_tokens:
            if token_id < 0:
                raise IndexError(f"token id {token_id} is negative")
            return b""
        piece = self._pieces[token_id]
        if piece is None:
            piece = self._pieces[token_id] = self._spell(token_id)
        return piece

    def _spell(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id]
        text = self._tokenizer.id_to_token(token_id)
        if text is None:
            return b""
        if self._byte_level:
            alphabet = byte_alphabet()
            if all(character in alphabet for character in text):
                return bytes(alphabet[character] for character in text)
            return text.encode()
        if self._byte_fallback:
            match = _BYTE_TOKEN.match(text)
            if match:
                return bytes([int(match[1], 16)])
        return text.replace(_WORD_MARK, " ").encode()
