"""What the next step computes and who may come in.

There is no prefill and no decode phase: each running sequence catches up with its token log within the step's budget.
Where some decode, those that catch up get less of it, so that tokens keep coming (`_prompt_budget`).
"""

from __future__ import annotations

from typing import NamedTuple

from remora.deployments.engine.base import EngineConfig
from remora.deployments.engine.prompt_turns import PromptTurns
from remora.deployments.engine.sequence import Phase, Sequence
from remora.deployments.engine.step_costs import StepCosts
from remora.deployments.engine.waiting import WaitingQueue
from remora.deployments.prefix_hints import PrefixHints
from remora.platform.base.errors import IntegrityError
from remora.platform.base.ids import NamespaceId


class Scheduled(NamedTuple):
    """`num_tokens` of the sequence's pending tokens are computed in this step."""

    sequence: Sequence
    num_tokens: int

    @property
    def wants_logits(self) -> bool:
        """Whether this step reaches the end of the log, so that a token is sampled."""
        return self.num_tokens == self.sequence.num_pending_tokens


class Scheduler:
    """The sets of sequences by phase, and the choice among them."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        #: Steps that are under way at once.
        self.num_lanes = 1
        self.hints = PrefixHints()
        self.waiting = WaitingQueue(quantum_tokens=4.0 * config.max_step_tokens, hints=self.hints)
        #: In order of admission.
        self.running: list[Sequence] = []
        self.admitting: set[Sequence] = set()
        self.parked: set[Sequence] = set()
        self._costs = StepCosts()
        self._prompt_turns = PromptTurns()
        self._turn_no = 0

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.admitting) + len(self.parked)

    @property
    def parked_tokens(self) -> int:
        """Of sequences that wait for memory at the pool. May be asked from any thread, like waiting_tokens."""
        return sum(sequence.num_tokens for sequence in list(self.parked))

    @property
    def waiting_tokens(self) -> int:
        """Of sequences that wait for a slot or for memory."""
        admitting_tokens = sum(sequence.num_tokens for sequence in list(self.admitting))
        return self.parked_tokens + admitting_tokens + self.waiting.num_tokens

    # ---- phases

    def enqueue(self, sequence: Sequence) -> None:
        sequence.phase = Phase.WAITING
        self.waiting.push(sequence)

    def set_admitting(self, sequence: Sequence) -> None:
        sequence.phase = Phase.ADMITTING
        self.admitting.add(sequence)

    def set_parked(self, sequence: Sequence) -> None:
        self.admitting.discard(sequence)
        sequence.phase = Phase.PARKED
        self.parked.add(sequence)

    def set_running(self, sequence: Sequence) -> None:
        self.admitting.discard(sequence)
        self.parked.discard(sequence)
        sequence.phase = Phase.RUNNING
        self.running.append(sequence)

    def withdraw(self, sequence: Sequence, phase: Phase) -> None:
        """Takes the sequence out of wherever it is and leaves it in `phase` (HELD or FINISHED)."""
        match sequence.phase:
            case Phase.WAITING:
                self.waiting.remove(sequence)
            case Phase.ADMITTING:
                self.admitting.remove(sequence)
            case Phase.PARKED:
                self.parked.remove(sequence)
            case Phase.RUNNING:
                self.running.remove(sequence)
        sequence.phase = phase

    # ---- admission

    def parked_of(self, namespace_id: NamespaceId) -> list[Sequence]:
        """The namespace's sequences that the pool has parked."""
        return [sequence for sequence in self.parked if sequence.namespace_id == namespace_id]

    def next_to_admit(self) -> Sequence | None:
        """The next sequence to ask the pool for, while there is a slot in the batch; None otherwise.

        While the pool parks a sequence of a namespace, only more urgent ones of that namespace are asked for: the rest
        would only queue behind it. Parked sequences hold no slot.
        """
        if not len(self.waiting) or len(self.running) + len(self.admitting) >= self._config.max_num_seqs:
            return None
        parked = {sequence.namespace_id: sequence.priority for sequence in self.parked}
        return self.waiting.pop(lambda namespace_id, priority: priority > parked.get(namespace_id, priority - 1))

    # ---- the step

    def plan_step(self) -> list[Scheduled]:
        """Sequences at the end of their log first, one token each; then the others catch up with what is left, or with
        what `_prompt_budget` gives them beside those.

        Never more tokens or sequences than a batch holds. Sequences that wait for a block are left out. Where not all
        fit, those that waited longest go first, and one place stays for a sequence that catches up. With several lanes,
        whose steps overlap, one lane takes its share of the sequences.
        """
        config = self._config
        decoding: list[Sequence] = []
        behind: list[Sequence] = []
        is_decoding = False
        for sequence in self.running:
            if sequence.num_free_slots > 0 and sequence.num_computable_tokens > 0:
                (decoding if sequence.num_pending_tokens == 1 else behind).append(sequence)
            elif sequence.num_flying_tokens and not sequence.num_pending_tokens:
                is_decoding = True  # in a step under way, and behind this one next
        budget, places = config.max_step_tokens, config.max_num_seqs
        if self.num_lanes > 1:
            places = min(places, -(-len(self.running) // self.num_lanes))
        most = min(budget, places) - (1 if behind and min(budget, places) > 1 else 0)
        if len(decoding) > most:
            decoding = sorted(decoding, key=lambda item: item.last_turn_no)[:most]
        plan = [Scheduled(sequence, 1) for sequence in decoding]
        budget -= len(plan)
        if behind:
            if decoding or is_decoding:
                budget = min(budget, self._prompt_budget(behind[0].block_tokens))
            self._prompt_turns.order(behind)
            plan += self._catch_up(behind, budget, places - len(plan))
        for sequence, _ in plan:
            self._turn_no += 1
            sequence.last_turn_no = self._turn_no
        return plan

    def learn(self, plan: list[Scheduled], step_s: float) -> None:
        """Takes into account how long the device took for a step."""
        num_decoding = sum(num_tokens == 1 for _, num_tokens in plan)
        self._costs.observe(num_decoding, sum(num_tokens for _, num_tokens in plan) - num_decoding, step_s)

    def _prompt_budget(self, block_tokens: int) -> int:
        """Tokens that catch up in a step in which others decode: so many whole blocks, at least one, that they take no
        more than `prompt_share` of it, if all that are here, waiting ones included, decoded in it.

        So the longest time between two tokens is a multiple of that between tokens of a full batch, also while few
        decode; the more wait, the more of a step is theirs, and alone a step of few sequences is not stretched far.
        """
        share = self._config.prompt_share
        if share >= 1:
            return self._config.max_step_tokens
        num_here = len(self.running) + len(self.admitting) + len(self.waiting)
        num_sequences = -(-min(num_here, self._config.max_num_seqs) // self.num_lanes)
        tokens = min(self._costs.tokens_worth(num_sequences) * share / (1 - share), float(self._config.max_step_tokens))
        return max(1, int(tokens / block_tokens)) * block_tokens

    def _catch_up(self, behind: list[Sequence], budget: int, places: int) -> list[Scheduled]:
        """One after the other, each up to its end or to the end of a block: a prompt that is whole serves its client,
        and a block that is whole can be published."""
        plan: list[Scheduled] = []
        for sequence in behind:
            if budget <= 0 or len(plan) >= places:
                break
            num_tokens = min(sequence.num_computable_tokens, sequence.num_free_slots, budget)
            if num_tokens < sequence.num_computable_tokens:
                num_over = (sequence.num_begun_tokens + num_tokens) % sequence.block_tokens
                if num_over < num_tokens:
                    num_tokens -= num_over
                elif plan:
                    continue
            plan.append(Scheduled(sequence, num_tokens))
            self._prompt_turns.charge(sequence, num_tokens)
            budget -= num_tokens
        return plan

    def check_integrity(self) -> None:
        """Raises IntegrityError unless every sequence is in the set of its phase, once."""
        for name, members, phase in (
            ("running", self.running, Phase.RUNNING),
            ("admitting", self.admitting, Phase.ADMITTING),
            ("parked", self.parked, Phase.PARKED),
        ):
            for sequence in members:
                if sequence.phase is not phase:
                    raise IntegrityError(f"a {sequence.phase.value} sequence is among the {name} ones")
                sequence.check_integrity()
        if len(set(self.running)) != len(self.running):
            raise IntegrityError("a sequence runs twice")
