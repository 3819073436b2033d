"""What the warm-up learns from."""

from __future__ import annotations

import re

import numpy as np
import pytest
from transformers import AutoTokenizer

from reterm_jax.agent.episode import fixed_texts
from reterm_jax.recovery.dataset import DatasetError, make_row
from reterm_jax.tasks import families
from reterm_jax.tasks.families import names
from reterm_jax.tokens import tiny_tokenizer
from reterm_jax.tokens.chat import ChatFormat
from reterm_jax.tokens.packing import Example
from reterm_jax.training.demonstrations import recovery_examples, renamed

POOLS = (names.NOUNS, names.PLACES, names.COLORS, names.KEYS, names.TOOLS, names.SCRIPTS)


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    corpus = [" ".join(pool) for pool in POOLS] + ["cp into the directory No such file"]
    directory = tiny_tokenizer.build(corpus, tmp_path_factory.mktemp("tokenizer"))
    return ChatFormat(AutoTokenizer.from_pretrained(directory))


def test_a_renamed_example_is_the_same_story_with_other_names(chat):
    text = "cp budget.txt attic/ into the directory: attic/budget.txt: No such file: blue"
    ids = np.array(chat.tokenizer(text).input_ids)
    example = Example(ids=ids, loss_mask=np.arange(len(ids)) > 3, name="a")
    versions = renamed([example], chat, copies=20, seed=1)
    texts = [chat.tokenizer.decode(version.ids) for version in versions]
    assert texts[0] == text and len(set(texts)) > 15
    pattern = re.compile(r"cp (\w+)\.txt (\w+)/ into the directory: \2/\1\.txt: No such file: (\w+)")
    for version, said in zip(versions, texts, strict=True):
        noun, place, color = pattern.fullmatch(said).groups()
        assert noun in names.NOUNS and place in names.PLACES and color in names.COLORS
        assert (version.loss_mask == example.loss_mask).all()
    assert len({version.name for version in versions}) == 20
    again = renamed([example], chat, copies=20, seed=1)
    assert all((a.ids == b.ids).all() for a, b in zip(versions, again, strict=True))


def test_rows_that_are_too_long_are_left_out_and_counted(chat, capsys):
    said = {"role": "user", "content": "cp"}
    rows = [
        make_row(f"t{n}", [said, {"role": "assistant", "content": "blue " * n}, said, {**said, "role": "assistant"}], 3)
        for n in (5, 300)
    ]
    (kept,) = recovery_examples(rows, chat, row_length=250)
    assert kept.name == rows[0].id and not kept.loss_mask[: len(kept.ids) - 8].any() and kept.loss_mask[-1]
    assert "1 of 2 rows are longer than 250 tokens" in capsys.readouterr().out
    with pytest.raises(DatasetError, match=r"none of 1 has at most config\.sft\.row_length = 250 tokens"):
        recovery_examples(rows[1:], chat, row_length=250)


def test_names_mean_nothing_else(tmp_path):
    """A word of a pool that also stands for something else could not be exchanged."""
    words = {word for pool in POOLS for word in pool}
    assert not words & set(re.findall(r"[a-z]+", " ".join(fixed_texts()).lower()))
    for task in families.generate(tmp_path / "tasks", split="train", per_family=12, seed=3):
        plan, own = families.blueprint(task), set(task.metadata["names"].values())
        actions = [*plan.attempt, *plan.fix, *plan.slips, *(plan.probe or ()), plan.confirm]
        said = [task.instruction, plan.clue, *(text for action in actions for text in (action.thought, action.command))]
        assert not (words - own) & set(re.findall(r"[a-z]+", " ".join(said))), task.id
