"""What a tenant may do in a time. Each router keeps its own account, of an equal share of every limit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from remora.platform.base.clock import Clock
from remora.platform.base.errors import IntegrityError, RateLimited
from remora.platform.base.tenants import LimitsConfig

#: After it, somebody may have ended a generation; nobody can know when.
_CONCURRENCY_RETRY_S: Final = 1.0


class Allowance:
    """So much at once, filled up at a steady rate. May be overdrawn: what was used is used."""

    def __init__(self, size: float, per_s: float, clock: Clock) -> None:
        """Begins full."""
        self.size = size
        self._per_s = per_s
        self._clock = clock
        self._level = size
        self._filled_s = clock.now_s()

    def wait_s(self, wanted: float) -> float:
        """Seconds until there is so much, or until it is full if it never holds so much; 0: now."""
        self._fill()
        return max(0.0, (min(wanted, self.size) - self._level) / self._per_s)

    def use(self, used: float) -> None:
        self._fill()
        self._level -= used

    def _fill(self) -> None:
        now_s = self._clock.now_s()
        self._level = min(self.size, self._level + (now_s - self._filled_s) * self._per_s)
        self._filled_s = now_s


class TenantLimits:
    """The account of one tenant at one router. Lives on its event loop."""

    def __init__(
        self,
        tenant: str,
        limits: LimitsConfig,
        clock: Clock,
        *,
        num_routers: int = 1,
        on_refused: Callable[[str, str], None] = lambda tenant, limit: None,
    ) -> None:
        """`on_refused` is told the tenant and the name of the limit that it has reached."""
        self._on_refused = on_refused
        self._tenant = tenant
        self._limits = limits
        self._max_concurrent = None if limits.max_concurrent is None else math.ceil(limits.max_concurrent / num_routers)
        self._num_running = 0
        self._requests: Allowance | None = None
        self._tokens: Allowance | None = None
        if limits.requests_per_s is not None:
            per_s = limits.requests_per_s / num_routers
            self._requests = Allowance(max(1.0, per_s), per_s, clock)
        if limits.tokens_per_min is not None:
            size = limits.tokens_per_min / num_routers
            self._tokens = Allowance(size, size / 60, clock)

    def take_request(self) -> None:
        """Counts a request. Raises RateLimited."""
        if self._requests is None:
            return
        wait_s = self._requests.wait_s(1)
        if wait_s > 0:
            raise self._limited("requests_per_s", f"{self._limits.requests_per_s:g} requests a second", wait_s)
        self._requests.use(1)

    def begin(self) -> None:
        """Counts a generation until `end`. Raises RateLimited."""
        if self._max_concurrent is not None and self._num_running >= self._max_concurrent:
            what = f"{self._limits.max_concurrent} generations at the same time"
            raise self._limited("max_concurrent", what, _CONCURRENCY_RETRY_S)
        self._num_running += 1

    def end(self) -> None:
        self._num_running -= 1

    def take_prompt(self, num_tokens: int) -> None:
        """Counts the tokens of a prompt that is about to be computed. Raises RateLimited."""
        if self._tokens is None:
            return
        wait_s = self._tokens.wait_s(num_tokens)
        if wait_s > 0:
            raise self._limited("tokens_per_min", f"{self._limits.tokens_per_min} tokens a minute", wait_s)
        self._tokens.use(num_tokens)

    def used_output(self, num_tokens: int) -> None:
        """Counts tokens that were generated: nobody knew before how many they would be, so later requests wait."""
        if self._tokens is not None:
            self._tokens.use(num_tokens)

    @property
    def num_running(self) -> int:
        return self._num_running

    def check_integrity(self) -> None:
        """Raises IntegrityError when more generations ended than began."""
        if self._num_running < 0:
            raise IntegrityError(f"tenant {self._tenant} has ended {-self._num_running} generations that never began")

    def _limited(self, field: str, what: str, wait_s: float) -> RateLimited:
        self._on_refused(self._tenant, field)
        return RateLimited(
            f"{field}: the limit of {self._tenant!r} is {what}; try again in {math.ceil(wait_s)} s.",
            retry_after_s=wait_s,
            field=field,
        )
