"""One lease, several precisions of its model: they share memory and quotas, and never each other's blocks."""

from __future__ import annotations

from pool_driver import BLOCK_BYTES, Driver, Replica, prompt, small_geometry

from remora.namespaces.commands import (
    AddFormat,
    Admitted,
    Compact,
    Compacted,
    FormatAdded,
    QuotaSet,
    Refused,
    SetQuota,
)
from remora.namespaces.effects import ZeroBlocks
from remora.namespaces.geometry import KVPrecision
from remora.namespaces.quota_changes import quota_changes, quota_of
from remora.namespaces.sequence_commands import Clear, Edited, SequenceCopy, Settle, Settled

INT8: KVPrecision = ("int8", "int8")
INT8_BYTES = small_geometry().with_precision(INT8).block_bytes


def two_formats(**driver_options: int) -> tuple[Driver, Replica]:
    """Namespaces "a" in the model's bf16 and "b" in int8, in one share group; one replica of both."""
    driver = Driver(**driver_options)
    driver.namespace("a", tenant="t", share_group="g")
    driver.namespace("b", tenant="t", share_group="g", kv_precision=INT8)
    replica = driver.lease()
    assert replica.add_format(INT8) == FormatAdded(block_bytes=INT8_BYTES)
    return driver, replica


def test_blocks_of_another_precision_are_never_found_whatever_hash_is_asked_for() -> None:
    driver, replica = two_formats()
    replica.cache("s1", "a", prompt(3))
    replica.cache("s2", "b", prompt(3), kv_precision=INT8)
    assert replica.admit("s3", "a", prompt(3)).num_cached_blocks == 2
    assert replica.admit("s4", "b", prompt(3), kv_precision=INT8).num_cached_blocks == 2
    stolen = replica.hashes("a", prompt(3))
    assert replica.admit("s5", "b", prompt(3), hashes=stolen, kv_precision=INT8).num_cached_blocks == 0
    assert {g.block_bytes: g.num_used_blocks for g in driver.state.describe().geometries} == {BLOCK_BYTES: 4, 192: 7}


def test_a_namespace_is_charged_the_bytes_of_the_precision_that_its_sequences_have() -> None:
    driver, replica = two_formats()
    replica.run("s1", "b", prompt(4), kv_precision=INT8)
    assert driver.report("b").used_bytes == 4 * INT8_BYTES
    replica.run("s2", "b", prompt(2, start=1))
    assert driver.report("b").used_bytes == 4 * INT8_BYTES + 2 * BLOCK_BYTES
    replica.release("s1", "s2")
    assert driver.report("b").cached_bytes == 4 * INT8_BYTES + 2 * BLOCK_BYTES


def test_a_limit_counts_what_a_request_needs_in_its_precision() -> None:
    driver, replica = two_formats()
    driver.quota("b", limit=4 * INT8_BYTES, tenant="t", share_group="g", kv_precision=INT8)
    assert isinstance(replica.admit("s1", "b", prompt(4), kv_precision=INT8), Admitted)
    replica.release("s1")
    refused = replica.admit("s2", "b", prompt(4))
    assert refused.needed_bytes == 4 * BLOCK_BYTES > refused.limit_bytes


def test_a_guarantee_is_counted_in_blocks_of_the_namespaces_precision() -> None:
    driver = Driver(num_extents=2)
    driver.namespace("b", guaranteed=5 * BLOCK_BYTES, kv_precision=INT8)
    replica = driver.lease()
    assert driver.state._parts.book.namespaces["b"].guaranteed_bytes == 5 * BLOCK_BYTES
    replica.add_format(INT8)
    whole = 5 * BLOCK_BYTES // INT8_BYTES * INT8_BYTES
    assert driver.state._parts.book.namespaces["b"].guaranteed_bytes == whole
    driver.quota("b", guaranteed=5 * BLOCK_BYTES)
    assert driver.state._parts.book.namespaces["b"].guaranteed_bytes == 5 * BLOCK_BYTES


def test_each_precision_with_a_guarantee_needs_extents_of_its_own() -> None:
    driver = Driver(num_extents=2)
    driver.namespace("a", guaranteed=20 * BLOCK_BYTES)
    driver.namespace("b", guaranteed=4 * BLOCK_BYTES, kv_precision=INT8)
    before = driver.lease()
    refused = before.add_format(INT8)
    assert isinstance(refused, Refused)
    assert refused.error == "ConfigError"
    assert "need 3 extents" in refused.message
    assert len(driver.state.describe().geometries) == 1, "a refusal leaves no trace"
    assert before.admit("s1", "a", prompt(1), kv_precision=INT8).error == "InvalidRequest"


def test_a_precision_can_change_while_sequences_run() -> None:
    driver, replica = two_formats()
    replica.run("old", "b", prompt(3), kv_precision=INT8)
    assert isinstance(driver.quota("b", tenant="t", share_group="g"), QuotaSet)
    assert driver.report("b").kv_precision is None
    assert replica.run("new", "b", prompt(3)).num_cached_blocks == 0
    assert replica.extend("old").grants[0].sequence_id == "old"
    driver.restart()
    assert replica.release("old", "new") == 2
    assert replica.admit("again", "b", prompt(3), kv_precision=INT8).num_cached_blocks == 2


def test_a_restart_keeps_formats_and_what_runs_in_them() -> None:
    driver, replica = two_formats()
    replica.run("s1", "b", prompt(3), kv_precision=INT8)
    driver.restart()
    assert driver.report("b").kv_precision == INT8
    edited = replica.call(SequenceCopy, source_id="s1", target_id="s2")
    assert isinstance(edited, Edited)
    assert isinstance(replica.call(Settle, sequence_ids=("s2",)), Settled)
    assert replica.admit("s3", "b", prompt(3), kv_precision=INT8).num_cached_blocks == 2
    driver.restart()
    assert driver.report("b").used_bytes == 4 * INT8_BYTES


def test_a_format_must_be_of_the_leases_model_and_have_one_fingerprint() -> None:
    _, replica = two_formats()
    taller = small_geometry(2).with_precision(INT8)
    refused = replica.call(AddFormat, geometry=taller, fingerprint=b"x")
    assert (refused.error, "differ in precision only" in refused.message) == ("InvalidRequest", True)
    again = replica.call(AddFormat, geometry=replica.geometry.with_precision(INT8), fingerprint=b"x")
    assert (again.error, "another fingerprint" in again.message) == ("Conflict", True)
    assert isinstance(replica.add_format(INT8), FormatAdded), "to say it again is harmless"


def test_clearing_forgets_and_zeroes_every_precision() -> None:
    driver, replica = two_formats()
    replica.cache("s1", "b", prompt(2))
    replica.cache("s2", "b", prompt(3), kv_precision=INT8)
    driver.effects.clear()
    cleared = replica.call(Clear, namespace_id="b", data=True)
    assert cleared.num_blocks == 5
    zeroed = {effect.block_bytes: len(effect.blocks) for effect in driver.effects if isinstance(effect, ZeroBlocks)}
    assert zeroed == {BLOCK_BYTES: 2, INT8_BYTES: 3}


def test_compaction_of_a_namespace_covers_what_it_holds_in_every_precision() -> None:
    driver, replica = two_formats(num_extents=6)
    for number in range(4):
        replica.cache(f"a{number}", "b", prompt(8, start=number))
        replica.cache(f"b{number}", "b", prompt(8, start=number), kv_precision=INT8)
    answer = driver.apply(Compact(lease_id="", namespace_id="b"))
    assert isinstance(answer, Compacted)
    assert answer.num_extents == sum(g.num_extents for g in driver.state.describe().geometries)


def test_a_changed_precision_is_a_change_of_the_configuration() -> None:
    driver, _ = two_formats()
    reports = driver.state.describe().namespaces
    same = quota_changes(reports, [_wanted(driver, "a", None), _wanted(driver, "b", INT8)])
    assert same == []
    changed = quota_changes(reports, [_wanted(driver, "a", INT8), _wanted(driver, "b", INT8)])
    assert [(command.namespace_id, command.kv_precision) for command in changed] == [("a", INT8)]


def _wanted(driver: Driver, name: str, kv_precision: KVPrecision | None) -> SetQuota:
    report = driver.report(name)
    return SetQuota(
        lease_id="",
        namespace_id=name,
        model_id=report.model_id,
        quota=quota_of(report),
        tenant=report.tenant,
        share_group=report.share_group,
        kv_precision=kv_precision,
    )
