"""Tenants: who may use the platform, and how much of it. A tenant's namespaces are those whose `tenant` is its name.

Keys are 256 random bits, so a plain hash of one cannot be turned back by trying; only hashes are configured or stored,
and a key is looked up by its hash, which tells nothing by how long it takes.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable
from typing import Annotated

from pydantic import Field

from remora.platform.base.config_types import Name, Section

KEY_PREFIX = "rmr_"
_KEY_BYTES = 32

KeyHash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class LimitsConfig(Section):
    """None: no limit. With several routers each keeps an equal share of every limit."""

    #: Requests other than GET; a burst of one second's worth passes at once.
    requests_per_s: Annotated[float, Field(gt=0)] | None = None
    #: Generations at the same time.
    max_concurrent: Annotated[int, Field(ge=1)] | None = None
    #: Prompt and output tokens; a burst of one minute's worth passes at once.
    tokens_per_min: Annotated[int, Field(ge=1)] | None = None


class TenantConfig(Section):
    """One tenant, or an operator."""

    name: Name
    #: SHA-256 of each key, as `remora keys new` prints it. Two, while a key is being replaced.
    key_sha256: Annotated[tuple[KeyHash, ...], Field(min_length=1)]
    #: May do everything and sees everybody.
    operator: bool = False
    #: The most urgent `priority` that its requests and sessions may ask for: lower goes first, before all tenants.
    min_priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    limits: LimitsConfig = LimitsConfig()


def new_key() -> str:
    """A key that nobody has had before."""
    return KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def key_hash(key: str) -> str:
    """What the configuration holds of a key."""
    return hashlib.sha256(key.encode()).hexdigest()


def check_tenants(tenants: tuple[TenantConfig, ...], namespace_tenants: Iterable[tuple[str, str]]) -> None:
    """Raises ValueError, naming the value, when tenants and namespaces do not fit together.

    `namespace_tenants`: name and tenant of each namespace.
    """
    names = [tenant.name for tenant in tenants]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"tenants: the name {twice[0]!r} is used twice; names must be unique")
    hashes = [each for tenant in tenants for each in tenant.key_sha256]
    for tenant in tenants:
        if any(hashes.count(each) > 1 for each in tenant.key_sha256):
            raise ValueError(f"tenants.{tenant.name}.key_sha256: a key is used twice; every key must mean one tenant")
    owners = dict(namespace_tenants)
    for namespace, owner in owners.items():
        if owner and tenants and owner not in names:
            raise ValueError(f"namespaces.{namespace}.tenant: no tenant {owner!r}; one of {sorted(names)}")
    for tenant in tenants:
        if not tenant.operator and tenant.name not in owners.values():
            raise ValueError(
                f"tenants.{tenant.name}: has no namespace; set `tenant: {tenant.name}` at a namespace, or "
                "`operator: true` here"
            )
