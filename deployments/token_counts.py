"""How the tokens of a moved or forked sequence got to where it goes on."""

from __future__ import annotations

from typing import Literal

import msgspec

from remora.platform.base import telemetry_names as names

#: In the common pool; as bytes; by a kernel, from another precision; from the tokens.
How = Literal["shared", "copied", "converted", "recomputed"]


class TokenRange(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens [start, end) and how their KV got to where it is used."""

    start: int
    end: int
    how: How
    #: The model that computed it, if it is another one.
    kv_of: str | None = None

    def document(self) -> dict[str, object]:
        """For an answer."""
        return {"from": self.start, "to": self.end, "how": self.how, **({"kv_of": self.kv_of} if self.kv_of else {})}

    def __str__(self) -> str:
        return f"{self.start}-{self.end} {self.how}{f' of {self.kv_of}' if self.kv_of else ''}"


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

    def ranges(self, *, kv_of: str | None = None, own_end: int = 0) -> tuple[TokenRange, ...]:
        """In the order in which tokens are found: in the pool, brought there, and what is left computed.

        `kv_of`: the model that computed what was not computed anew, from token `own_end` on; None: the same model.
        """
        found: list[TokenRange] = []

        def add(how: How, count: int, kv_of: str | None) -> None:
            if count:
                start = found[-1].end if found else 0
                found.append(TokenRange(start=start, end=start + count, how=how, kv_of=kv_of))

        num_own = self.shared if kv_of is None else min(self.shared, own_end)
        add("shared", num_own, None)
        add("shared", self.shared - num_own, kv_of)
        add("copied", self.copied, kv_of)
        add("converted", self.converted, kv_of)
        add("recomputed", self.recomputed, None)
        return tuple(found)

    @staticmethod
    def of(total: int, *, shared: int = 0, copied: int = 0, converted: int = 0) -> TokenCounts:
        """The rest was recomputed. Counts that exceed the total are cut, the last ones first."""
        shared = min(shared, total)
        copied = min(copied, total - shared)
        converted = min(converted, total - shared - copied)
        return TokenCounts(
            shared=shared, copied=copied, converted=converted, recomputed=total - shared - copied - converted
        )
