"""Answers of several stages, as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from remora.namespaces.commands import AnyAnswer, Published, Refused

#: A lease that is lost refuses everything with it.
STALE: Final = "StaleLease"


class Gather:
    """Waits for the answers of several stages."""

    def __init__(self, done: Callable[[list[AnyAnswer]], None]) -> None:
        self._done = done
        self._num_expected = 1
        self._replies: list[AnyAnswer] = []

    def expect(self, take: Callable[[AnyAnswer], None] | None = None) -> Callable[[AnyAnswer], None]:
        """One more answer will come, and be looked at by `take` when it does."""
        self._num_expected += 1

        def arrive(answer: AnyAnswer) -> None:
            if take is not None:
                take(answer)
            self._replies.append(answer)
            self.close()

        return arrive

    def close(self) -> None:
        """No more will be expected."""
        self._num_expected -= 1
        if not self._num_expected:
            self._done(self._replies)


def published(replies: list[AnyAnswer]) -> AnyAnswer:
    """A block can be found when every stage has it."""
    sealed = [reply for reply in replies if isinstance(reply, Published)]
    return first_wrong(replies) or Published(
        num_sealed=min((reply.num_sealed for reply in sealed), default=0),
        num_duplicate=max((reply.num_duplicate for reply in sealed), default=0),
    )


def first_wrong(replies: list[AnyAnswer]) -> Refused | None:
    """A refusal that is not only the loss of a further stage."""
    return next((reply for reply in replies if isinstance(reply, Refused) and reply.error != STALE), None)
