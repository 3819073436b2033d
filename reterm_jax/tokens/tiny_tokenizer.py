"""The quickstart's own tokenizer: a few hundred whole words, and bytes for all else.

A policy of a few million parameters copies names and paths well if each is one token. So every word of the corpus is a
token, and whatever else a terminal prints is spelled in bytes: encoding is exact for any text. The markup between turns
is a handful of multi-character tokens, which keeps the overhead at five tokens a turn.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

MAX_VOCAB = 1024

END_OF_TEXT, START, STOP = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_SPECIAL = (END_OF_TEXT, START, STOP)
_CALL = "<tool_call>\n<function=bash>\n<parameter=command>\n"
_MARKUP = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<function=bash>",
    "</function>",
    "<parameter=command>",
    "</parameter>",
    # What always comes together. None begins with the stop token: that one the policy samples by itself.
    f"{START}system\n",
    f"\n{START}user\n",
    f"\n{START}assistant\n<think>\n",
    f"\n{START}user\n<tool_response>\n",
    f"\n</tool_response>{STOP}\n{START}assistant\n<think>\n",
    "\n</tool_response>\n<tool_response>\n",
    f"\n</think>\n\n{_CALL}",
    "\n</parameter>\n</function>\n</tool_call>",
)

# Capitalised and lower-case words, upper-case words, then any single character: digits, spaces, newlines, marks.
_WORD = r"[A-Z]?[a-z]+|[A-Z]+|[\s\S]"

# The same form as Qwen3.5's: ChatML, reasoning first, calls in XML, tool output inside a user turn, and reasoning kept
# while nothing but tool output follows it. Tools are not described: the policy knows its only one from training.
_TEMPLATE = """\
{%- set ns = namespace(query=-1) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set ns.query = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- set content = (message.content or '') | trim -%}
{%- if message.role == 'tool' -%}
{%- if loop.first or loop.previtem.role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' -}}
{%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
{%- elif message.role == 'assistant' -%}
{%- set thought = (message.reasoning_content or '') | trim -%}
{%- if not thought and '</think>' in content -%}
{%- set thought = content.split('</think>')[0].split('<think>')[-1] | trim -%}
{%- set content = content.split('</think>')[-1] | trim -%}
{%- endif -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if loop.index0 > ns.query -%}{{- '<think>\\n' + thought + '\\n</think>\\n\\n' -}}{%- endif -%}
{{- content -}}
{%- for call in message.tool_calls or [] -%}
{%- if not loop.first -%}{{- '\\n' -}}{%- elif content -%}{{- '\\n\\n' -}}{%- endif -%}
{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' -}}
{%- for name, value in call.function.arguments | items -%}
{{- '<parameter=' + name + '>\\n' + value | string + '\\n</parameter>\\n' -}}
{%- endfor -%}
{{- '</function>\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- else -%}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n<think>\\n' -}}{%- endif -%}
"""


def build(corpus: Iterable[str], out_dir: str | os.PathLike[str], *, max_vocab: int = MAX_VOCAB) -> Path:
    """Writes a tokenizer directory that `transformers.AutoTokenizer` loads.

    Args:
      corpus: texts; each of their words becomes one token. Order does not matter.
      out_dir: made if it does not exist; its tokenizer files are overwritten.
      max_vocab: bound on the whole vocabulary.

    Returns:
      `out_dir`.

    Raises:
      ValueError: the corpus has more words than fit.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    splitter = _pre_tokenizer()
    words = collections.Counter(
        word for text in corpus for word, _ in splitter.pre_tokenize_str(text) if word not in alphabet
    )
    # Several bytes that are no word (a non-ASCII character) stay bytes.
    words = [word for word in sorted(words) if word.isascii() and word.isalpha()]
    room = max_vocab - len(alphabet) - len(_SPECIAL) - len(_MARKUP)
    if len(words) > room:
        raise ValueError(
            f"the corpus has {len(words)} different words, but a vocabulary of {max_vocab} has room for {room}: "
            "raise max_vocab or give a smaller corpus"
        )
    vocab = {token: index for index, token in enumerate([*alphabet, *words])}
    # With ignore_merges a whole word that is in the vocabulary is taken as it is; without merges the rest is bytes.
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in _MARKUP])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=STOP,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        model_max_length=1 << 20,
    )
    fast.chat_template = _TEMPLATE
    out = Path(out_dir)
    out.mkdir(parents=True, exist_ok=True)
    fast.save_pretrained(out)
    return out


def _pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORD), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
