"""Tokenizers with chat templates: the quickstart's own, and one in the manner of Qwen with Qwen3.5's template."""

from pathlib import Path

import pytest
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from reterm_jax.tokens import tiny_tokenizer
from reterm_jax.tokens.chat import ChatFormat

# Qwen3.5's template is no part of this repository; where it lies beside it, it is tested too.
QWEN_TEMPLATE = Path(__file__).parents[3] / "shared" / "data" / "chat_templates" / "qwen3_5_think.jinja"
KINDS = ["tiny", "qwen"] if QWEN_TEMPLATE.is_file() else ["tiny"]

CORPUS = ["copy notes to the barn directory (now).\n\n", "ls -la /app; echo done!\n", "it is ready:\n{}\n\n[1]\n"]
_QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _qwen_like():
    """A small BPE with Qwen's word boundaries, whose marks swallow the newlines after them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS * 10 + [")\n.\n!\n}\n\n\n\n:\n"] * 9, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet)
    )
    tokenizer.add_special_tokens(
        [AddedToken(f"<|{name}|>", special=True, normalized=False) for name in ("endoftext", "im_start", "im_end")]
    )
    markup = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in markup])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.chat_template = QWEN_TEMPLATE.read_text(encoding="utf-8")
    return fast


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory):
    return tiny_tokenizer.build(CORPUS, tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session", params=KINDS)
def chat(request, tiny_dir):
    if request.param == "qwen":
        return ChatFormat(_qwen_like())
    return ChatFormat(transformers.AutoTokenizer.from_pretrained(tiny_dir, local_files_only=True))
