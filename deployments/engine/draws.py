"""Randomness without state: a draw is a function of what it is for; no neighbour, restart or move changes it."""

from __future__ import annotations

import struct
from hashlib import blake2b

_PERSON = b"remora.draw"


def uniform(seed: int, choice_index: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits for the token at `position` of this choice; equal in every process."""
    data = struct.pack("<QQQ", seed & 0xFFFF_FFFF_FFFF_FFFF, choice_index, position)
    bits = int.from_bytes(blake2b(data, digest_size=8, person=_PERSON).digest(), "little")
    return (bits >> 11) * 2.0**-53


def seed_of_request(request_id: str) -> int:
    """The seed of a request that brought none; the same on each replica that takes the request over."""
    return int.from_bytes(blake2b(request_id.encode(), digest_size=8, person=_PERSON).digest(), "little")
