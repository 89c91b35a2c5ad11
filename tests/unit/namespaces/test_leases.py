"""Numbered calls, replays, tombstones, generations, epochs, the memory ledger."""

from __future__ import annotations

import msgspec
import pytest
from pool_driver import BLOCK_BYTES, Driver, Replica, prompt, small_geometry

from remora.namespaces.commands import (
    Admitted,
    Attached,
    AttachRefused,
    Denied,
    Detached,
    Extend,
    ExtendItem,
    Preempt,
    Publish,
    Published,
    Refused,
    Release,
    Seal,
    Wait,
)
from remora.namespaces.effects import SetGeneration
from remora.platform.base.errors import StaleLease


def setup(**config: int) -> tuple[Driver, Replica]:
    driver = Driver(**config)
    driver.namespace("a")
    return driver, driver.lease()


def test_a_repeated_call_gets_the_same_answer_and_takes_no_effect() -> None:
    driver, replica = setup()
    first = replica.admit("s1", "a", prompt(2))
    report = driver.state.describe()
    assert replica.again() == first
    assert driver.state.describe() == report
    replica.release("s1")
    assert replica.again().num_released == 1
    assert driver.report("a").used_bytes == 0


def test_a_repeated_call_is_answered_the_same_after_a_restart() -> None:
    driver, replica = setup()
    first = replica.admit("s1", "a", prompt(2))
    driver.restart()
    assert replica.again() == first
    assert isinstance(replica.admit("s2", "a", prompt(2)), Admitted)


def test_a_call_that_skips_ahead_or_is_forgotten_is_refused_and_uses_no_number() -> None:
    driver, replica = setup()
    replica.call_no += 1
    assert replica.admit("s1", "a", prompt(1)).error == "CallOrder"
    replica.call_no = 1
    for number in range(1100):
        assert isinstance(replica.admit(f"s{number}", "a", prompt(1)), Admitted)
        replica.release(f"s{number}")
    old = msgspec.structs.replace(replica.last, call_no=2)
    assert driver.apply(old).error == "CallOrder"
    assert driver.apply(msgspec.structs.replace(replica.last, call_no=0)).error == "CallOrder"


def test_a_refused_call_uses_its_number_and_is_replayed() -> None:
    _, replica = setup()
    refused = replica.call(Extend, items=(ExtendItem(sequence_id="nobody", num_blocks=1),))
    assert refused.error == "UnknownSequence"
    assert replica.again() == refused
    assert isinstance(replica.admit("s", "a", prompt(1)), Admitted)


def test_case_19_late_calls_about_a_finished_sequence_are_ignored() -> None:
    driver, replica = setup()
    replica.run("s1", "a", prompt(2))
    replica.release("s1")
    assert replica.release("s1", "never there") == 0
    late = replica.call(Publish, seals=(Seal(sequence_id="s1", position=2, block_hash=b"x" * 16),))
    assert late == Published(num_sealed=0, num_duplicate=0)
    extended = replica.extend("s1")
    assert (extended.grants, extended.refused, extended.preempted) == ((), ("s1",), ())
    assert replica.admit("s1", "a", prompt(2)).error == "Conflict"
    assert driver.state.describe().num_referenced_blocks == 0


def test_case_18_a_hundred_aborts_at_every_stage_return_all_blocks() -> None:
    driver, replica = setup(num_extents=1)
    other = driver.lease("lease-2")
    for number in range(100):
        replica.admit(f"run{number}", "a", prompt(10, start=number))
        other.admit(f"wait{number}", "a", prompt(10, start=number))
        if number % 3 == 0:
            replica.extend(f"run{number}")
        if number % 2:
            other.release(f"wait{number}")
            replica.release(f"run{number}")
        else:
            replica.release(f"run{number}")
            other.release(f"wait{number}")
        report = driver.state.describe()
        assert (report.used_bytes, report.namespaces[0].num_waiting) == (0, 0)


def test_losing_a_lease_frees_what_it_held_keeps_sealed_blocks_and_bumps_the_generation() -> None:
    driver, replica = setup()
    replica.run("s1", "a", prompt(3))
    replica.admit("s2", "a", prompt(2, start=9))
    assert isinstance(replica.attached, Attached)
    slot, generation = replica.attached.lease_slot, replica.attached.generation
    assert driver.effects == [SetGeneration(lease_slot=slot, value=generation)]
    driver.lose(replica)
    assert driver.effects[1:] == [SetGeneration(lease_slot=slot, value=generation + 1)]
    assert driver.state.generation_words()[slot] == generation + 1
    report = driver.report("a")
    assert (report.used_bytes, report.cached_bytes) == (0, 3 * BLOCK_BYTES)
    assert replica.admit("s3", "a", prompt(1)).error == "StaleLease"
    assert driver.apply(replica.attach_command).error == "StaleLease"
    with pytest.raises(StaleLease):
        driver.state.events_after(replica.lease_id, 0)
    driver.lose(replica)
    heir = driver.lease("lease-2")
    assert isinstance(heir.attached, Attached)
    assert heir.attached.lease_slot == slot
    assert heir.attached.generation > generation + 1
    assert heir.run("s1", "a", [*prompt(3), 1]).num_cached_blocks == 3


def test_a_detach_is_replayed_although_the_lease_is_gone() -> None:
    driver, replica = setup()
    replica.run("s1", "a", prompt(1))
    assert isinstance(replica.detach(), Detached)
    assert isinstance(replica.again(), Detached)
    assert driver.state.leases() == ()
    assert replica.admit("s2", "a", prompt(1)).error == "StaleLease"


def test_an_attach_is_repeated_safely_and_another_one_under_the_same_id_is_refused() -> None:
    driver, replica = setup()
    assert driver.apply(replica.attach_command) == replica.attached
    forged = msgspec.structs.replace(replica.attach_command, reserved_bytes=5)
    assert driver.apply(forged).error == "StaleLease"
    assert driver.apply(msgspec.structs.replace(replica.attach_command, call_no=2)).error == "CallOrder"
    assert len(driver.state.leases()) == 1


def test_the_ledger_refuses_memory_that_the_device_does_not_have() -> None:
    driver = Driver(reserved_bytes=100)
    driver.lease("lease-1", reserved=60)
    answer = Replica(driver, "lease-2", reserved=41).attached
    assert isinstance(answer, AttachRefused)
    assert "41 bytes" in answer.reason
    assert "100" in answer.reason
    driver.lease("lease-3", reserved=40)
    assert driver.state.describe().reserved_bytes == 100


def test_a_geometry_whose_extents_hold_too_few_blocks_is_refused_with_what_to_do() -> None:
    driver = Driver(extent_bytes=16 * BLOCK_BYTES)
    answer = Replica(driver, "lease-1", geometry=small_geometry(3)).attached
    assert isinstance(answer, AttachRefused)
    assert "at least 8" in answer.reason
    assert "extent_bytes" in answer.reason
    assert driver.state.describe().geometries == ()


def test_leases_beyond_the_slots_of_the_header_are_refused() -> None:
    driver = Driver(max_leases=1)
    replica = driver.lease("lease-1")
    assert isinstance(Replica(driver, "lease-2").attached, AttachRefused)
    replica.detach()
    driver.lease("lease-3")


def test_leases_name_their_processes_so_that_a_restarted_shell_can_look_for_them() -> None:
    driver, replica = setup()
    driver.restart()
    (lease,) = driver.state.leases()
    assert lease.process == replica.attach_command.process
    assert lease.generation == driver.state.generation_words()[lease.lease_slot]


def test_an_epoch_below_the_highest_seen_is_refused_also_by_another_lease_and_after_a_restart() -> None:
    driver, replica = setup()
    other = driver.lease("lease-2")
    assert isinstance(replica.admit("s1", "a", prompt(1), session="x", epoch=3), Admitted)
    assert other.admit("s2", "a", prompt(1), session="x", epoch=2).error == "StaleEpoch"
    driver.restart()
    assert other.admit("s3", "a", prompt(1), session="x", epoch=2).error == "StaleEpoch"
    assert isinstance(other.admit("s4", "a", prompt(1), session="x", epoch=3), Admitted)
    assert isinstance(other.admit("s5", "a", prompt(1), session="y", epoch=0), Admitted)


def test_a_new_epoch_sends_away_what_runs_or_waits_under_the_old_one() -> None:
    driver, replica = setup(num_extents=1)
    other = driver.lease("lease-2")
    replica.run("old", "a", prompt(10), session="x", epoch=1)
    replica.admit("filler", "a", prompt(5, start=7))
    assert isinstance(replica.admit("parked", "a", prompt(10, start=3), session="x", epoch=1), Wait)
    new = other.admit("new", "a", [*prompt(9), 1], session="x", epoch=2)
    assert isinstance(new, Admitted)
    preempt, denied = replica.events()
    assert isinstance(preempt, Preempt)
    assert preempt.sequence_id == "old"
    assert isinstance(denied, Denied)
    assert denied.over_quota.sequence_id == "parked"
    assert replica.extend("old").preempted == ("old",)
    late = replica.call(Publish, seals=(Seal(sequence_id="old", position=9, block_hash=b"x" * 16),))
    assert isinstance(late, Published)
    assert late.num_sealed == 0
    assert replica.release("old") == 1


def test_events_are_numbered_and_stay_until_their_sequence_is_finished() -> None:
    driver, replica = setup(num_extents=1)
    for number in range(300):
        replica.admit(f"run{number}", "a", prompt(16, start=1))
        assert isinstance(replica.admit(f"wait{number}", "a", prompt(16, start=2)), Wait)
        replica.release(f"run{number}")
        replica.release(f"wait{number}")
    events = driver.state.events_after(replica.lease_id, 0)
    assert [event.event_no for event in events] == list(range(45, 301))
    assert driver.state.events_after(replica.lease_id, 299) == events[-1:]
    assert driver.state.events_after(replica.lease_id, 300) == ()


def test_a_release_may_come_twice_in_one_call() -> None:
    _driver, replica = setup()
    replica.run("s", "a", prompt(2))
    assert replica.call(Release, sequence_ids=("s", "s")).num_released == 1


def test_an_unknown_lease_is_told_to_attach_again() -> None:
    driver, _ = setup()
    answer = driver.apply(Release(lease_id="nobody", call_no=2, sequence_ids=()))
    assert isinstance(answer, Refused)
    assert answer.error == "StaleLease"
    assert "attach again" in answer.message
