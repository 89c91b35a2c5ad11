"""Request traces: which blocks each request looked up, in order of time.

One JSON object a line, as the Mooncake project publishes them (FAST'25 release): `timestamp` in milliseconds and
`hash_ids`, one id per block, equal ids meaning equal prefixes. Optional and our own: `session_id`, `priority` (higher
is more important), and `ends_session`, true on the last request of a session when the application says so.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from remora.platform.base.errors import InvalidRequest
from remora.platform.base.ids import BlockHash


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request: the blocks of its prompt, a prefix of which may be cached."""

    hash_ids: tuple[int, ...]
    timestamp: int = 0
    session_id: str = ""
    priority: int = 0
    ends_session: bool = False

    def hashes(self) -> list[BlockHash]:
        return [BlockHash(hash_id.to_bytes(8, "little")) for hash_id in self.hash_ids]


_DECODER = msgspec.json.Decoder(TraceRequest)


def read_trace(lines: Iterable[str | bytes]) -> list[TraceRequest]:
    """All requests. Raises InvalidRequest with the number of a line that is not one."""
    requests = []
    for line_no, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            request = _DECODER.decode(line)
        except msgspec.MsgspecError as error:
            raise InvalidRequest(f"line {line_no} of the trace is no request: {error}") from error
        if any(not 0 <= hash_id < 1 << 64 for hash_id in request.hash_ids):
            raise InvalidRequest(f"line {line_no} of the trace: hash_ids must be from 0 to 2**64 - 1")
        requests.append(request)
    return requests


def count_unique_blocks(trace: Iterable[TraceRequest]) -> int:
    """Different blocks of the trace: the size of a cache that never evicts."""
    return len({hash_id for request in trace for hash_id in request.hash_ids})
