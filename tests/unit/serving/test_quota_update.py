"""From the quotas that a pool has to those that a new configuration grants."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from remora.cache_actors.pool_settings import POOL_LEASE
from remora.namespaces.commands import Quota, SetQuota
from remora.namespaces.quota_changes import quota_changes
from remora.namespaces.report import NamespaceReport
from remora.platform.base.ids import ModelId, NamespaceId

ARENA_BYTES = 100


def report(name: str, guaranteed: int, limit: int = ARENA_BYTES) -> NamespaceReport:
    return NamespaceReport(
        namespace_id=NamespaceId(name),
        model_id=ModelId("m"),
        tenant="",
        share_group="",
        guaranteed_bytes=guaranteed,
        limit_bytes=limit,
        weight=1.0,
        used_bytes=0,
        cached_bytes=0,
        borrowed_bytes=0,
        num_running=0,
        num_waiting=0,
        num_admitted=0,
        num_preempted=0,
        lookup_tokens=0,
        hit_tokens=0,
        evicted_blocks={},
    )


def command(name: str, guaranteed: int, limit: int = ARENA_BYTES) -> SetQuota:
    return SetQuota(
        lease_id=POOL_LEASE,
        namespace_id=NamespaceId(name),
        model_id=ModelId("m"),
        quota=Quota(guaranteed_bytes=guaranteed, limit_bytes=limit, weight=1.0),
        tenant="",
        share_group="",
    )


def test_what_is_as_it_should_be_is_left_alone() -> None:
    assert quota_changes([report("a", 10), report("gone", 0)], [command("a", 10)]) == []


def test_a_changed_limit_and_a_new_namespace_are_told() -> None:
    changes = quota_changes([report("a", 10, 50)], [command("a", 10, 60), command("b", 5)])
    assert changes == [command("a", 10, 60), command("b", 5)]


def test_a_namespace_that_is_no_more_gives_its_guarantee_up() -> None:
    assert quota_changes([report("gone", 10)], [command("a", 90)])[0] == command("gone", 0)


def test_guarantees_in_a_tree_go_up_from_the_root_and_down_from_the_leaves() -> None:
    small, large = [command("a", 10), command("a/b", 10)], [command("a", 20), command("a/b", 20)]
    present = [report("a", 10), report("a/b", 10)]
    assert [each.namespace_id for each in quota_changes(present, large[::-1])] == ["a", "a/b"]
    present = [report("a", 20), report("a/b", 20)]
    assert [each.namespace_id for each in quota_changes(present, small)] == ["a/b", "a"]


def test_a_parent_that_is_no_more_keeps_what_its_children_are_guaranteed() -> None:
    changes = quota_changes([report("a", 30), report("a/b", 10)], [command("a/b", 15)])
    assert changes == [command("a", 15), command("a/b", 15)]


_guarantees = st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 100)).filter(
    lambda each: sum(each.values()) <= ARENA_BYTES
)


@given(_guarantees, _guarantees)
def test_guarantees_fit_the_arena_after_every_single_change(before: dict[str, int], after: dict[str, int]) -> None:
    wanted = [command(name, guaranteed) for name, guaranteed in after.items()]
    present = dict(before)
    for change in quota_changes(list(itertools.starmap(report, before.items())), wanted):
        present[change.namespace_id] = change.quota.guaranteed_bytes
        assert sum(present.values()) <= ARENA_BYTES
    assert {name: value for name, value in present.items() if value} == {
        name: value for name, value in after.items() if value
    }
