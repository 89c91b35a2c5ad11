"""Parked admissions: order, fairness, deadlines, no deadlock."""

from __future__ import annotations

from pool_driver import BLOCK_BYTES, Driver, Replica, prompt, small_geometry

from remora.namespaces.commands import Admitted, Denied, Granted, OverQuota, Wait


def granted(replica: Replica) -> list[str]:
    return [event.admitted.sequence_id for event in replica.events() if isinstance(event, Granted)]


def setup(**weights: float) -> tuple[Driver, Replica]:
    driver = Driver(num_extents=1)  # 16 blocks
    for name in weights or {"a": 1.0}:
        driver.namespace(name, weight=weights.get(name, 1.0))
    return driver, driver.lease()


def test_inside_a_namespace_first_come_is_first_served_and_positions_say_so() -> None:
    _, replica = setup()
    replica.run("run", "a", prompt(16))
    waits = [replica.admit(f"w{number}", "a", prompt(2, start=number + 1)) for number in range(3)]
    assert [wait.queue_position for wait in waits if isinstance(wait, Wait)] == [1, 2, 3]
    replica.release("run")
    assert granted(replica) == ["w0", "w1", "w2"]


def test_a_large_request_is_not_starved_by_small_ones() -> None:
    _driver, replica = setup(a=1.0, b=1.0)
    for number in range(3):
        replica.admit(f"small{number}", "a", prompt(4, start=number))
    assert isinstance(replica.admit("large", "b", prompt(16, start=50)), Wait)
    for number in range(3, 20):
        assert isinstance(replica.admit(f"small{number}", "a", prompt(4, start=number)), Wait), "it would fit"
    running, order = ["small0", "small1", "small2"], []
    while "large" not in order:
        replica.release(running.pop(0))
        order += (new := granted(replica))
        running += new
        assert len(running) <= 2 or "large" in new, "a keeps its fair share, no more"
    assert order == ["small3", "small4", "small5", "small6", "large"], "as much as the arena holds has passed it"


def test_a_borrower_that_lacks_memory_does_not_hold_back_others_within_their_fair_share() -> None:
    _driver, replica = setup(a=1.0, b=1.0, c=1.0)
    replica.run("run", "a", prompt(8))
    assert isinstance(replica.admit("large", "b", prompt(10, start=1)), Wait)
    assert isinstance(replica.admit("more", "a", prompt(1, start=2)), Wait), "a has more than its third"
    assert isinstance(replica.admit("small", "c", prompt(5, start=3)), Admitted)
    assert isinstance(replica.admit("next", "c", prompt(1, start=4)), Wait), "and now c has its third"
    replica.release("run")
    assert granted(replica) == ["large", "more"]


def test_memory_goes_round_by_weight() -> None:
    _, replica = setup(a=3.0, b=1.0)
    replica.run("run", "a", prompt(16, start=99))
    for number in range(12):
        replica.admit(f"a{number}", "a", prompt(4, start=number))
        replica.admit(f"b{number}", "b", prompt(4, start=20 + number))
    replica.release("run")
    order = granted(replica)
    for _ in range(8):
        replica.release(order[len(order) - 4])
        order += granted(replica)
    shares = [name[0] for name in order]
    assert 8 <= shares.count("a") <= 10, order
    assert shares.count("a") + shares.count("b") == len(order) == 12


def test_who_was_idle_does_not_save_up_a_claim_on_the_future() -> None:
    _, replica = setup(a=1.0, b=1.0)
    for number in range(20):
        replica.run(f"early{number}", "a", prompt(16, start=number))
        replica.release(f"early{number}")
    replica.run("run", "a", prompt(16, start=70))
    for number in range(8):
        replica.admit(f"b{number}", "b", prompt(4, start=30 + number))
        replica.admit(f"a{number}", "a", prompt(4, start=50 + number))
    replica.release("run")
    order = granted(replica)
    for _ in range(4):
        replica.release(order[len(order) - 4])
        order += granted(replica)
    assert "a0" in order[:6], order


def test_a_deadline_that_passes_is_denied_and_the_next_in_line_goes_on() -> None:
    driver, replica = setup()
    replica.run("run", "a", prompt(10))
    assert isinstance(replica.admit("big", "a", prompt(16, start=1), deadline_s=5.0), Wait)
    assert isinstance(replica.admit("fits", "a", prompt(4, start=2), deadline_s=50.0), Wait)
    driver.tick(4.9)
    assert replica.events() == ()
    driver.tick(0.2)
    denied, admitted = replica.events()
    assert isinstance(denied, Denied)
    assert denied.over_quota.sequence_id == "big"
    assert isinstance(admitted, Granted)


def test_a_request_is_not_granted_after_its_deadline_even_if_nobody_ticked() -> None:
    driver, replica = setup()
    replica.run("run", "a", prompt(16))
    replica.admit("late", "a", prompt(2, start=1), deadline_s=1.0)
    driver.now_s = 2.0
    replica.release("run")
    assert granted(replica) == []
    assert driver.report("a").used_bytes == 0


def test_a_deadline_in_the_past_never_waits_but_is_served_if_memory_is_there() -> None:
    driver, replica = setup()
    driver.now_s = 10.0
    assert isinstance(replica.admit("s", "a", prompt(16), deadline_s=9.0), Admitted)
    assert isinstance(replica.admit("t", "a", prompt(1, start=1), deadline_s=9.0), OverQuota)


def test_a_withdrawn_request_clears_the_way() -> None:
    _, replica = setup()
    replica.run("run", "a", prompt(10))
    replica.admit("big", "a", prompt(16, start=1))
    replica.admit("small", "a", prompt(6, start=2))
    assert replica.release("big") == 1
    assert granted(replica) == ["small"]


def test_a_lost_lease_takes_its_parked_requests_along_and_frees_others() -> None:
    driver, replica = setup()
    other = driver.lease("lease-2")
    replica.run("run", "a", prompt(10))
    replica.admit("big", "a", prompt(16, start=1))
    other.admit("small", "a", prompt(6, start=2))
    driver.lose(replica)
    assert granted(other) == ["small"]
    assert driver.report("a").num_waiting == 0


def test_a_full_cache_of_three_geometries_never_blocks_a_request_that_fits_its_quota() -> None:
    driver = Driver(num_extents=6, extent_bytes=32 * BLOCK_BYTES)
    replicas = []
    for number, layers in enumerate((1, 2, 3)):
        driver.namespace(f"n{number}", model=f"m{number}", guaranteed=2 * 32 * BLOCK_BYTES)
        replica = driver.lease(f"lease-{number}", model=f"m{number}", geometry=small_geometry(layers))
        replicas.append(replica)
    for turn in range(6):
        for number, replica in enumerate(replicas):
            count = 60 // (number + 1)
            answer = replica.admit(f"s{turn}", f"n{number}", prompt(count, start=turn))
            assert isinstance(answer, Admitted), (turn, number, answer)
            replica.publish(f"s{turn}", f"n{number}", prompt(count, start=turn))
            replica.release(f"s{turn}")


def test_scattered_guaranteed_blocks_do_not_lock_others_out_of_their_guarantee() -> None:
    driver = Driver(num_extents=4, extent_bytes=16 * BLOCK_BYTES)
    driver.namespace("a", model="m1", guaranteed=16 * BLOCK_BYTES)
    driver.namespace("b", model="m2", guaranteed=3 * 16 * BLOCK_BYTES)
    one = driver.lease("lease-1", model="m1")
    two = driver.lease("lease-2", model="m2", geometry=small_geometry(2))
    for number in range(4):
        one.run(f"keep{number}", "a", prompt(4, start=number))
        one.run(f"drop{number}", "a", [5, *prompt(12, start=number)][: 12 * 4])
    driver_drop = [f"drop{number}" for number in range(4)]
    one.release(*driver_drop)
    driver.quota("a", model="m1", guaranteed=16 * BLOCK_BYTES, limit=16 * BLOCK_BYTES)
    one.release(*[f"keep{number}" for number in range(1, 4)])
    driver.quota("a", model="m1", guaranteed=16 * BLOCK_BYTES)
    spread = {b.extent.index for e in driver.state._parts.extents.extents for b in e.blocks.values()}
    assert len(spread) == 4, "the blocks that are guaranteed lie in every extent"
    answer = two.admit("s", "b", prompt(22, start=9))
    assert isinstance(answer, Admitted)
    assert driver.report("a").cached_bytes == 12 * BLOCK_BYTES, "they were moved together, none was given up"
    assert one.run("again", "a", [*prompt(4, start=2), 1]).num_cached_blocks == 4


def test_a_wait_on_an_extent_pinned_by_another_geometry_ends_when_it_is_released() -> None:
    driver = Driver(num_extents=2, extent_bytes=16 * BLOCK_BYTES)
    driver.namespace("a", model="m1")
    driver.namespace("b", model="m2")
    one = driver.lease("lease-1", model="m1")
    two = driver.lease("lease-2", model="m2", geometry=small_geometry(2))
    one.run("pin", "a", prompt(17))
    assert isinstance(two.admit("s", "b", prompt(4, start=1)), Wait)
    one.release("pin")
    assert granted(two) == ["s"]
