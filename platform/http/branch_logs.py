"""The log that branches go on behind, as each of their models has it: made once for all branches of one model.

parent's log ─┬─ branches of its own model          as it is
              └─ of another: read by that model, its KV brought there (session_models.py), before they start
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from remora.deployments.moves import Moved
from remora.namespaces.session_log import ModelLog, SessionState
from remora.platform.base.errors import RequestError
from remora.platform.base.ids import ModelId, NamespaceId
from remora.platform.http.branch_request import BranchRequest
from remora.platform.http.caller import Caller
from remora.platform.http.services import Services
from remora.platform.http.session_models import as_state, bring, log_for


class BranchLog(NamedTuple):
    """Of the branches of one model."""

    #: The parent, as the model has it.
    state: SessionState
    #: With another model than the parent's: its log, and how the KV got there.
    log: ModelLog | None = None
    moved: Moved | None = None


class BranchLogs:
    """Of one call; `stop` ends what is still under way."""

    def __init__(self, services: Services, caller: Caller, parent: SessionState) -> None:
        """`parent` with its tokens, up to where the branches leave it."""
        self._services = services
        self._caller = caller
        self._parent = parent
        self._made: dict[tuple[ModelId, NamespaceId], asyncio.Task[BranchLog]] = {}

    def check(self, wanted: BranchRequest) -> None:
        """Raises NotFound for a model or namespace that does not exist, with the field named from the call's body."""
        try:
            self._place_of(wanted)
        except RequestError as error:
            raise wanted.named(error) from None

    async def of(self, wanted: BranchRequest, trace_context: Mapping[str, str]) -> BranchLog:
        """Raises a RemoraError when the branch's model does not take the log, or has no room for it."""
        place = self._place_of(wanted)
        if place is None:
            return BranchLog(self._parent)
        if place not in self._made:
            made = self._made[place] = asyncio.create_task(self._make(*place, trace_context))
            made.add_done_callback(lambda task: task.cancelled() or task.exception())
        # One branch that is given up takes it from no other.
        return await asyncio.shield(self._made[place])

    def _place_of(self, wanted: BranchRequest) -> tuple[ModelId, NamespaceId] | None:
        """Of the branch's model; None: where the parent is."""
        catalog, fields = self._services.core.catalog, wanted.fields
        model_id = self._caller.find_model(catalog, fields.model)
        if model_id == self._parent.model_id:
            return None
        return model_id, self._caller.find_namespace(catalog, model_id, fields.namespace)

    async def _make(self, model_id: ModelId, namespace_id: NamespaceId, trace_context: Mapping[str, str]) -> BranchLog:
        log = await log_for(self._services, self._parent, model_id, namespace_id)
        moved, log = await bring(self._services, self._parent, log, trace_context)
        state = msgspec.structs.replace(as_state(self._parent, log), owner=moved.replica)
        return BranchLog(state, log, moved)

    def stop(self) -> None:
        for task in self._made.values():
            task.cancel()
