"""What every eviction policy promises, and what sets them apart."""

from __future__ import annotations

import random

import pytest
from pool_driver import BLOCK_TOKENS, Driver, Replica, prompt

from remora.namespaces.commands import Admitted, Done, EndSession
from remora.namespaces.eviction import POLICY_NAMES
from remora.namespaces.pool import PoolStateConfig
from remora.platform.base.errors import ConfigError
from remora.platform.base.ids import LeaseId, SessionId


def one_namespace(eviction: str, *, num_extents: int = 2) -> tuple[Driver, Replica]:
    """16 blocks an extent."""
    driver = Driver(num_extents=num_extents, eviction=eviction)
    driver.namespace("a")
    return driver, driver.lease()


def num_cached(replica: Replica, name: str, tokens: list[int]) -> int:
    """Full blocks of the prompt that are found, all of them counted."""
    found = replica.admit(name, "a", [*tokens, 0])
    assert isinstance(found, Admitted)
    replica.release(name)
    return found.num_cached_blocks


def live_a_day(driver: Driver, replica: Replica, seed: int, *, restart_at: int = -1) -> list[int]:
    """Conversations that share a beginning, grow and come back; what each turn found."""
    source = random.Random(seed)
    lengths = {number: source.randint(1, 5) for number in range(8)}
    found = []
    for turn in range(120):
        if turn == restart_at:
            driver.restart()
        number = min(source.randrange(8), source.randrange(8))
        lengths[number] = lengths[number] % 9 + source.randint(0, 2)
        tokens = [*prompt(2), *prompt(lengths[number], start=1 + number)]
        found.append(replica.run(f"{seed}-{turn}", "a", tokens, priority=number % 3).num_cached_blocks)
        replica.release(f"{seed}-{turn}")
    return found


@pytest.mark.parametrize("eviction", POLICY_NAMES)
def test_a_restart_changes_nothing_that_a_policy_decides_afterwards(eviction: str) -> None:
    plain, restarted = one_namespace(eviction), one_namespace(eviction)
    found = live_a_day(*plain, seed=1)
    assert live_a_day(*restarted, seed=1, restart_at=80) == found
    assert restarted[0].state.snapshot() == plain[0].state.snapshot()
    assert sum(plain[0].report("a").evicted_blocks.values()) > 50
    assert sum(found) > 100


@pytest.mark.parametrize("eviction", POLICY_NAMES)
def test_every_policy_gives_up_all_it_has_when_asked(eviction: str) -> None:
    driver, replica = one_namespace(eviction)
    live_a_day(driver, replica, seed=2)
    driver.quota("a", limit=0)
    assert driver.report("a").cached_bytes == 0
    assert driver.state.describe().geometries[0].num_used_blocks == 0


@pytest.mark.parametrize("eviction", [name for name in POLICY_NAMES if name != "lru"])
def test_a_prompt_that_comes_back_outlives_a_flood_that_does_not(eviction: str) -> None:
    def left_after_flood(name: str) -> int:
        driver, replica = one_namespace(name)
        for turn in range(30):
            replica.cache(f"system {turn}", "a", [*prompt(4), *prompt(1, start=100 + turn)])
        for number in range(14):
            replica.cache(f"flood {number}", "a", prompt(4, start=200 + number))
        driver.state.check_integrity()
        return num_cached(replica, "back", prompt(4))

    assert left_after_flood("lru") == 0
    assert left_after_flood(eviction) == 4


def test_s3fifo_keeps_what_comes_back_soon_after_its_eviction() -> None:
    _, replica = one_namespace("s3fifo", num_extents=1)
    for turn in range(3):
        replica.cache(f"turn {turn}", "a", prompt(3, start=1))
        for number in range(3):
            replica.cache(f"{turn}.{number}", "a", prompt(5, start=2 + 3 * turn + number))
    assert num_cached(replica, "back", prompt(3, start=1)) == 3


@pytest.mark.parametrize("eviction", POLICY_NAMES)
def test_an_admission_that_found_blocks_but_had_to_wait_is_no_hit(eviction: str) -> None:
    """A parked admission is tried again and again: that must not make what it looks at precious."""
    driver, replica = one_namespace(eviction, num_extents=1)
    replica.cache("first", "a", prompt(4))
    replica.run("long", "a", prompt(10, start=1))
    replica.admit("parked", "a", [*prompt(4), *prompt(8, start=2)])
    notes = [block.uses for block in driver.state._parts.extents.extents[0].blocks.values()]
    for _ in range(5):
        driver.tick(1.0)
    assert [block.uses for block in driver.state._parts.extents.extents[0].blocks.values()] == notes


def end_session(driver: Driver, session: str) -> None:
    assert driver.apply(EndSession(lease_id=LeaseId(""), session_id=SessionId(session))) == Done()


def test_what_only_an_ended_session_used_goes_first() -> None:
    driver, replica = one_namespace("value")
    for name, start in (("old", 1), ("ended", 2), ("alone", 3)):
        replica.run(name, "a", [*prompt(2), *prompt(6, start=start)], session=name)
        replica.release(name)
    driver.restart()
    end_session(driver, "ended")
    end_session(driver, "ended")
    end_session(driver, "never heard of")
    replica.cache("new", "a", prompt(16, start=4))  # 12 are free
    assert num_cached(replica, "1", [*prompt(2), *prompt(6, start=1)]) == 8  # takes a block for its last token
    assert num_cached(replica, "2", [*prompt(2), *prompt(6, start=3)]) == 8
    assert num_cached(replica, "0", [*prompt(2), *prompt(6, start=2)]) == 2 + 1


def test_an_ended_session_takes_nothing_with_it_that_others_use_or_continue() -> None:
    driver, replica = one_namespace("value")
    replica.run("ended", "a", prompt(4), session="ended")
    replica.release("ended")
    replica.run("fork", "a", [*prompt(4), *prompt(2, start=1)], session="fork")
    end_session(driver, "ended")  # everything is referenced
    replica.release("fork")
    end_session(driver, "ended")
    replica.cache("flood", "a", prompt(24, start=2))
    assert num_cached(replica, "0", [*prompt(4), *prompt(2, start=1)]) == 6
    replica.cache("more", "a", prompt(4, start=3))
    assert driver.report("a").evicted_blocks


@pytest.mark.parametrize("priority", [-2, 2])
def test_of_two_equal_conversations_the_one_of_lower_priority_goes_first(priority: int) -> None:
    _, replica = one_namespace("value")
    for turn in range(20):
        for name, level in (("plain", 0), ("other", priority)):
            tokens = [*prompt(8, start=1 + (name == "other")), *prompt(1, start=10 + turn)]
            replica.run(f"{name} {turn}", "a", tokens, priority=level)
            replica.release(f"{name} {turn}")
    replica.cache("flood", "a", prompt(20, start=50))
    plain = num_cached(replica, "p", prompt(8, start=1))
    other = num_cached(replica, "o", prompt(8, start=2))
    assert (other > plain) == (priority > 0)


def test_an_unknown_policy_is_refused_by_name() -> None:
    config = PoolStateConfig(data_bytes=1 << 20, extent_bytes=1 << 20, reserved_bytes=0, eviction="mru")
    with pytest.raises(ConfigError, match=r"eviction: 'mru' is not allowed; one of \['lru', 's3fifo', 'arc'"):
        config.check()


def test_a_hit_counts_tokens_of_whole_blocks() -> None:
    driver, replica = one_namespace("arc")
    replica.cache("one", "a", prompt(4))
    replica.cache("two", "a", [*prompt(4), 1])
    assert driver.report("a").hit_tokens == 4 * BLOCK_TOKENS
