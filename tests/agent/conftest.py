"""A chat format, a task, and a sandbox and a sampler that do what a test says."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers

from reterm_jax.agent.episode import AgentLimits, fixed_texts
from reterm_jax.agent.protocol import render_turn
from reterm_jax.rollout.samplers.base import Completion
from reterm_jax.sandbox.base import ExecResult, Snapshot
from reterm_jax.tasks.config import TaskConfig, VerifierConfig
from reterm_jax.tokens import tiny_tokenizer
from reterm_jax.tokens.chat import ChatFormat

LIMITS = AgentLimits(max_turns=4, max_tokens=600, max_turn_tokens=60, command_timeout=5.0, attempt_timeout=30.0)


@dataclasses.dataclass
class FakeSandbox:
    """Answers commands from a table and verdicts with a reward; notes what was asked of it, in order."""

    reward: str | None = "0"
    answers: dict[str, ExecResult | Exception] = dataclasses.field(default_factory=dict)
    log: list[str] = dataclasses.field(default_factory=list)
    workdir: str = "/app"
    lingers: bool = False

    async def exec(self, command, *, timeout, user=None, env=None, fresh=False, private=False):
        assert timeout > 0
        if not fresh:
            self.log.append(command)
            answer = self.answers.get(command, ExecResult("", 0, 0.01, False))
            if isinstance(answer, Exception):
                raise answer
            return answer
        return ExecResult("", 0, 0.0, False)

    async def upload(self, source, target, *, private=False):
        self.log.append("VERIFY")

    async def download(self, source, target, *, private=False):
        if self.reward is None:
            raise FileNotFoundError(source)
        target.mkdir()
        (target / "reward.txt").write_text(self.reward)

    async def snapshot(self):
        self.log.append("SNAPSHOT")
        return Snapshot(f"snapshot-{len(self.log)}", "bubblewrap", "test")


@dataclasses.dataclass
class FakeSampler:
    """Says one text after the other: text (stopped), (text, "length"), an exception, or a coroutine function."""

    chat: ChatFormat
    says: list
    calls: list[dict] = dataclasses.field(default_factory=list)

    async def generate(self, ids, *, max_tokens, **options):
        self.calls.append({"ids": list(ids), "max_tokens": max_tokens, **options})
        said = self.says[min(len(self.calls), len(self.says)) - 1]
        if callable(said):
            said = await said()
        if isinstance(said, Exception):
            raise said
        cut = isinstance(said, tuple)
        new = self.chat.policy_ids(said[0])[:-1] if cut else self.chat.policy_ids(said)
        cut = cut or len(new) > max_tokens
        new = new[:max_tokens]
        return Completion(new, [-0.5] * len(new), "length" if cut else "stop", 7)

    async def end(self, session):
        pass


def does(command: str, thought: str = "look") -> str:
    return render_turn(thought, command)


@pytest.fixture(scope="session")
def chat(tmp_path_factory):
    corpus = [*fixed_texts(), "copy notes look ls echo cat hello done make file"]
    directory = tiny_tokenizer.build(corpus, tmp_path_factory.mktemp("tokenizer"))
    return ChatFormat(transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True))


@pytest.fixture
def task():
    return SimpleNamespace(
        id="copy-1",
        instruction="copy notes",
        path=Path("/nowhere"),
        tests_dir=Path("/nowhere/tests"),
        config=TaskConfig(verifier=VerifierConfig(timeout_sec=5.0)),
    )


@pytest.fixture
def fakes():
    return SimpleNamespace(FakeSandbox=FakeSandbox, FakeSampler=FakeSampler, does=does, LIMITS=LIMITS)
