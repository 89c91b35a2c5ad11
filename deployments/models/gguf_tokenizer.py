"""A GGUF file's vocabulary → ChatTokenizer.

Byte-level BPE vocabularies are built here, with the pre-tokenizer the file names; they come out as the model's original
tokenizer.json (transformers ignores that name and splits spaces before digits wrongly for "smollm" files).
SentencePiece-style vocabularies are converted by transformers, the rest is refused: a wrong pre-tokenizer would make a
model worse without a word.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from remora.deployments.models.gguf_file import GGUFFile
from remora.deployments.models.tokenizer import ChatTokenizer
from remora.platform.base.errors import ModelError

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
#: Names as in llama.cpp's src/llama-vocab.cpp; rules as in the models' own tokenizer.json.
_DIGITS_THEN_GPT2 = frozenset({"smollm", "starcoder", "refact"})
_GPT2 = frozenset({"gpt-2", "phi-2"})
_LLAMA3 = frozenset({"llama-bpe", "llama3", "llama-v3"})
_QWEN2 = frozenset({"qwen2", "deepseek-r1-qwen"})
_KNOWN = _DIGITS_THEN_GPT2 | _GPT2 | _LLAMA3 | _QWEN2

#: Texts that end an answer wherever they are control tokens, as llama.cpp has it: chat models that were trained to
#: stop at <|im_end|> also stop at <|endoftext|>.
_END_TEXTS = frozenset(
    {"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<|end_of_text|>"}
)
_SPECIAL_NAMES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",
}


def gguf_chat_tokenizer(file: GGUFFile) -> ChatTokenizer:
    """The file's tokenizer, template and end tokens. Raises ModelError when the file has no usable vocabulary."""
    texts: list[str] | None = file.get("tokenizer.ggml.tokens")
    if not texts:
        raise ModelError(f"{file.path}: the file has no vocabulary (tokenizer.ggml.tokens).")
    kind = file.get("tokenizer.ggml.model")
    pre = str(file.get("tokenizer.ggml.pre", ""))
    if kind == "gpt2" and pre in _KNOWN:
        tokenizer = _byte_level(file, texts, pre)
    elif kind == "llama":
        tokenizer = _by_transformers(file)
    else:
        raise ModelError(
            f"{file.path}: a vocabulary of kind {kind!r} with pre-tokenizer {pre!r} is not supported "
            f"(gpt2 with one of {', '.join(sorted(_KNOWN))}, or llama); use the model's Hugging Face folder instead."
        )
    special_tokens = {}
    for name, key in _SPECIAL_NAMES.items():
        token_id = file.get(f"tokenizer.ggml.{key}")
        if isinstance(token_id, int) and 0 <= token_id < len(texts):
            special_tokens[name] = texts[token_id]
    templates = {
        key.removeprefix("tokenizer.chat_template").removeprefix("."): value
        for key, value in file.metadata.items()
        if key.startswith("tokenizer.chat_template") and isinstance(value, str)
    }
    return ChatTokenizer(
        tokenizer,
        chat_template=templates.get("") or templates.get("default"),
        tool_template=templates.get("tool_use"),
        special_tokens=special_tokens,
        eos_token_ids=_end_token_ids(file, texts),
    )


def _end_token_ids(file: GGUFFile, texts: list[str]) -> list[int]:
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    named = [file.get(f"tokenizer.ggml.{key}") for key in keys]
    types = file.get("tokenizer.ggml.token_type") or []
    known = [i for i, kind in enumerate(types) if kind == _CONTROL and texts[i] in _END_TEXTS]
    return [i for i in [*named, *known] if isinstance(i, int) and 0 <= i < len(texts)]


def _byte_level(file: GGUFFile, texts: list[str], pre: str) -> Tokenizer:
    merges = [tuple(merge.split(" ", 1)) for merge in file.get("tokenizer.ggml.merges") or []]
    vocab = {text: i for i, text in enumerate(texts)}
    try:
        tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=pre in _LLAMA3))
    except Exception as error:  # tokenizers raises bare Exception for merges that are not in the vocabulary
        raise ModelError(f"{file.path}: the file's vocabulary and merges do not fit: {error}") from None
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if pre in _DIGITS_THEN_GPT2:
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    elif pre in _GPT2:
        tokenizer.pre_tokenizer = byte_level
    else:
        words = Regex(_LLAMA3_WORDS if pre in _LLAMA3 else _QWEN2_WORDS)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(words, "isolated"), bytes_only])
    if pre in _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    types = file.get("tokenizer.ggml.token_type") or [1] * len(texts)
    added = [
        AddedToken(text, special=kind != _USER_DEFINED, normalized=False)
        for text, kind in zip(texts, types, strict=False)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    bos_id = file.get("tokenizer.ggml.bos_token_id")
    adds_bos = file.get("tokenizer.ggml.add_bos_token", pre in _LLAMA3)
    if adds_bos and isinstance(bos_id, int) and 0 <= bos_id < len(texts):
        bos = texts[bos_id]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", bos, "$B:1"], special_tokens=[(bos, bos_id)]
        )
    return tokenizer


def _by_transformers(file: GGUFFile) -> Tokenizer:
    import transformers

    try:
        found: Any = transformers.AutoTokenizer.from_pretrained(str(file.path.parent), gguf_file=file.path.name)
    except Exception as error:  # whatever the conversion stumbles over, the vocabulary is one that cannot be served
        raise ModelError(f"{file.path}: the vocabulary cannot be converted: {error}") from None
    tokenizer: Tokenizer = found.backend_tokenizer
    return tokenizer
