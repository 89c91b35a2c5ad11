"""The pool moves blocks of running sequences together, and nobody can tell from what is generated."""

from __future__ import annotations

import random

import pytest
from engine_support import BLOCK_TOKENS, FAKE_GEOMETRY, FINGERPRINT, FakeModel, Harness, expected_greedy

from remora.cache_actors.local_pool import LocalDevice
from remora.namespaces.commands import Trim
from remora.namespaces.geometry import KVGeometry
from remora.platform.base.clock import ManualClock
from remora.platform.base.ids import LeaseId, ModelId, NamespaceId

#: Blocks of twice the size.
OTHER_GEOMETRY = KVGeometry(groups=FAKE_GEOMETRY.groups, block_tokens=2 * BLOCK_TOKENS)
NAMES = ("one", "two")


@pytest.fixture
def device() -> LocalDevice:
    unit = FAKE_GEOMETRY.block_bytes
    made = LocalDevice(data_bytes=40 * 24 * unit, extent_bytes=24 * unit, clock=ManualClock(100.0))
    for name in NAMES:
        made.set_quota(NamespaceId(name), ModelId(name))
    return made


def engines(device: LocalDevice) -> list[Harness]:
    return [
        Harness(
            model=FakeModel(),
            geometry=geometry,
            namespaces={name: None},
            pool=device.attach(geometry, model_id=ModelId(name), fingerprint=FINGERPRINT, relocates=True),
            clock=ManualClock(100.0),
            max_num_seqs=12,
        )
        for name, geometry in zip(NAMES, (FAKE_GEOMETRY, OTHER_GEOMETRY), strict=True)
    ]


def footprint(device: LocalDevice) -> tuple[int, int]:
    """Extents in use, and the fewest that could hold what is in them."""
    report = device.state.describe()
    packed = sum(-(-each.num_used_blocks // (24 // (1 + n))) for n, each in enumerate(report.geometries))
    return report.num_extents - report.num_unleased_extents, packed


def test_requests_of_two_models_that_run_through_compactions_say_what_they_would_have_said(device: LocalDevice) -> None:
    source = random.Random(5)
    one, two = engines(device)
    prompts: dict[tuple[int, str], str] = {}
    worst = 0.0
    num_moved = num_moving = 0
    for step in range(160):
        for number, harness in enumerate((one, two)):
            for _ in range(source.randrange(3) if step < 120 else 0):
                prompt = f"{source.randrange(4)} says {source.randrange(30)}" * source.randint(1, 4)
                name = harness.submit(prompt, namespace=NAMES[number], max_tokens=source.randint(2, 30))
                prompts[number, name] = prompt
            if source.random() < 0.1 and prompts:
                harness.cancel(source.choice([name for index, name in prompts if index == number] or ["none"]))
            harness.step()
        if step % 5 == 4:
            for name in NAMES:
                device.apply(Trim(lease_id=LeaseId(""), namespace_id=NamespaceId(name), target_bytes=30 * 256))
                answer = device.compact(NamespaceId(name))
                num_moved += answer.num_moved_blocks
                num_moving += answer.num_moving_blocks
            for harness in (one, two):
                harness.step()  # switches and acknowledges
            for name in NAMES:
                device.compact(NamespaceId(name))
            used, packed = footprint(device)
            worst = max(worst, used - 1.1 * packed)
            device.state.check_integrity()
    for number, harness in enumerate((one, two)):
        harness.finish()
        assert harness.engine.stats().num_failed_steps == 0
        for (index, name), prompt in prompts.items():
            if index == number:
                output = harness.outputs[name, 0]
                assert output.error is None
                assert output.token_ids == expected_greedy(prompt, len(output.token_ids))
        harness.close()
    assert num_moved > num_moving > 50
    assert worst <= 2.0, "but for one extent of each geometry that is not full"
