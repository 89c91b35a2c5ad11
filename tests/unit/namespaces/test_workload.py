"""The customer-service workload."""

from __future__ import annotations

from remora.namespaces.replay import OPTIMUM, ReplayResult, replay
from remora.namespaces.trace import count_unique_blocks
from remora.namespaces.workload import REPORT_SEEDS, TUNING_SEED, customer_service


def test_a_seed_gives_the_same_requests_each_time() -> None:
    assert customer_service(5, duration_s=600.0) == customer_service(5, duration_s=600.0)
    assert customer_service(5, duration_s=600.0) != customer_service(6, duration_s=600.0)
    assert TUNING_SEED not in REPORT_SEEDS


def test_turns_of_a_session_grow_keep_their_priority_and_end_at_most_once() -> None:
    trace = customer_service(5, duration_s=1800.0)
    assert [request.timestamp for request in trace] == sorted(request.timestamp for request in trace)
    last = {}
    for request in trace:
        before = last.get(request.session_id)
        if before is not None:
            assert request.hash_ids[: len(before.hash_ids)] == before.hash_ids
            assert len(request.hash_ids) > len(before.hash_ids)
            assert request.priority == before.priority
            assert not before.ends_session
        last[request.session_id] = request
    assert {request.priority for request in trace} == {-2, 0, 2}
    closed = sum(request.ends_session for request in last.values())
    assert 0.7 < closed / len(last) < 0.9
    assert count_unique_blocks(trace) > 5000


def test_the_default_uses_what_is_known_of_sessions_and_priorities() -> None:
    trace = customer_service(REPORT_SEEDS[0])
    lru, value, best = (replay(trace, policy, 2500) for policy in ("lru", "value", OPTIMUM))
    assert value.hit_rate - lru.hit_rate > 0.5 * (best.hit_rate - lru.hit_rate) > 0.05

    def live_chats(result: ReplayResult) -> float:
        return result.hits_by_priority[2] / result.lookups_by_priority[2]

    assert live_chats(value) > live_chats(best) - 0.02
    assert live_chats(value) > live_chats(lru) + 0.15
