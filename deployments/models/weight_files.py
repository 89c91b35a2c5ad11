"""Which files of a Hugging Face folder hold its weights: model.safetensors, or shards with an index."""

from __future__ import annotations

import json
from pathlib import Path

from remora.platform.base.errors import ModelError


def weight_files(folder: Path) -> list[Path]:
    """The folder's weight files in a fixed order. Raises ModelError when there are none, or a shard is missing."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise ModelError(
            f"{folder}: there is no model.safetensors and no model.safetensors.index.json; "
            "only safetensors weights are read."
        )
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        files = [folder / name for name in names]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"{index}: is not an index of shards: {error!r}") from None
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise ModelError(f"{folder}: the shard {missing[0]} named in {index.name} is missing.")
    return files
