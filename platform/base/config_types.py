"""What the sections of the configuration are made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

#: Part of file names, actor names and metric labels.
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$")]
#: A namespace may be one tenant of a parent: "codegen/team-a".
NamespaceName = Annotated[
    str, Field(pattern=r"^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?(/[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?)?$")
]


class Section(BaseModel):
    """Immutable; unknown keys are refused, and defaults are checked like values."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)
