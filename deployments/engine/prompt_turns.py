"""Whose prompts a step computes first: more urgent ones; of those, namespaces take turns by weight; then older ones."""

from __future__ import annotations

from remora.deployments.engine.sequence import Sequence
from remora.platform.base.ids import NamespaceId


class PromptTurns:
    """Namespaces that have prompts to compute get tokens of steps in proportion to their weights, however long their
    prompts are. One that has none for a while saves nothing up."""

    def __init__(self) -> None:
        #: Tokens over weight that the namespaces had, of those with prompts to compute.
        self._had: dict[NamespaceId, float] = {}

    def order(self, behind: list[Sequence]) -> None:
        """Sorts sequences that are to catch up, given in order of admission."""
        names = {sequence.namespace_id for sequence in behind}
        least = min((had for name, had in self._had.items() if name in names), default=0.0)
        had = self._had = {name: self._had.get(name, least) for name in names}
        if len(behind) > 1:
            behind.sort(key=lambda sequence: (-sequence.priority, had[sequence.namespace_id]))

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        """Counts tokens of a step, for a sequence of the last `order`."""
        self._had[sequence.namespace_id] += num_tokens / sequence.live.namespace.weight
