from __future__ import annotations

import pytest

from reterm_jax.tasks.config import Network
from reterm_jax.tasks.task import Task, TaskError, load_tasks


def load(make_task, toml: str) -> Task:
    return Task.load(make_task(files={"task.toml": toml}))


def test_present_spelling(make_task):
    config = load(
        make_task,
        """
        schema_version = "1.1"
        new_key = 3
        [metadata]
        tags = ["a"]
        [agent]
        timeout_sec = 900
        user = 1000
        other = true
        [verifier]
        timeout_sec = 12.5
        env = { A = "x", B = 2 }
        [environment]
        build_timeout_sec = 30
        docker_image = "some/image:1"
        workdir = "/srv"
        cpus = 2
        memory_mb = 512
        storage_mb = 1024
        gpus = 1
        network_mode = "allowlist"
        allowed_hosts = ["a.example", "10.0.0.1"]
        healthcheck = { command = "true" }
        [environment.env]
        C = "z"
        [solution]
        env = { D = "w" }
        """,
    ).config
    assert config.schema_version == "1.1"
    assert config.metadata["tags"] == ["a"]
    assert (config.agent.timeout_sec, config.agent.user) == (900, "1000")
    assert (config.verifier.timeout_sec, dict(config.verifier.env)) == (12.5, {"A": "x", "B": "2"})
    environment = config.environment
    assert (environment.docker_image, environment.workdir, environment.cpus) == ("some/image:1", "/srv", 2)
    assert (environment.memory_mb, environment.storage_mb, environment.gpus) == (512, 1024, 1)
    assert environment.network == Network("allowlist", ("a.example", "10.0.0.1"))
    assert dict(environment.env) == {"C": "z"}
    assert dict(config.solution.env) == {"D": "w"}


@pytest.mark.parametrize("size,megabytes", [("2G", 2048), ("512M", 512), ("1.5GB", 1536), ("2048K", 2), ("4Gi", 4096)])
def test_legacy_spelling(make_task, size, megabytes):
    toml = f'version = "1.0"\n[environment]\nmemory = "{size}"\nstorage = "10G"\nallow_internet = true\n'
    config = load(make_task, toml).config
    assert config.schema_version == "1.0"
    assert (config.environment.memory_mb, config.environment.storage_mb) == (megabytes, 10240)
    assert config.environment.network == Network("public")


def test_defaults(make_task):
    task = load(make_task, "")
    assert task.id == "example" and task.instruction == "do it" and task.solution is None
    assert task.config.agent.timeout_sec is None
    assert task.config.verifier.timeout_sec == task.config.environment.build_timeout_sec == 600
    assert task.config.environment.network == Network("no-network")


def test_what_says_nothing_new_is_accepted(make_task):
    toml = """
        [verifier]
        environment_mode = "shared"
        [environment]
        os = "linux"
        mcp_servers = []
        gpus = 2.0
        gpu_types = []
        network_mode = "no-network"
        allow_internet = false
        """
    assert load(make_task, toml).config.environment.gpus == 2


def test_networks_by_phase(make_task):
    """A phase has its own, or that of the environment; an allowlist without hosts allows none."""
    config = load(
        make_task,
        """
        [environment]
        network_mode = "public"
        [agent]
        network_mode = "allowlist"
        allowed_hosts = ["a.example"]
        """,
    ).config
    assert config.network("agent") == Network("allowlist", ("a.example",))
    assert config.network("verifier") == Network("public")
    config = load(make_task, '[environment]\nallow_internet = true\n[verifier]\nnetwork_mode = "allowlist"\n').config
    assert (config.network("agent"), config.network("verifier")) == (Network("public"), Network("no-network"))


@pytest.mark.parametrize(
    "toml,field",
    [
        ('agent = "x"', "agent"),
        ("[agent]\ntimeout_sec = true", "agent.timeout_sec"),
        ("[agent]\nuser = 1.5", "agent.user"),
        ('[verifier]\ntimeout_sec = "600"', "verifier.timeout_sec"),
        ("[verifier]\ntimeout_sec = -1", "verifier.timeout_sec"),
        ("[verifier]\ntimeout_sec = nan", "verifier.timeout_sec"),
        ("[verifier]\nenv = [1]", "verifier.env"),
        ("[verifier.env]\nA = [1]", "verifier.env.A"),
        ("[environment]\nworkdir = 'app'", "environment.workdir"),
        ("[environment]\nmemory = 'much'", "environment.memory"),
        ("[environment]\nmemory_mb = '2G'", "environment.memory_mb"),
        ("[environment]\ndocker_image = ' '", "environment.docker_image"),
        ("[environment]\nnetwork_mode = 'some'", "environment.network_mode"),
        ("[agent]\nnetwork_mode = 'some'", "agent.network_mode"),
        ("[verifier]\nenvironment_mode = 'separate'", "verifier.environment_mode"),
        ("[verifier.environment]\ndocker_image = 'a'", "verifier.environment"),
        ("[[environment.mcp_servers]]\nname = 'a'", "environment.mcp_servers"),
        ("[environment]\nos = 'windows'", "environment.os"),
        ("[verifier]\nnetwork_mode = 'public'\nallowed_hosts = ['a']", "verifier.allowed_hosts"),
        ("[environment]\nnetwork_mode = 'allowlist'\nallowed_hosts = 'a'", "environment.allowed_hosts"),
        ("[environment]\nallow_internet = 1", "environment.allow_internet"),
        ("[environment]\nnetwork_mode = 'public'\nallow_internet = false", "environment.network_mode"),
        ("[environment]\nnetwork_mode = 'no-network'\nallow_internet = true", "environment.network_mode"),
        ("[agent]\nnetwork_mode = 'public'\nallow_internet = 'no'", "agent.allow_internet"),
        ("[environment]\ngpus = 0.5", "environment.gpus"),
        ("[environment]\ngpus = -0.5", "environment.gpus"),
        ("[environment]\ngpus = inf", "environment.gpus"),
        ("[environment]\nmemory_mb = 0.5", "environment.memory_mb"),
        ("[environment]\ngpus = 1\ngpu_types = ['H100']", "environment.gpu_types"),
        ("[[steps]]\nname = 'one'", "steps"),
    ],
)
def test_wrong_values_name_file_field_and_remedy(make_task, toml, field):
    with pytest.raises(TaskError) as caught:
        load(make_task, toml)
    assert caught.value.field == field
    assert str(caught.value.file).endswith("example/task.toml") and str(caught.value.file) in str(caught.value)
    assert caught.value.remedy in str(caught.value)


def test_networks_that_contradict_each_other_are_both_named(make_task):
    with pytest.raises(
        TaskError, match=r"network_mode: is 'public', but allow_internet is false; remove allow_internet"
    ):
        load(make_task, "[environment]\nnetwork_mode = 'public'\nallow_internet = false")


@pytest.mark.parametrize(
    "files,name",
    [
        ({"task.toml": None}, "task.toml"),
        ({"task.toml": "= 1"}, "task.toml"),
        ({"instruction.md": None}, "instruction.md"),
        ({"instruction.md": " \n"}, "instruction.md"),
        ({"tests/test.sh": None}, "test.sh"),
        ({"environment/Dockerfile": None}, "Dockerfile"),
        ({"steps/one/instruction.md": "x"}, "steps"),
    ],
)
def test_bad_directories(make_task, files, name):
    with pytest.raises(TaskError) as caught:
        Task.load(make_task(files=files))
    assert caught.value.file.name == name


def test_content_hash_is_of_the_environment_and_nothing_else(make_task):
    first = Task.load(make_task("a")).content_hash
    assert Task.load(make_task("b", {"instruction.md": "other", "tests/test.sh": "other"})).content_hash == first
    assert Task.load(make_task("c", {"environment/files/x": ""})).content_hash != first
    assert Task.load(make_task("d", {"task.toml": "[environment]\nenv = { A = '1' }"})).content_hash != first
    assert Task.load(make_task("e", {"task.toml": "[agent]\nnetwork_mode = 'public'"})).content_hash != first
    path = make_task("e")
    (path / "environment/empty").mkdir()
    with_directory = Task.load(path).content_hash
    (path / "environment/empty").chmod(0o700)
    assert len({first, with_directory, Task.load(path).content_hash}) == 3


def test_load_tasks(make_task, tmp_path):
    make_task("b"), make_task("a")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "file").write_text("")
    assert [task.id for task in load_tasks(tmp_path)] == ["a", "b"]
    (tmp_path / "c").mkdir()
    with pytest.raises(TaskError, match="c/task.toml: missing"):
        load_tasks(tmp_path)
    for bad in (tmp_path / "none", tmp_path / ".hidden"):
        with pytest.raises(TaskError):
            load_tasks(bad)


def test_environment_variables_are_filled_in(make_task, monkeypatch):
    monkeypatch.setenv("RETERM_SET", "from outside")
    monkeypatch.delenv("RETERM_UNSET", raising=False)
    toml = "[verifier.env]\nA = '${RETERM_SET}!'\nB = '${RETERM_UNSET:-x y}'\nC = '$RETERM_SET ${RETERM_UNSET:-}'\n"
    env = load(make_task, toml).config.verifier.env
    assert dict(env) == {"A": "from outside!", "B": "x y", "C": "$RETERM_SET "}
    with pytest.raises(TaskError, match=r"solution.env.D: needs RETERM_UNSET; set it, or give \$\{RETERM_UNSET:-"):
        load(make_task, "[solution.env]\nD = '${RETERM_UNSET}'")


def test_healthcheck_and_capabilities(make_task):
    toml = '[environment]\ncapabilities = ["CAP_CHOWN"]\nhealthcheck = { command = "true", retries = 5 }\n'
    environment = load(make_task, toml).config.environment
    assert environment.capabilities == ("CHOWN",)
    check = environment.healthcheck
    assert check is not None and (check.command, check.retries, check.timeout_sec) == ("true", 5, 30)
    for bad, field in (
        ("healthcheck = { retries = 5 }", "environment.healthcheck.command"),
        ("healthcheck = { command = 'x', interval_sec = 0 }", "environment.healthcheck.interval_sec"),
        ("capabilities = ['chown']", "environment.capabilities"),
    ):
        with pytest.raises(TaskError) as caught:
            load(make_task, f"[environment]\n{bad}\n")
        assert caught.value.field == field
