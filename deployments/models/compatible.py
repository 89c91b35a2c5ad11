"""Models whose KV another one may use as it is, because its configuration declares it (`compatible_with`)."""

from __future__ import annotations

from remora.deployments.models.kv_identity import KVIdentity
from remora.deployments.models.load import read_kv_identity
from remora.platform.base.config import RemoraConfig
from remora.platform.base.errors import ModelError
from remora.platform.base.model_config import ModelConfig


def compatible_identities(config: RemoraConfig, model: ModelConfig, own: KVIdentity) -> tuple[KVIdentity, ...]:
    """Of the models that it declares, from their files. Raises ModelError naming the one whose KV cannot be used, and
    why."""
    models = {each.name: each for each in config.models}
    others = []
    for name in model.compatible_with:
        other = read_kv_identity(models[name], block_tokens=own.geometry.block_tokens)
        check_compatible(own, other)
        others.append(other)
    return tuple(others)


def check_compatible(own: KVIdentity, other: KVIdentity) -> None:
    """Raises ModelError for KV of another shape or of other tokens."""
    where = f"models.{own.model}.compatible_with: {other.model!r}"
    if own.tokenizer_id != other.tokenizer_id:
        raise ModelError(f"{where} has another tokenizer: its KV is of other tokens. Leave it out.")
    if not own.geometry.differs_in_precision_only(other.geometry):
        raise ModelError(
            f"{where} has KV of another shape: {_words(other)}, and {own.model!r} has {_words(own)}. Leave it out."
        )


def _words(identity: KVIdentity) -> str:
    group = identity.geometry.groups[0]
    return (
        f"{group.num_layers} layers of {group.num_kv_heads} heads of {group.head_dim}, rope {identity.geometry.rope}, "
        f"blocks of {identity.geometry.block_tokens}"
    )
