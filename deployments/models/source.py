"""Where a model's files are: `ModelConfig.source` → a folder or a GGUF file on this machine."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from remora.platform.base.errors import ModelError
from remora.platform.base.model_config import ModelConfig

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*\Z")
_HUB_FILE = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)/([\w./-]+\.gguf)\Z")
_TOKENIZER_PATTERNS = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
    "additional_chat_templates/*",
)
_WEIGHT_PATTERNS = ("model*.safetensors", "model.safetensors.index.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """A model's files on this machine."""

    kind: Literal["folder", "gguf"]
    path: Path


def resolve_source(model: ModelConfig, *, with_weights: bool = True) -> ModelFiles:
    """Finds the files; only a hub id needs the network, and without weights only small files are fetched.

    Raises ModelError: the message names the source and what would do instead.
    """
    source = model.source
    if source.startswith("package:"):
        return _local(_in_package(model.name, source), model)
    path = Path(source).expanduser()
    if path.exists():
        return _local(path.resolve(), model)
    hub_file = _HUB_FILE.match(source)
    if hub_file:
        return ModelFiles(kind="gguf", path=_download_file(hub_file[1], hub_file[2], model))
    if _HUB_ID.match(source) and not source.endswith(".gguf"):
        patterns = [*_TOKENIZER_PATTERNS, *(_WEIGHT_PATTERNS if with_weights else ())]
        return _local(_download_folder(source, patterns, model), model)
    raise ModelError(
        f"models.{model.name}.source: {source!r} is neither a folder, a .gguf file, a hub id (org/name) nor "
        "package:PYTHON_PACKAGE/FILE."
    )


def _local(path: Path, model: ModelConfig) -> ModelFiles:
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"models.{model.name}.source: {path} has no config.json; it is no Hugging Face folder.")
        return ModelFiles(kind="folder", path=path)
    if path.suffix == ".gguf":
        return ModelFiles(kind="gguf", path=path)
    raise ModelError(f"models.{model.name}.source: {path} is neither a folder nor a .gguf file.")


def _in_package(name: str, source: str) -> Path:
    package, _, file = source.removeprefix("package:").partition("/")
    try:
        spec = importlib.util.find_spec(package) if package else None
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise ModelError(f"models.{name}.source: the Python package {package!r} is not installed (pip install it).")
    for folder in spec.submodule_search_locations or ():
        root = Path(folder).resolve()
        path = (root / file).resolve()
        if path.is_relative_to(root) and path.exists():
            return path
    raise ModelError(f"models.{name}.source: the package {package!r} has no file {file!r}.")


def _download_folder(repository: str, patterns: list[str], model: ModelConfig) -> Path:
    from huggingface_hub import snapshot_download

    if model.trust_remote_code:
        patterns = [*patterns, "*.py"]
    try:
        return Path(snapshot_download(repository, revision=model.revision, allow_patterns=patterns))
    except Exception as error:  # the hub client raises httpx's, OSError's and its own errors
        raise _no_hub(repository, model, error) from None


def _download_file(repository: str, file: str, model: ModelConfig) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repository, file, revision=model.revision))
    except Exception as error:  # as above
        raise _no_hub(repository, model, error) from None


def _no_hub(repository: str, model: ModelConfig, error: Exception) -> ModelError:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else ""
    revision = f" at revision {model.revision!r}" if model.revision else ""
    return ModelError(
        f"models.{model.name}.source: {repository!r}{revision} cannot be fetched from the model hub "
        f"({type(error).__name__}: {reason}). Without the hub give a local folder (config.json, tokenizer.json, "
        "*.safetensors) or a .gguf file."
    )
