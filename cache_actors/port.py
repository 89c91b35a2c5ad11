"""What an engine needs of a pool and of its device, whatever stands behind: an actor, or a pool in the same process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from remora.namespaces.commands import AddFormat, Admit, AnyAnswer, AnyEvent, Extend, Publish, Release, Relocated
from remora.namespaces.sequence_commands import SequenceCommand

EngineCommand = AddFormat | Admit | Extend | Publish | Release | Relocated | SequenceCommand
OnAnswer = Callable[[EngineCommand, AnyAnswer], None]
OnEvent = Callable[[AnyEvent], None]


class PoolPort(Protocol):
    """One lease on one pool, seen from the engine thread. Commands are built without lease id and call number: the
    port stamps them, in the order of `send`."""

    def bind(self, on_answer: OnAnswer, on_event: OnEvent) -> None:
        """Where answers and events go. They may be called from any thread and must return at once."""
        ...

    def send(self, command: EngineCommand) -> None:
        """Queues the command and returns at once. Each command is answered exactly once, in order."""
        ...

    def may_emit(self) -> bool:
        """False once the lease's generation or the pool's incarnation has changed: no token may leave any more.

        Reads one word of shared memory; asked after each step (design §4.1).
        """
        ...


class StepGate(Protocol):
    """Lets the replicas of one device take turns, one engine step each."""

    def turn(self) -> AbstractContextManager[None]:
        """Blocks until it is this replica's turn; the turn ends with the context."""
        ...


class OpenGate:
    """A gate for a device with one replica, and for tests."""

    def turn(self) -> AbstractContextManager[None]:
        return nullcontext()
