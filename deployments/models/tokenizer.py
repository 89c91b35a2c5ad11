"""A model's tokenizer and chat template, without transformers, so that routers start fast."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

from remora.deployments.models.chat_template import ChatTemplate
from remora.deployments.models.detokenizer import IncrementalDetokenizer
from remora.deployments.models.token_pieces import TokenPieces
from remora.platform.base.errors import InvalidRequest


class ChatTokenizer:
    """Text ↔ token ids and messages → text. Thread-safe; encoding releases the GIL."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        chat_template: str | None = None,
        tool_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        """`special_tokens`: "bos_token", "eos_token", ... → text, for the templates. Takes over `tokenizer`.

        `tool_template` is used instead of `chat_template` when a request has tools. Raises ModelError for a vocabulary
        or a template that cannot be served.
        """
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        self._pieces = TokenPieces(tokenizer)
        self._special_tokens = dict(special_tokens or {})
        self._template = ChatTemplate(chat_template, self._special_tokens) if chat_template else None
        self._tool_template = ChatTemplate(tool_template, self._special_tokens) if tool_template else self._template
        self._grammar_lock = threading.Lock()
        self._grammar_tokenizers: dict[int, Any] = {}
        #: Ids that end an answer, the main one first.
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))

    @property
    def vocab_size(self) -> int:
        """Number of ids the tokenizer knows; the model's logits may have more columns (padding)."""
        return self._pieces.num_tokens

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that `skip_special_tokens` leaves out of text."""
        return self._pieces.special_ids

    @property
    def special_tokens(self) -> dict[str, str]:
        """ "bos_token", "eos_token", ... → text."""
        return dict(self._special_tokens)

    @property
    def pieces(self) -> TokenPieces:
        """Token id → bytes."""
        return self._pieces

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @cached_property
    def tokenizer_id(self) -> str:
        """A hash of everything that decides which ids a text becomes; part of the KV fingerprint."""
        return hashlib.blake2b(self._tokenizer.to_str().encode(), digest_size=16).hexdigest()

    def encode(self, text: str, add_special_tokens: bool = True, *, field: str = "prompt") -> list[int]:
        """Token ids of `text`. Raises InvalidRequest (naming `field`) for text that is not Unicode."""
        try:
            # The batch call is the one that releases the GIL; "fast" leaves out character offsets.
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeEncodeError):
            raise InvalidRequest(
                f"{field}: the text is not valid Unicode (it holds half of a surrogate pair).", field=field
            ) from None
        ids: list[int] = encoding.ids
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True, *, field: str = "tokens") -> str:
        """Text of `token_ids`, with U+FFFD for bytes that are no character.

        Raises InvalidRequest (naming `field`) for ids that are not in the vocabulary.
        """
        self.check_ids(token_ids, field=field)
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def check_ids(self, token_ids: Sequence[int], *, field: str) -> None:
        """Raises InvalidRequest (naming `field`) when an id is not in the vocabulary."""
        if not token_ids:
            return
        lowest, highest = min(token_ids), max(token_ids)
        if lowest < 0 or highest >= self.vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise InvalidRequest(
                f"{field}: token id {wrong} is not in the vocabulary (0 to {self.vocab_size - 1}).", field=field
            )

    def token_bytes(self, token_id: int) -> bytes:
        """The raw bytes of one token: part of a character, a word with its leading space, or a special token's text."""
        return self._pieces[token_id]

    def token_text(self, token_id: int) -> str:
        """The token for people, e.g. in logprobs: broken characters show as U+FFFD."""
        return self._pieces[token_id].decode(errors="replace")

    def detokenizer(
        self, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> IncrementalDetokenizer:
        """Turns a sequence's output tokens into text as they come."""
        return IncrementalDetokenizer(self._pieces, prompt_token_ids, skip_special_tokens=skip_special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text; encode it with add_special_tokens=False, the template writes them itself.

        `arguments`: what a request sends as chat_template_kwargs.

        Raises InvalidRequest naming the field for whatever the template cannot take; so does a model without one.
        """
        template = self._tool_template if tools else self._template
        if template is None:
            raise InvalidRequest(
                "messages: this model has no chat template; send a prompt to /v1/completions instead.",
                field="messages",
            )
        return template.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, arguments=arguments or {}
        )

    def to_json(self) -> str:
        """The tokenizer as a tokenizer.json document."""
        text: str = self._tokenizer.to_str()
        return text

    def grammar_tokenizer(self, num_logits: int) -> Any:
        """The llguidance.LLTokenizer for masks of `num_logits` bits; built on first use (about a second), then kept."""
        with self._grammar_lock:
            found = self._grammar_tokenizers.get(num_logits)
            if found is None:
                from llguidance import LLTokenizer

                found = LLTokenizer(self.to_json(), n_vocab=num_logits, eos_token=list(self.eos_token_ids) or None)
                self._grammar_tokenizers[num_logits] = found
            return found
