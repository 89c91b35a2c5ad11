"""How the tokens of a moved or forked sequence got to where it goes on."""

from __future__ import annotations

import msgspec

from remora.platform.base import telemetry_names as names


class TokenCounts(msgspec.Struct, frozen=True, kw_only=True):
    """In the common pool; as bytes from another pool; by a kernel from another precision; computed from the tokens.
    Each token is one of the four."""

    shared: int = 0
    copied: int = 0
    converted: int = 0
    recomputed: int = 0

    @property
    def total(self) -> int:
        return self.shared + self.copied + self.converted + self.recomputed

    def attributes(self) -> dict[str, int]:
        """For a span."""
        return {
            names.REMORA_MIGRATE_SHARED_TOKENS: self.shared,
            names.REMORA_MIGRATE_COPIED_TOKENS: self.copied,
            names.REMORA_MIGRATE_CONVERTED_TOKENS: self.converted,
            names.REMORA_MIGRATE_RECOMPUTED_TOKENS: self.recomputed,
        }

    @staticmethod
    def of(total: int, *, shared: int = 0, copied: int = 0, converted: int = 0) -> TokenCounts:
        """The rest was recomputed. Counts that exceed the total are cut, the last ones first."""
        shared = min(shared, total)
        copied = min(copied, total - shared)
        converted = min(converted, total - shared - copied)
        return TokenCounts(
            shared=shared, copied=copied, converted=converted, recomputed=total - shared - copied - converted
        )
