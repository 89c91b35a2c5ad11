"""What the sections of the configuration are made of."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

#: Part of file names, actor names and metric labels.
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$")]
#: A namespace may be one tenant of a parent: "codegen/team-a".
NamespaceName = Annotated[
    str, Field(pattern=r"^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?(/[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?)?$")
]

#: Kinds of memory that hold KV and have quotas of their own. There is one so far: the arenas of the devices.
Tier = Literal["device"]
DEVICE_TIER: Final[Tier] = "device"


class Section(BaseModel):
    """Immutable; unknown keys are refused, and defaults are checked like values."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)
