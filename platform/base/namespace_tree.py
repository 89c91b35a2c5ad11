"""The tree of namespaces, which their names make: `a/b` is a part of `a`."""

from __future__ import annotations

from collections.abc import Container

from remora.platform.base.ids import NamespaceId


def parent_of(name: NamespaceId, known: Container[NamespaceId]) -> NamespaceId | None:
    """The longest known name of which this one is a part below: `a/b` of `a/b/c`."""
    above = name.rpartition("/")[0]
    while above:
        if above in known:
            return NamespaceId(above)
        above = above.rpartition("/")[0]
    return None
