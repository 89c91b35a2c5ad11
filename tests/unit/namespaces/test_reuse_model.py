"""What the reuse model learns does not depend on when it is asked."""

from __future__ import annotations

import random

from remora.namespaces.reuse_model import ReuseModel


def live(model: ReuseModel, *, ask_every: int) -> None:
    """Blocks of three classes are released, come back at various ages, or leave."""
    source, held = random.Random(3), list[tuple[int, int]]()
    for now in range(1, 600):
        if now >= model.next_tick:
            model.tick(now, capacity=40)
        if held and now % ask_every == 0:
            model.worth(held[0][0], now - held[0][1])
        rank = 1 + source.randrange(1 + now % 3)
        model.enter(rank, now)
        held.append((rank, now))
        if len(held) > 40:
            old_rank, since = held.pop(source.randrange(40))
            if source.random() < 1 / old_rank:
                model.returned(old_rank, now - since)
            model.leave(old_rank, since)


def test_a_model_that_is_seldom_asked_has_learnt_the_same() -> None:
    often, never = ReuseModel(), ReuseModel()
    live(often, ask_every=1)
    live(never, ask_every=1000)
    worths = [often.worth(rank, age) for rank in (1, 2, 3) for age in (0, 5, 20, 80)]
    assert worths == [never.worth(rank, age) for rank in (1, 2, 3) for age in (0, 5, 20, 80)]
    assert often.dump() == never.dump()
    assert len(set(worths)) > 6


def test_a_dump_has_what_was_learnt_though_nobody_asked() -> None:
    model, restored = ReuseModel(), ReuseModel()
    live(model, ask_every=1000)
    restored.load(model.dump())
    assert [restored.worth(rank, 3) for rank in (1, 2, 3)] == [model.worth(rank, 3) for rank in (1, 2, 3)]
    assert restored.worth(1, 3) != 1 / 4, "what an unobserved model says"
