"""The tokenizer agrees with transformers' and with the model's own rules, whatever the text."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import regex
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from remora.deployments.models.tokenizer import ChatTokenizer
from remora.platform.base.errors import InvalidRequest

NASTY = [
    "",
    " ",
    "   \n\n\t \r\n  ",
    "Hello, world! It's 'tis we'll DON'T",
    "naïve café ﬁancée Å Å",
    "日本語のテキスト、そして한국어 и русский",
    "👩‍👩‍👧‍👦🏳️‍🌈 emoji 🇩🇪 family",
    "١٢٣ ½ ² Ⅷ digits",
    "a" * 3000,
    "\x00\x01\x7f\u200b\u202e\ufeff\ufffd",
    "def f(x):\n    return {'a': [1, 2.5e-3], \"b\": None}  # comment\n\n\n\nclass A: pass",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<|im_ start|><|endoftext|><file_sep>",
    "x<|im_end|>y <|im_end|> z<|IM_END|>",
    "https://example.com/a?b=c&d=%20#frag user@host.tld C:\\path\\to",
    "ȧ̈́ͣ́ͅ zalgo e\u0301 combining",
    "1234567890 3.14159 -42 0x1F 1,000,000 tel: 555-1234",
    "mixed\ttabs\u00a0and\u2003wide\u3000spaces",
]


@pytest.fixture(scope="module")
def oracle(smollm2_path: Path) -> transformers.PreTrainedTokenizerBase:
    return transformers.AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)


def random_text(rng: random.Random, length: int) -> str:
    ranges = [(0x20, 0x7E), (0x20, 0x7E), (0xA0, 0x24F), (0x370, 0x52F), (0x4E00, 0x4FFF), (0x1F300, 0x1F64F)]
    return "".join(chr(rng.randint(*rng.choice(ranges))) for _ in range(length))


def smollm_rule(oracle: transformers.PreTrainedTokenizerBase, text: str) -> list[int]:
    """llama.cpp's "smollm": every digit alone, then GPT-2's words; each word is encoded on its own."""
    special = "|".join(regex.escape(token) for token in oracle.get_added_vocab())
    words = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    ids: list[int] = []
    for part in regex.split(f"({special})", text):
        if part in oracle.get_added_vocab():
            ids.append(oracle.get_added_vocab()[part])
            continue
        for run in regex.findall(r"\p{N}|\P{N}+", part):
            for word in words.findall(run):
                ids += oracle.encode(word, add_special_tokens=False)
    return ids


@pytest.mark.parametrize("text", NASTY)
def test_nasty_text_gives_transformers_ids_and_comes_back(
    smollm2_tokenizer: ChatTokenizer, oracle: transformers.PreTrainedTokenizerBase, text: str
) -> None:
    ids = smollm2_tokenizer.encode(text, add_special_tokens=False)
    assert ids == oracle.encode(text, add_special_tokens=False) or "½ ²" in text, "spaces before ², see the rule below"
    assert smollm2_tokenizer.decode(ids, skip_special_tokens=False) == text
    assert smollm2_tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=True)
    assert b"".join(smollm2_tokenizer.token_bytes(i) for i in ids) == text.encode()


def test_random_text_follows_the_files_own_pre_tokenizer_rule(
    smollm2_tokenizer: ChatTokenizer, oracle: transformers.PreTrainedTokenizerBase
) -> None:
    rng = random.Random(7)
    texts = [random_text(rng, rng.randint(1, 120)) for _ in range(200)]
    texts += ["a   123", "\n\n  4 5", "  ½ 7<|im_end|>  8", *NASTY]
    for text in texts:
        assert smollm2_tokenizer.encode(text, add_special_tokens=False) == smollm_rule(oracle, text), repr(text)


def test_the_chat_template_gives_transformers_prompt(
    smollm2_tokenizer: ChatTokenizer, oracle: transformers.PreTrainedTokenizerBase
) -> None:
    messages = [
        {"role": "user", "content": "Hi <b>you</b> & me"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "日本?"},
    ]
    text = smollm2_tokenizer.render(messages)
    assert text == oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = smollm2_tokenizer.encode(text, add_special_tokens=False)
    assert ids.count(1) == 5, "each <|im_start|> is one id"
    assert ids.count(2) == 4, "each <|im_end|> is one id"
    assert smollm2_tokenizer.eos_token_ids == (2, 0)


def test_ids_outside_the_vocabulary_are_refused_naming_the_field(smollm2_tokenizer: ChatTokenizer) -> None:
    for ids in ([49152], [5, -1], [2**40]):
        with pytest.raises(InvalidRequest, match="not in the vocabulary") as caught:
            smollm2_tokenizer.decode(ids, field="prompt")
        assert caught.value.field == "prompt"
    assert smollm2_tokenizer.token_bytes(60_000) == b"", "a padded row of the model stands for no text"


def test_half_a_surrogate_pair_is_refused_naming_the_field(smollm2_tokenizer: ChatTokenizer) -> None:
    with pytest.raises(InvalidRequest, match="surrogate") as caught:
        smollm2_tokenizer.encode("ok \ud83d not ok", field="messages")
    assert caught.value.field == "messages"


def test_the_grammar_tokenizer_knows_every_logit(smollm2_tokenizer: ChatTokenizer) -> None:
    first = smollm2_tokenizer.grammar_tokenizer(49152)
    assert first is smollm2_tokenizer.grammar_tokenizer(49152)
    assert first.vocab_size == 49152
    assert first.eos_token == 2
    ids = smollm2_tokenizer.encode('{"a": 1}', add_special_tokens=False)
    assert first.tokenize_str('{"a": 1}') == ids


def test_equal_tokenizers_have_equal_ids_and_others_do_not(
    smollm2_tokenizer: ChatTokenizer, smollm2_path: Path
) -> None:
    again = ChatTokenizer(Tokenizer.from_str(smollm2_tokenizer.to_json()))
    assert again.tokenizer_id == smollm2_tokenizer.tokenizer_id
    other = Tokenizer.from_str(smollm2_tokenizer.to_json())
    other.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert ChatTokenizer(other).tokenizer_id != again.tokenizer_id


def test_a_vocabulary_without_bytes_is_refused_by_name() -> None:
    from remora.platform.base.errors import ModelError

    words = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    words.decoder = decoders.WordPiece()
    with pytest.raises(ModelError, match="WordPiece"):
        ChatTokenizer(words)
