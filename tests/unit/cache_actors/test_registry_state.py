"""The directory and its readers' copies."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from remora.cache_actors.registry_state import (
    DirectoryCopy,
    RegistryEvent,
    RegistryState,
    ReplicaChanged,
    ReplicaLoad,
    ReplicaRecord,
    ReplicaRemoved,
    Settled,
)
from remora.namespaces.commands import ProcessIdentity
from remora.namespaces.geometry import KVGeometry, LayerGroup
from remora.platform.base.ids import ModelId, NamespaceId, PoolId, ReplicaId


def record(name: str, num_running: int = 0, model: str = "m") -> ReplicaRecord:
    return ReplicaRecord(
        replica_id=ReplicaId(name),
        model_id=ModelId(model),
        namespace_ids=(NamespaceId("n"),),
        node_id="node",
        pool_id=PoolId("pool"),
        process=ProcessIdentity(pid=1, start_time_ticks=2, boot_id="b"),
        endpoint="e",
        fingerprint=b"f",
        geometry=KVGeometry(groups=(LayerGroup(num_layers=1, num_kv_heads=1, head_dim=16),), block_tokens=16),
        max_model_len=128,
        load=ReplicaLoad(num_running=num_running),
    )


def follow(copy: DirectoryCopy, state: RegistryState) -> None:
    copy.update(state.changes_since(copy.incarnation, copy.version))


names = st.sampled_from("abcd")
events: st.SearchStrategy[RegistryEvent] = st.one_of(
    st.builds(lambda name, load: ReplicaChanged(record=record(name, load)), names, st.integers(0, 3)),
    st.builds(lambda name: ReplicaRemoved(replica_id=ReplicaId(name), reason=""), names),
    st.just(Settled()),
)


@given(st.lists(st.tuples(events, st.booleans()), max_size=40))
def test_a_copy_that_asks_now_and_then_equals_the_directory(history: list[tuple[RegistryEvent, bool]]) -> None:
    state, copy = RegistryState("one"), DirectoryCopy()
    for event, look in history:
        state.apply(event)
        state.check_integrity()
        if look:
            follow(copy, state)
            assert copy.replicas() == state.replicas()
    follow(copy, state)
    assert copy.replicas() == state.replicas()
    assert state.changes_since(copy.incarnation, copy.version).changed == ()


def test_a_reader_that_is_far_behind_gets_the_complete_directory() -> None:
    state, copy = RegistryState("one"), DirectoryCopy()
    state.apply(Settled())
    state.apply(ReplicaChanged(record=record("old")))
    follow(copy, state)
    for number in range(2000):
        state.apply(ReplicaChanged(record=record(f"r{number}")))
        state.apply(ReplicaRemoved(replica_id=ReplicaId(f"r{number}"), reason=""))
    state.apply(ReplicaRemoved(replica_id=ReplicaId("old"), reason=""))
    assert state.changes_since(copy.incarnation, 5).complete
    follow(copy, state)
    assert copy.replicas() == ()


def test_a_restarted_registry_empties_no_copy_before_replicas_could_register_again() -> None:
    first, copy = RegistryState("one"), DirectoryCopy()
    for name in "ab":
        first.apply(ReplicaChanged(record=record(name)))
    first.apply(Settled())
    follow(copy, first)
    second = RegistryState("two")
    follow(copy, second)
    assert [replica.replica_id for replica in copy.replicas()] == ["a", "b"]
    second.apply(ReplicaChanged(record=record("a", num_running=7)))
    follow(copy, second)
    assert [replica.load.num_running for replica in copy.replicas()] == [7, 0]
    second.apply(Settled())
    follow(copy, second)
    assert copy.replicas() == second.replicas() == (record("a", num_running=7),)


def test_a_copy_lists_the_replicas_of_a_model() -> None:
    state, copy = RegistryState("one"), DirectoryCopy()
    state.apply(ReplicaChanged(record=record("a", model="x")))
    state.apply(ReplicaChanged(record=record("b", model="y")))
    follow(copy, state)
    assert [replica.replica_id for replica in copy.replicas(ModelId("y"))] == ["b"]


def test_records_survive_the_wire() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(record("a", 3)), type=ReplicaRecord) == record("a", 3)
