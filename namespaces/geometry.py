"""The shape of KV: what makes two blocks interchangeable in shape."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Literal

import msgspec

from remora.platform.base.ids import GeometryId

Precision = Literal["fp32", "bf16", "int8", "int5", "int4"]
#: Of K and of V.
KVPrecision = tuple[Precision, Precision]

#: What a K or V of integers is: its values share scales, which lie in the block.
QUANTISED: frozenset[Precision] = frozenset({"int8", "int5", "int4"})
#: Values of one int5 or int4 row that share a scale; the last group of a row may be shorter. int8 has one scale a row.
INT4_GROUP = 64
_BYTES_PER_16_VALUES: dict[str, int] = {"fp32": 64, "bf16": 32, "int8": 16, "int5": 8, "int4": 8}
#: Fifth bits of an int5 row fill a multiple of this, so that rows stay aligned.
_FIFTH_BITS_BYTES = 8
#: Of one scale: bf16.
SCALE_BYTES = 2


def row_bytes(precision: Precision, head_dim: int) -> int:
    """Bytes of the values of one token and head, K or V, without scales."""
    plain = head_dim * _BYTES_PER_16_VALUES[precision] // 16
    return plain + (-(-head_dim // (8 * _FIFTH_BITS_BYTES)) * _FIFTH_BITS_BYTES if precision == "int5" else 0)


def scales_per_row(precision: Precision, head_dim: int) -> int:
    """bf16 scales that the values of one token and head have, K or V."""
    if precision == "int8":
        return 1
    return -(-head_dim // INT4_GROUP) if precision in ("int5", "int4") else 0


class LayerGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive layers with equal heads and precision. Only full attention is served for now."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    k_precision: Precision = "bf16"
    v_precision: Precision = "bf16"

    def token_bytes(self) -> int:
        """Bytes of K and V of one token in all layers of the group, scales included."""
        return (
            self.num_layers
            * self.num_kv_heads
            * sum(
                row_bytes(precision, self.head_dim) + SCALE_BYTES * scales_per_row(precision, self.head_dim)
                for precision in (self.k_precision, self.v_precision)
            )
        )


class KVGeometry(msgspec.Struct, frozen=True, kw_only=True):
    """Layer groups, tokens a block and rope: blocks of equal geometry have equal bytes layout.

    A block is contiguous: `[layer][K|V][kv_head][token][dim]`, rounded up to a multiple of 64 bytes. Where K or V is
    quantised, a head's values are followed by its scales, `[token][group]` in bf16.
    """

    groups: tuple[LayerGroup, ...]
    block_tokens: int
    #: What rotates K: equal text means equal rotation ("theta=10000.0", plus the scaling rule if any).
    rope: str = ""

    @property
    def num_layers(self) -> int:
        return sum(group.num_layers for group in self.groups)

    @property
    def kv_precision(self) -> KVPrecision:
        """Of K and of V, in the first group."""
        return (self.groups[0].k_precision, self.groups[0].v_precision)

    def with_precision(self, kv_precision: KVPrecision) -> KVGeometry:
        """The same geometry with other precisions of K and V."""
        k_precision, v_precision = kv_precision
        groups = tuple(
            msgspec.structs.replace(group, k_precision=k_precision, v_precision=v_precision) for group in self.groups
        )
        return msgspec.structs.replace(self, groups=groups)

    def differs_in_precision_only(self, other: KVGeometry) -> bool:
        """Whether blocks of the other can be re-encoded into blocks of this one; true of equal geometries too."""
        return bool(other.groups) and self.with_precision(other.kv_precision) == other

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, a multiple of 64."""
        raw = self.block_tokens * sum(group.token_bytes() for group in self.groups)
        return (raw + 63) // 64 * 64

    @property
    def geometry_id(self) -> GeometryId:
        """A stable name of the geometry: equal geometries have equal ids in every process."""
        return _geometry_id(self)


@lru_cache(maxsize=256)
def _geometry_id(geometry: KVGeometry) -> GeometryId:
    return GeometryId(hashlib.blake2b(msgspec.json.encode(geometry), digest_size=8).hexdigest())
