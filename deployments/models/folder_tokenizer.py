"""A Hugging Face folder's tokenizer files → ChatTokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from remora.deployments.models.tokenizer import ChatTokenizer
from remora.platform.base.errors import ModelError

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def folder_chat_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> ChatTokenizer:
    """tokenizer.json with what stands beside it; without one transformers converts what there is.

    Raises ModelError for files that are missing or damaged.
    """
    settings = _read_json(folder / "tokenizer_config.json")
    special = _read_json(folder / "special_tokens_map.json")
    tokenizer = _tokenizer(folder, trust_remote_code)
    _add_missing_tokens(tokenizer, settings)
    special_tokens = {}
    for name in _SPECIAL_NAMES:
        text = _token_text(settings.get(name, special.get(name)))
        if text is not None:
            special_tokens[name] = text
    templates = _templates(folder, settings)
    eos_token = special_tokens.get("eos_token")
    return ChatTokenizer(
        tokenizer,
        chat_template=templates.get("default"),
        tool_template=templates.get("tool_use"),
        special_tokens=special_tokens,
        eos_token_ids=_end_token_ids(folder, tokenizer.token_to_id(eos_token) if eos_token else None),
    )


def _tokenizer(folder: Path, trust_remote_code: bool) -> Tokenizer:
    path = folder / "tokenizer.json"
    if path.is_file():
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exception
            raise ModelError(f"{path}: is not a tokenizer: {error}") from None
    import transformers

    try:
        found: Any = transformers.AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=trust_remote_code
        )
        tokenizer: Tokenizer = found.backend_tokenizer
        return tokenizer
    except Exception as error:  # whatever it lacks, there is no tokenizer to serve with
        raise ModelError(f"{folder}: there is no tokenizer.json, and transformers finds none either: {error}") from None


def _add_missing_tokens(tokenizer: Tokenizer, settings: dict[str, Any]) -> None:
    """Tokens that tokenizer_config.json adds to tokenizer.json (fine-tunes often write only the former)."""
    known = tokenizer.get_added_tokens_decoder()
    entries = settings.get("added_tokens_decoder")
    if not isinstance(entries, dict):
        return
    for token_id, entry in sorted(entries.items(), key=lambda item: int(item[0])):
        if int(token_id) in known or not isinstance(entry, dict):
            continue
        options = {key: bool(entry.get(key, False)) for key in ("lstrip", "rstrip", "single_word", "normalized")}
        tokenizer.add_tokens([AddedToken(entry["content"], special=bool(entry.get("special", False)), **options)])
        if tokenizer.token_to_id(entry["content"]) != int(token_id):
            raise ModelError(f"tokenizer_config.json: the added token {entry['content']!r} cannot have id {token_id}.")


def _templates(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    templates: dict[str, str] = {}
    inline = settings.get("chat_template")
    if isinstance(inline, str):
        templates["default"] = inline
    elif isinstance(inline, list):
        templates.update({entry["name"]: entry["template"] for entry in inline if isinstance(entry, dict)})
    older = _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(older, str):
        templates["default"] = older
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = path.read_text()
    if (folder / "chat_template.jinja").is_file():
        templates["default"] = (folder / "chat_template.jinja").read_text()
    return templates


def _end_token_ids(folder: Path, eos_token_id: int | None) -> list[int]:
    """generation_config.json's, then config.json's, then the tokenizer's: any of them ends an answer."""
    ids: list[object] = []
    for file in ("generation_config.json", "config.json"):
        value = _read_json(folder / file).get("eos_token_id")
        ids += value if isinstance(value, list) else [value]
    return [value for value in [*ids, eos_token_id] if isinstance(value, int)]


def _token_text(value: object) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise ModelError(f"{path}: is not JSON: {error}") from None
    return value if isinstance(value, dict) else {}
