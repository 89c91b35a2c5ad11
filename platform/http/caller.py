"""Who sends a request, and what is shown to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from fastapi import Request
from starlette.types import Scope

from remora.deployments.catalog import Catalog
from remora.platform.base.errors import InvalidRequest, NotFound
from remora.platform.base.ids import ModelId, NamespaceId
from remora.platform.http.limits import TenantLimits

_SCOPE_KEY: Final = "remora.caller"


@dataclass(frozen=True, slots=True)
class Caller:
    """A tenant, or the operator, who sees everything."""

    tenant: str = ""
    #: None: all.
    namespaces: frozenset[NamespaceId] | None = None
    #: Its account; None: without limits.
    limits: TenantLimits | None = None
    #: The most urgent priority it may ask for.
    min_priority: int = 0

    @property
    def is_operator(self) -> bool:
        return self.namespaces is None

    def sees(self, namespace_id: str) -> bool:
        return self.namespaces is None or namespace_id in self.namespaces

    def check_priority(self, priority: int | None) -> None:
        """Raises InvalidRequest for one that would go before other tenants'."""
        if not self.is_operator and priority is not None and priority < self.min_priority:
            raise InvalidRequest(
                f"priority: {priority} is less than {self.min_priority}, the most urgent one of {self.tenant!r}.",
                field="priority",
            )

    def namespaces_of(self, catalog: Catalog, model_id: ModelId) -> tuple[NamespaceId, ...]:
        """Of the model, those it may use, the default first."""
        return tuple(each for each in catalog.namespaces_of[model_id] if self.sees(each))

    def find_model(self, catalog: Catalog, name: str) -> ModelId:
        """Raises NotFound for a model that does not exist or in which the caller has no namespace, naming its own."""
        model_id = ModelId(name)
        if model_id not in catalog.models or not self.namespaces_of(catalog, model_id):
            known = ", ".join(sorted(each for each in catalog.models if self.namespaces_of(catalog, each)))
            raise NotFound(f"The model {name!r} does not exist; one of: {known}.", field="model")
        return model_id

    def find_namespace(self, catalog: Catalog, model_id: ModelId, name: str | None) -> NamespaceId:
        """The named namespace of the model, or the caller's default there. Raises NotFound, naming the caller's own."""
        own = self.namespaces_of(catalog, model_id)
        if name is None and own:
            return own[0]
        if name is None or name not in own:
            known = ", ".join(sorted(own))
            raise NotFound(f"The model {model_id!r} has no namespace {name!r}; one of: {known}.", field="namespace")
        return NamespaceId(name)


#: Who everybody is without API keys.
OPERATOR: Final = Caller()


def set_caller(scope: Scope, caller: Caller) -> None:
    scope[_SCOPE_KEY] = caller


def caller_of(request: Request) -> Caller:
    """Who was recognised by the key of the request."""
    caller: Caller = request.scope.get(_SCOPE_KEY, OPERATOR)
    return caller
