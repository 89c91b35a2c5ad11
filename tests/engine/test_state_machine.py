"""Any order of requests, cancellations, late answers, changing quotas, precisions and time: invariants hold after every
step."""

from __future__ import annotations

from engine_support import Harness, expected_greedy, rolled
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from remora.namespaces.edits import ContextPlan
from remora.platform.base.clock import ManualClock
from remora.platform.base.ids import ModelId, NamespaceId

PROMPTS = ["The remora travels with a ray.", "The remora travels alone", "a", "0123456789abcdef", "The remora"]


class EngineMachine(RuleBasedStateMachine):
    """Drives an engine whose pool's answers and events arrive when the machine says so."""

    @initialize(
        num_blocks=st.integers(16, 40),
        max_num_seqs=st.integers(1, 4),
        budget=st.integers(1, 24),
        share=st.sampled_from([0.0, 1.0]),
    )
    def start(self, num_blocks: int, max_num_seqs: int, budget: int, share: float) -> None:
        self.clock = ManualClock(1.0)
        self.num_blocks = num_blocks
        self.one = Harness(
            num_blocks=num_blocks,
            num_extents=2,
            namespaces={"ns": None, "other": 16},
            clock=self.clock,
            delivery="manual",
            max_num_seqs=max_num_seqs,
            max_step_tokens=budget,
            prompt_share=share,
            num_reserve_blocks=1,
        )
        self.requests: dict[str, tuple[str, int, int]] = {}

    @rule(
        prompt=st.sampled_from(PROMPTS),
        namespace=st.sampled_from(["ns", "other"]),
        max_tokens=st.integers(1, 30),
        n=st.sampled_from([1, 1, 2]),
        priority=st.integers(0, 1),
        timeout_s=st.sampled_from([0.5, 1e6]),
        limit=st.sampled_from([0, 0, 13, 20]),
    )
    def submit(self, prompt, namespace, max_tokens, n, priority, timeout_s, limit) -> None:
        """With a limit the context rolls."""
        request_id = self.one.submit(
            prompt, namespace=namespace, max_tokens=max_tokens, n=1 if limit else n, priority=priority,
            timeout_s=timeout_s, context=ContextPlan(limit_tokens=limit, keep_tokens=3) if limit else None,
        )  # fmt: skip
        self.requests[request_id] = (prompt, max_tokens, limit)

    @rule(data=st.data())
    def cancel(self, data) -> None:
        if self.requests:
            self.one.cancel(data.draw(st.sampled_from(sorted(self.requests))))

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        self.one.step(count)

    @rule(count=st.integers(1, 3))
    def answers_arrive(self, count: int) -> None:
        self.one.pool.deliver_answers(count)

    @rule(count=st.integers(1, 3))
    def events_arrive(self, count: int) -> None:
        self.one.pool.deliver_events(count)

    @rule(count=st.integers(1, 6))
    def all_is_well_for_a_while(self, count: int) -> None:
        for _ in range(count):
            self.one.step()
            self.one.pool.deliver_answers()
            self.one.pool.deliver_events()

    @rule(duration_s=st.sampled_from([0.01, 1.0]))
    def time_passes(self, duration_s: float) -> None:
        self.clock.advance(duration_s)
        self.one.pool.device.tick()
        self.one.pool.device.pass_on_events()

    @rule(namespace=st.sampled_from(["ns", "other"]), limit=st.integers(12, 40))
    def a_quota_changes(self, namespace: str, limit: int) -> None:
        size = self.one.geometry.block_bytes
        self.one.pool.device.set_quota(
            NamespaceId(namespace), ModelId("model"), limit_bytes=min(limit, self.num_blocks) * size
        )
        self.one.pool.device.pass_on_events()

    @rule(namespace=st.sampled_from(["ns", "other"]), is_narrow=st.booleans())
    def a_precision_changes(self, namespace: str, is_narrow: bool) -> None:
        """The fake decoder looks at V, which stays as it is."""
        if is_narrow:
            self.one.precisions[namespace] = ("int8", "fp32")
        else:
            self.one.precisions.pop(namespace, None)

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "one"):
            self.one.engine.check_integrity()
            self.one.pool.device.state.check_integrity()
            assert not self.one.fenced
            parked = [sequence.namespace_id for sequence in self.one.engine._scheduler.parked]
            assert len(parked) == len(set(parked)), "one of a namespace waits at the pool"

    def teardown(self) -> None:
        if not hasattr(self, "one"):
            return
        self.one.finish()
        for (request_id, _), output in self.one.outputs.items():
            prompt, max_tokens, limit = self.requests[request_id]
            expected = expected_greedy(prompt, max_tokens)
            if limit:
                expected, _ = rolled(list(prompt.encode()), max_tokens, limit=limit, keep=3)
            assert output.token_ids == expected[: len(output.token_ids)]
            if output.finish_reason == "length":
                assert output.token_ids == expected
            elif output.finish_reason == "error":
                assert output.error == "OverQuota"
            else:
                assert output.finish_reason == "abort"
        self.one.close()
        self.one.pool.deliver_answers()
        assert self.one.num_referenced_blocks == 0
        assert self.one.engine.stats().load_tokens == 0


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
