"""What a configuration serves: models, their namespaces, and who shares blocks with whom."""

from __future__ import annotations

from remora.namespaces.hashing import chain_root, sharing_domain
from remora.platform.base.config import RemoraConfig
from remora.platform.base.errors import NotFound
from remora.platform.base.ids import BlockHash, ModelId, NamespaceId
from remora.platform.base.model_config import ModelConfig
from remora.platform.base.namespace_config import NamespaceConfig


class Catalog:
    """Look-ups by name, immutable."""

    def __init__(self, config: RemoraConfig) -> None:
        self.models: dict[ModelId, ModelConfig] = {ModelId(model.name): model for model in config.models}
        #: Of each model, its default namespace first.
        self.namespaces_of: dict[ModelId, tuple[NamespaceId, ...]] = {}
        self.namespaces: dict[NamespaceId, NamespaceConfig] = {}
        for model_id in self.models:
            own = config.namespaces_of(model_id)
            self.namespaces_of[model_id] = tuple(NamespaceId(namespace.name) for namespace in own)
            self.namespaces.update({NamespaceId(namespace.name): namespace for namespace in own})

    def find_model(self, name: str) -> ModelId:
        """Raises NotFound, naming what there is."""
        model_id = ModelId(name)
        if model_id not in self.models:
            known = ", ".join(sorted(self.models))
            raise NotFound(f"The model {name!r} does not exist; one of: {known}.", field="model")
        return model_id

    def find_namespace(self, model_id: ModelId, name: str | None) -> NamespaceId:
        """The named namespace of the model, or its default. Raises NotFound, naming what there is."""
        own = self.namespaces_of[model_id]
        if name is None:
            return own[0]
        if name not in own:
            known = ", ".join(sorted(own))
            raise NotFound(f"The model {model_id!r} has no namespace {name!r}; one of: {known}.", field="namespace")
        return NamespaceId(name)

    def known_namespace(self, name: str) -> NamespaceId:
        """The named namespace, whichever model it is of. Raises NotFound, naming what there is."""
        if name not in self.namespaces:
            known = ", ".join(sorted(self.namespaces))
            raise NotFound(f"There is no namespace {name!r}; one of: {known}.", field="namespace")
        return NamespaceId(name)

    def chain_root(self, namespace_id: NamespaceId, fingerprint: bytes) -> BlockHash:
        """Parent of the first block of every prompt in the namespace: equal only where blocks may be shared."""
        namespace = self.namespaces[namespace_id]
        domain = sharing_domain(namespace_id, namespace.tenant, namespace.share_group)
        return chain_root(fingerprint, domain)
