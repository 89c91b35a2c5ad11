"""Attempts that are made ready at another replica while the one before them goes on.

    sent ─► ready ─► taken: it is the request's attempt now
       └───────┴───► dropped: the request has ended or goes on elsewhere; refused: the replica will not have it

A standby is an attempt with a number of its own. One that is dropped has used it up, so that nothing that its replica
still says can be taken for a later attempt.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from remora.deployments.engine.messages import FreezeOrder, Handover, Resumption, TokenDelta
from remora.deployments.replica_connection import ReplicaConnection
from remora.deployments.request_stream import RequestStream, error_of
from remora.platform.base.errors import Conflict, IntegrityError, RemoraError, Unavailable
from remora.platform.base.ids import ReplicaId, RequestId

if TYPE_CHECKING:
    from remora.deployments.router import RouterCore


class Standby:
    """One of them."""

    def __init__(self, stream: RequestStream, connection: ReplicaConnection) -> None:
        self.stream = stream
        self.connection = connection
        self.attempt = stream.claim_attempt()
        self.attempt_id = stream.id_of(self.attempt)
        #: Output that it was sent with.
        self.num_output_tokens = stream.log.num_tokens
        #: None: it waits for its resumption; else why it cannot.
        self.answer: asyncio.Future[RemoraError | None] = asyncio.get_running_loop().create_future()

    @property
    def is_ready(self) -> bool:
        return self.answer.done() and self.answer.result() is None


class Standbys:
    """Of one router; lives on its event loop. A stream has one at most."""

    def __init__(self, core: RouterCore) -> None:
        self._core = core
        self._by_id: dict[RequestId, Standby] = {}

    # ---- in the order of a move --------------------------------------------------------------------------------------

    def send(self, stream: RequestStream, target: ReplicaId) -> Standby:
        """Has the stream's next attempt made ready at `target`, while the current one goes on."""
        core = self._core
        connection = core.fleet.connection(target)
        if connection is None or connection.card is None:
            raise Unavailable(f"the replica {target} is not connected")
        stream.kv_source = core.placer.sources.find((stream.replica_id,), connection.card.pool_id)
        standby = Standby(stream, connection)
        self._by_id[standby.attempt_id] = stream.standby = standby
        connection.send(stream.attempt_request(core.config.http.queue_timeout_s, standby.attempt))
        return standby

    def freeze(
        self, stream: RequestStream, standby: Standby
    ) -> tuple[asyncio.Future[Handover | None], asyncio.Future[float]]:
        """Stops the current attempt. The futures hold what it hands over (None: it is over), and the pause, from now to
        the first delta of the next. Raises Conflict when the request goes on elsewhere, or has ended."""
        source = None if stream.replica_id is None else self._core.fleet.connection(stream.replica_id)
        if stream.standby is not standby or source is None:
            raise Conflict("The request has ended, or goes on elsewhere.", field="to")
        num_known = len(stream.request.prompt_token_ids) + standby.num_output_tokens - 1
        landing, freezing = stream.take_off(stream.replica_id), stream.freeze()
        source.freeze(FreezeOrder(request_id=stream.attempt_id, num_tokens=num_known))
        return freezing, landing

    def take(self, stream: RequestStream, standby: Standby) -> bool:
        """The standby becomes the stream's attempt. False if it is none any more."""
        if stream.standby is not standby or not standby.is_ready or stream.replica_id is None:
            return False
        stream.handed_over = (stream.replica_id, stream.attempt_id)
        self._forget(standby)
        self._core.switch(stream, standby)
        return True

    def resume(self, stream: RequestStream, standby: Standby, handover: Handover) -> None:
        """Lets the attempt go on behind what the client has, unless another has begun meanwhile, or it has ended."""
        if stream.attempt != standby.attempt or stream.replica_id != standby.connection.replica_id:
            return
        token_ids = stream.log.token_ids()[0][standby.num_output_tokens :]
        standby.connection.resume(Resumption(request_id=standby.attempt_id, token_ids=token_ids, handover=handover))

    def release_source(self, stream: RequestStream) -> None:
        """The attempt that was handed over need not keep its blocks any more."""
        if stream.handed_over is not None:
            (replica_id, attempt_id), stream.handed_over = stream.handed_over, None
            connection = self._core.fleet.connection(replica_id)
            if connection is not None:
                connection.cancel(attempt_id)

    # ---- what comes between ------------------------------------------------------------------------------------------

    def hear(self, delta: TokenDelta) -> bool:
        """Takes what is said of a standby; False if it is of something else."""
        standby = self._by_id.get(delta.request_id)
        if standby is None:
            return False
        if delta.is_ready and not standby.answer.done():
            standby.answer.set_result(None)
        elif delta.finish_reason is not None:
            is_error = delta.finish_reason == "error"
            self.refuse(standby, error_of(delta) if is_error else Unavailable("it does not wait there any more"))
        return True

    def find(self, attempt_id: RequestId) -> Standby | None:
        return self._by_id.get(attempt_id)

    def lost(self, replica_id: ReplicaId, reason: str) -> None:
        """Nothing that was sent there is any more."""
        for standby in [each for each in self._by_id.values() if each.connection.replica_id == replica_id]:
            self.refuse(standby, Unavailable(f"the replica was lost: {reason}"))

    def refuse(self, standby: Standby, error: RemoraError) -> None:
        """Its replica is lost, or will not have it."""
        self._forget(standby)
        if not standby.answer.done():
            standby.answer.set_result(error)

    def drop(self, stream: RequestStream) -> None:
        """Ends the stream's standby, if it has one."""
        standby = stream.standby
        if standby is not None:
            standby.connection.cancel(standby.attempt_id)
            self.refuse(standby, Unavailable("the request has gone on elsewhere, or has ended"))

    def end(self, stream: RequestStream) -> None:
        """The stream's attempt is over: whatever was under way to hand it over is."""
        self.drop(stream)
        stream.frozen(None)
        self.release_source(stream)

    def _forget(self, standby: Standby) -> None:
        if self._by_id.pop(standby.attempt_id, None) is not None:
            standby.stream.standby = None

    def check_integrity(self) -> None:
        """Raises IntegrityError unless each is its stream's, and newer than its attempt."""
        for attempt_id, standby in self._by_id.items():
            stream = standby.stream
            if stream.standby is not standby or standby.attempt <= stream.attempt:
                raise IntegrityError(f"standby {attempt_id} is not what its request goes on with")
            if stream.closed or stream.log.finished:
                raise IntegrityError(f"standby {attempt_id} is of a request that has ended")
