"""An event loop in which waiting costs nothing: time goes to the next timer as soon as nothing else is to be done."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.DefaultSelector):
    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "everything waits for something that does not come"
            self.now_s += timeout
        return ready


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._times = _Selector()
        super().__init__(self._times)

    def time(self) -> float:
        return self._times.now_s


def run_instantly(main: Coroutine[Any, Any, T]) -> T:
    """asyncio.run without its waiting; nothing in it may wait for other processes or threads."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(main)
