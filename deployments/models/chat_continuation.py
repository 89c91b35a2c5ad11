"""What a chat template writes behind an answer: the end of that turn, the new messages, the opening of the next answer.

The tokens of a session are the truth, so its history is never rendered again: the template is given a short placeholder
conversation whose last answer is an anchor, and everything behind the anchor is the continuation.

    user: a │ assistant: ANCHOR ┊ <end of turn> user: new message <end of turn> assistant:
                                └──────────────────────── kept ───────────────────────────
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final

from remora.deployments.models.chat_template import clean_messages
from remora.deployments.models.tokenizer import ChatTokenizer
from remora.platform.base.errors import InvalidRequest

#: Cannot be in a message: nobody outside this process knows it. Letters and digits only, so that no template trims it.
_ANCHOR: Final = f"anchor{uuid.uuid4().hex}"


def render_continuation(
    tokenizer: ChatTokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool,
    arguments: Mapping[str, Any] | None = None,
) -> str:
    """Text behind an answer of the model. Raises InvalidRequest as `ChatTokenizer.render` does, naming the message."""
    # First by themselves: faults are then named by the caller's own numbers.
    clean = clean_messages(messages)
    placeholder = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _ANCHOR}]
    text = tokenizer.render(
        [*placeholder, *clean], None, add_generation_prompt=add_generation_prompt, arguments=arguments
    )
    before, found, continuation = text.rpartition(_ANCHOR)
    if not found or _ANCHOR in before:
        raise InvalidRequest(
            "session_id: this model's chat template cannot be continued behind an answer; send the whole conversation "
            "without a session_id.",
            field="session_id",
        )
    return continuation


def join_continuation(
    tokenizer: ChatTokenizer, log: Sequence[int], continuation_token_ids: Sequence[int]
) -> tuple[int, ...]:
    """The tokens to put behind the log: an end of turn that was generated is not written a second time."""
    tokens = tuple(continuation_token_ids)
    if log and tokens and tokens[0] == log[-1] and log[-1] in tokenizer.eos_token_ids:
        return tokens[1:]
    return tokens
