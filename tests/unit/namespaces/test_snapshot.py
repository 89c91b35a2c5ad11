"""A restart in the middle of contention changes nothing that happens afterwards."""

from __future__ import annotations

from pool_driver import BLOCK_BYTES, Driver, Replica, prompt

from remora.namespaces.commands import Preempt, Wait


def contended() -> tuple[Driver, list[Replica]]:
    """Full memory, refused extensions, a victim that has not gone yet, lines in two namespaces, residue of others."""
    driver = Driver(num_extents=2)
    driver.namespace("a", guaranteed=8 * BLOCK_BYTES, weight=2.0)
    driver.namespace("b", tenant="t", share_group="g")
    driver.namespace("c", tenant="t", share_group="g")
    replicas = [driver.lease(f"lease-{number}") for number in range(3)]
    for number, replica in enumerate(replicas):
        replica.run("old", "abc"[number], prompt(6, start=number), session=f"x{number}", epoch=2)
        replica.release("old")
    for turn in range(2):
        for number in (2, 0, 1):
            tokens = [*prompt(4, start=number), *prompt(1, start=50 + turn)]
            replicas[number].run(f"run{turn}", "abc"[number], tokens, priority=turn)
    replicas[1].admit("big", "b", prompt(12, start=9))
    for number, replica in enumerate(replicas):
        replica.admit("wait", "abc"[number], prompt(20, start=20 + number), deadline_s=5.0 + number)
    replicas[2].extend("run1", num_blocks=3)
    return driver, replicas


def afterwards(driver: Driver, replicas: list[Replica]) -> list[object]:
    seen: list[object] = []
    for replica in (replicas[1], replicas[0], replicas[2]):
        seen.append(replica.extend("run1", num_blocks=4))
    driver.tick(6.0)
    for replica in replicas:
        gone = [event.sequence_id for event in replica.events() if isinstance(event, Preempt)]
        seen.append((gone, replica.release(*gone)))
        seen.append(replica.admit("late", "abc"[replicas.index(replica)], prompt(7, start=40)))
    driver.lose(replicas[0])
    for replica in replicas[1:]:
        seen.append(replica.release("run0", "run1", "wait"))
        seen.append(replica.events())
    return [*seen, driver.state.describe(), driver.state.snapshot()]


def test_a_restart_under_contention_gives_the_same_state_and_the_same_future() -> None:
    plain, replicas = contended()
    report = plain.state.describe()
    assert report.num_preempting
    assert sum(namespace.num_waiting for namespace in report.namespaces) >= 3
    restarted, others = contended()
    restarted.restart()
    assert afterwards(plain, replicas) == afterwards(restarted, others)


def test_a_newcomer_lines_up_after_a_restart_as_it_would_have_before() -> None:
    driver = Driver(num_extents=1)
    for name in ("a", "b", "c"):
        driver.namespace(name)
    replica = driver.lease()
    replica.run("run", "a", prompt(10))
    assert isinstance(replica.admit("large", "b", prompt(12, start=1)), Wait)
    driver.restart()
    assert isinstance(replica.admit("small", "c", prompt(6, start=2)), Wait), "more than its fair share"


def test_what_former_geometries_and_tenants_left_behind_is_remembered() -> None:
    driver = Driver(num_extents=1)
    driver.namespace("a")
    driver.namespace("b")
    replica = driver.lease()
    blocks = replica.admit("s", "a", prompt(3)).blocks
    replica.release("s")
    driver.restart()
    driver.effects.clear()
    replica.admit("t", "b", prompt(3))
    (effect,) = driver.effects
    assert effect.blocks == blocks  # type: ignore[union-attr]
