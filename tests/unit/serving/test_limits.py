"""Accounts fill up at their rate, never hold more than their size, and remember what was overdrawn."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.platform.base.clock import ManualClock
from remora.platform.base.errors import RateLimited
from remora.platform.base.tenants import LimitsConfig
from remora.platform.http.limits import TenantLimits


def limits(clock: ManualClock, *, num_routers: int = 1, **values: float) -> TenantLimits:
    return TenantLimits("team-a", LimitsConfig.model_validate(values), clock, num_routers=num_routers)


@given(
    per_s=st.sampled_from([0.5, 1.0, 3.0, 20.0]),
    pauses_s=st.lists(st.floats(min_value=0, max_value=2), max_size=60),
)
def test_no_window_of_time_passes_more_than_its_rate_and_one_burst(per_s: float, pauses_s: list[float]) -> None:
    clock = ManualClock()
    account = limits(clock, requests_per_s=per_s)
    passed_s: list[float] = []
    told_s: list[float] = []
    for pause_s in pauses_s:
        clock.advance(pause_s)
        try:
            account.take_request()
        except RateLimited as error:
            told_s.append(error.retry_after_s or 0.0)
        else:
            passed_s.append(clock.now_s())
    assert all(0 < each <= 1 / per_s for each in told_s)
    burst = max(1.0, per_s)
    for index, first_s in enumerate(passed_s):
        for last in range(index, len(passed_s)):
            assert last - index + 1 <= burst + (passed_s[last] - first_s) * per_s + 1e-6


def test_after_the_told_time_a_request_passes() -> None:
    clock = ManualClock()
    account = limits(clock, requests_per_s=0.5)
    account.take_request()
    with pytest.raises(RateLimited, match=r"requests_per_s: the limit of 'team-a' is 0\.5 requests a second") as caught:
        account.take_request()
    assert caught.value.retry_after_s == pytest.approx(2.0)
    clock.advance(2.0)
    account.take_request()


def test_output_is_paid_after_it_was_generated() -> None:
    clock = ManualClock()
    account = limits(clock, tokens_per_min=600)
    account.take_prompt(100)
    account.used_output(560)
    with pytest.raises(RateLimited) as caught:
        account.take_prompt(40)
    assert (caught.value.field, caught.value.retry_after_s) == ("tokens_per_min", pytest.approx(10.0))
    clock.advance(10.0)
    account.take_prompt(40)


def test_a_prompt_larger_than_a_minutes_worth_passes_once_the_account_is_full() -> None:
    clock = ManualClock()
    account = limits(clock, tokens_per_min=60)
    account.take_prompt(90)
    with pytest.raises(RateLimited) as caught:
        account.take_prompt(90)
    assert caught.value.retry_after_s == pytest.approx(90.0)
    clock.advance(90.0)
    account.take_prompt(90)


def test_so_many_generations_at_once_and_no_more() -> None:
    account = limits(ManualClock(), max_concurrent=2)
    account.begin()
    account.begin()
    with pytest.raises(RateLimited, match="max_concurrent"):
        account.begin()
    account.end()
    account.begin()
    account.check_integrity()


def test_routers_share_a_limit_in_equal_parts() -> None:
    clock = ManualClock()
    account = limits(clock, num_routers=4, requests_per_s=8, tokens_per_min=400, max_concurrent=6)
    account.take_request()
    account.take_request()
    with pytest.raises(RateLimited):
        account.take_request()
    account.take_prompt(100)
    with pytest.raises(RateLimited):
        account.take_prompt(1)
    account.begin()
    account.begin()
    with pytest.raises(RateLimited):
        account.begin()


def test_without_limits_everything_passes() -> None:
    account = limits(ManualClock())
    for _ in range(1000):
        account.take_request()
        account.begin()
        account.take_prompt(10**9)
        account.used_output(10**9)
