"""What every command and every answer of a pool has; the protocol itself is in namespaces/commands.py."""

from __future__ import annotations

import msgspec

from remora.platform.base.ids import LeaseId


class Command(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    lease_id: LeaseId
    #: 1, 2, 3, ... within the lease. Commands of the pool itself (LeaseLost, SetQuota) use 0 and are not replayed.
    call_no: int = 0


class Answer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass
