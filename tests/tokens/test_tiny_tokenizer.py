import random

import pytest
import transformers

from reterm_jax.tokens import tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_dir):
    return transformers.AutoTokenizer.from_pretrained(tiny_dir, local_files_only=True)


def encode(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


def test_corpus_words_are_one_token(tokenizer):
    pieces = [tokenizer.decode([index]) for index in encode(tokenizer, "copy notes to /app 12")]
    assert pieces == ["copy", " ", "notes", " ", "to", " ", "/", "app", " ", "1", "2"]


def test_other_words_are_spelled(tokenizer):
    assert len(encode(tokenizer, "Zebra")) == 5


def test_markup_is_one_token(tokenizer):
    for text in ("<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_response>", "<function=bash>"):
        assert len(encode(tokenizer, text)) == 1, text
    call = "\n</think>\n\n<tool_call>\n<function=bash>\n<parameter=command>\n"
    assert len(encode(tokenizer, f"{call}copy\n</parameter>\n</function>\n</tool_call><|im_end|>")) == 4


def test_round_trip_is_exact(tokenizer):
    rng = random.Random(0)
    texts = ["", " ", "\n\n \n", "\r\n\t\x00", "naïve café 日本語 🎉", "a  b   c", "<|im_end|>\n<think>\n", " .,'s n't"]
    for _ in range(300):
        codes = [
            rng.choice([rng.randrange(128), rng.randrange(0x3000), rng.randrange(0x10000, 0x20000)]) for _ in range(12)
        ]
        texts.append("".join(map(chr, codes)))
    for text in texts:
        assert tokenizer.decode(encode(tokenizer, text)) == text


def test_same_words_give_the_same_tokenizer(tmp_path):
    first = tiny_tokenizer.build(["one two"], tmp_path / "a")
    second = tiny_tokenizer.build(["two", "one", "two"], tmp_path / "b")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (first / name).read_bytes() == (second / name).read_bytes()


def test_a_corpus_with_too_many_words_is_refused(tmp_path):
    words = ["".join(rng.choices("abcdef", k=8)) for rng in [random.Random(1)] for _ in range(900)]
    with pytest.raises(ValueError, match="room for"):
        tiny_tokenizer.build(words, tmp_path / "a")
    assert not (tmp_path / "a").exists()
