import pytest
import transformers

from reterm_jax.agent.episode import fixed_texts
from reterm_jax.tokens import tiny_tokenizer
from reterm_jax.tokens.chat import ChatFormat


@pytest.fixture(scope="session")
def chat(tmp_path_factory):
    directory = tiny_tokenizer.build([*fixed_texts(), "look ls cat"], tmp_path_factory.mktemp("tokenizer"))
    return ChatFormat(transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True))
