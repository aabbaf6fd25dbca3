"""Harbor's task directories as they are read: every field once, and what is refused in which words."""

from __future__ import annotations

import time
from importlib.metadata import EntryPoint

import pytest

from rollout.suites import SuiteError, is_suite
from rollout.suites.harbor import directory
from rollout.suites.harbor.config import resolved
from rollout.suites.harbor.directory import load, without_canary

EVERYTHING = """
schema_version = "1.4"
multi_step_reward_strategy = "final"
artifacts = [
  "/app/out",
  {source = "/var/log/app", destination = "logs/app", exclude = ["*.tmp"], service = "main"},
]

[task]
name = "acme/everything"
version = "2.1"
description = "All of it."
authors = [{name = "Ada", email = "ada@example.com"}, {name = "Bob"}]
keywords = ["all", "fields"]

[metadata]
difficulty = "hard"
nested = {any = [1, 2]}

[agent]
timeout_sec = 900
user = "worker"
network_mode = "allowlist"
allowed_hosts = ["PyPI.org.", "*.example.com", "192.0.2.7", "198.51.100.0/24"]

[verifier]
timeout_sec = 120.5
user = 0
network_mode = "no-network"
environment_mode = "separate"
env = {A = "1", B = "${B:-two}"}

[verifier.environment]
docker_image = "acme/verify:1"
cpus = 1

[[verifier.collect]]
command = "dump > /app/out/state"
service = "main"
timeout_sec = 5
user = "worker"

[environment]
build_timeout_sec = 1200
docker_image = "acme/base:1"
os = "Linux"
cpus = 0.5
memory_mb = 2048
storage_mb = 4096
gpus = 0
gpu_types = ["H100"]
env = {MODE = "test"}
skills_dir = "/skills"
workdir = "/srv"
network_mode = "public"

[[environment.mcp_servers]]
name = "files"
transport = "stdio"
command = "mcp-files"
args = ["--root", "/srv"]

[[environment.mcp_servers]]
name = "web"
transport = "http"
url = "http://127.0.0.1:9000/mcp"
headers = {Authorization = "Bearer ${TOKEN}"}

[environment.healthcheck]
command = "test -f /ready"
interval_sec = 1
timeout_sec = 2
start_period_sec = 3
start_interval_sec = 0.5
retries = 4

[solution]
env = {KEY = "${KEY:-none}"}

[[steps]]
name = "one"
min_reward = 0.5
artifacts = ["/app/one"]

[steps.agent]
timeout_sec = 60

[steps.verifier]
env = {B = "3"}
collect = [{command = "sync"}]

[steps.healthcheck]
command = "true"

[[steps]]
name = "two"
min_reward = {speed = 0.1}

[steps.agent]
user = 0
network_mode = "no-network"

[steps.verifier]
environment_mode = "shared"
"""
PLAIN = '[environment]\ndocker_image = "base"\n'


def make(path, config=PLAIN, **files):
    """A task of this `task.toml`; files by name, None for one that is not there."""
    contents = {"instruction.md": "Do it.\n", "tests/test.sh": "true\n", "task.toml": config}
    for name, text in {**contents, **files}.items():
        if text is not None:
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_text(text)
    return path


def test_every_field_is_read(tmp_path):
    files = {
        "steps/one/instruction.md": "First.",
        "steps/one/tests/extra.py": "",
        "steps/one/workdir/setup.sh": "true",
        "steps/one/solution/solve.sh": "true",
        "steps/two/instruction.md": "Second.",
        "steps/two/trajectory.json": "{}",
        "solution/solve.sh": "true",
    }
    task = load(make(tmp_path, EVERYTHING, **files))
    assert (task.name, task.warnings, task.instruction) == ("acme/everything", (), "")
    config = task.config
    assert [author.email for author in config.task.authors] == ["ada@example.com", None]
    assert (config.task.version, config.task.description, config.task.keywords) == (
        "2.1",
        "All of it.",
        ("all", "fields"),
    )
    assert config.metadata == {"difficulty": "hard", "nested": {"any": [1, 2]}}
    assert config.agent.allowed_hosts == ("pypi.org", "*.example.com", "192.0.2.7", "198.51.100.0/24")
    assert [artifact.source for artifact in config.artifacts] == ["/app/out", "/var/log/app"]
    assert (config.artifacts[1].destination, config.artifacts[1].exclude) == ("logs/app", ("*.tmp",))
    environment = config.environment
    assert (environment.build_timeout_sec, environment.docker_image, environment.os) == (
        1200,
        "acme/base:1",
        "linux",
    )
    assert (environment.cpus, environment.memory_mb, environment.storage_mb) == (0.5, 2048, 4096)
    assert (environment.gpus, environment.gpu_types, environment.tpu) == (0, ("H100",), None)
    assert (environment.env, environment.skills_dir, environment.workdir) == (
        {"MODE": "test"},
        "/skills",
        "/srv",
    )
    assert environment.network_mode == "public"
    stdio, http = environment.mcp_servers
    assert (stdio.transport, stdio.command, stdio.args) == ("stdio", "mcp-files", ("--root", "/srv"))
    assert (http.transport, http.url) == ("streamable-http", "http://127.0.0.1:9000/mcp")
    assert http.headers == {"Authorization": "Bearer ${TOKEN}"}
    check = environment.healthcheck
    assert (check.command, check.interval_sec, check.timeout_sec) == ("test -f /ready", 1, 2)
    assert (check.start_period_sec, check.start_interval_sec, check.retries) == (3, 0.5, 4)
    assert config.solution.env == {"KEY": "${KEY:-none}"}
    assert config.multi_step_reward_strategy == "final"


def test_a_step_has_its_own_settings_over_those_of_the_task(tmp_path):
    files = {"steps/one/instruction.md": "First.", "steps/two/instruction.md": "Second."}
    files |= {
        "steps/one/tests/extra.py": "",
        "steps/one/workdir/setup.sh": "true",
        "solution/solve.sh": "true",
    }
    files |= {"steps/one/solution/solve.sh": "true", "steps/two/trajectory.json": "{}"}
    one, two = load(make(tmp_path, EVERYTHING, **files)).steps
    assert (one.name, one.instruction, one.config.min_reward) == ("one", "First.", 0.5)
    assert (one.agent.timeout_sec, one.agent.user, one.agent.network_mode) == (60, "worker", "allowlist")
    assert (one.verifier.timeout_sec, one.verifier.user) == (600, 0)  # a step's limit is its own
    assert one.verifier.env == {"A": "1", "B": "3"}
    assert [hook.command for hook in one.verifier.collect] == ["dump > /app/out/state", "sync"]
    assert one.verifier.separate and one.verifier.environment.docker_image == "acme/verify:1"
    assert one.healthcheck.command == "true" and [a.source for a in one.config.artifacts] == ["/app/one"]
    assert one.tests == (tmp_path / "tests", tmp_path / "steps/one/tests")
    assert one.solution == tmp_path / "steps/one/solution" and one.workdir == tmp_path / "steps/one/workdir"
    assert (two.agent.timeout_sec, two.agent.user) == (900, 0)
    assert (two.agent.network_mode, two.agent.allowed_hosts) == ("no-network", None)
    assert not two.verifier.separate and two.verifier.environment is None
    assert two.config.min_reward == {"speed": 0.1} and two.healthcheck is None
    assert (two.tests, two.workdir) == ((tmp_path / "tests",), None)
    assert two.solution == tmp_path / "solution" and two.trajectory == tmp_path / "steps/two/trajectory.json"


def test_older_spellings_mean_what_they_did(tmp_path):
    config = 'version = "1.0"\n[environment]\ndocker_image = "base"\nmemory = "2G"\nstorage = "512M"\n'
    config += "allow_internet = "
    environment = load(make(tmp_path, config + "false\n")).config.environment
    assert (environment.memory_mb, environment.storage_mb, environment.network_mode) == (
        2048,
        512,
        "no-network",
    )
    task = load(make(tmp_path, config + "true\n"))
    assert (task.config.schema_version, task.config.environment.network_mode) == ("1.0", "public")
    own = load(make(tmp_path, config + 'true\nnetwork_mode = "no-network"\n'))
    assert own.config.environment.network_mode == "no-network"


def test_what_is_left_open_has_the_values_of_the_format(tmp_path):
    (step,) = load(make(tmp_path, PLAIN, **{"solution/solve.sh": ""})).steps
    task = load(tmp_path)
    assert (task.name, step.name, step.instruction) == (tmp_path.name, "", "Do it.\n")
    assert (step.agent.timeout_sec, step.verifier.timeout_sec, step.verifier.separate) == (None, 600, False)
    assert (task.config.environment.build_timeout_sec, task.config.environment.network_mode) == (600, None)
    assert (step.solution, step.workdir, step.trajectory) == (tmp_path / "solution", None, None)


def test_keys_that_are_not_known_are_told_and_not_refused(tmp_path):
    config = (
        'colour = 1\n[environment]\ndocker_image = "base"\nflavour = "x"\n[[steps]]\nname = "a"\nspeed = 2\n'
    )
    files = {"steps/a/instruction.md": "Go.", "tests/.harborignore": "*.pyc"}
    told = load(make(tmp_path, config, **files)).warnings
    file = tmp_path / "task.toml"
    assert told == (
        f"{file}: colour is not known",
        f"{file}: environment.flavour is not known",
        f"{file}: steps.0.speed is not known",
        f"{tmp_path / 'tests/.harborignore'}: its rules are not heeded",
    )


STEPS = PLAIN + '[[steps]]\nname = "a"\n'
TOML = [
    ("[agent\n", "task.toml: Expected ']' at the end of a table declaration (at line 1, column 7)"),
    ('schema_version = "2.0"\n', "task.toml: schema_version: '2.0' is no schema 1.x, which are read"),
    ('[task]\nname = "plain"\n', "task.toml: task.name: 'plain' is not of the form org/name"),
    ("[agent]\ntimeout_sec = 0\n", "task.toml: agent.timeout_sec: Input should be greater than 0"),
    ("[agent]\ntimeout_sec = nan\n", "task.toml: agent.timeout_sec: Input should be a finite number"),
    (
        '[verifier]\ntimeout_sec = "soon"\n',
        "task.toml: verifier.timeout_sec: Input should be a valid number, unable",
    ),
    ("[verifier]\nenv = {PORT = 80}\n", "task.toml: verifier.env.PORT: Input should be a valid string"),
    (
        '[verifier]\nenv = {"A-B" = "1"}\n',
        "task.toml: verifier.env: 'A-B' cannot be a variable of this value",
    ),
    (
        '[verifier]\nenvironment_mode = "own"\n',
        "task.toml: verifier.environment_mode: Input should be 'shared' or",
    ),
    (
        '[verifier]\nenvironment_mode = "shared"\n[verifier.environment]\ncpus = 1\n',
        "task.toml: verifier: environment_mode = 'shared' has no [verifier.environment]",
    ),
    (
        '[environment]\nnetwork_mode = "vpn"\n',
        "task.toml: environment.network_mode: Input should be 'public', ",
    ),
    (
        '[agent]\nnetwork_mode = "public"\nallowed_hosts = ["a.example"]\n',
        "task.toml: agent: allowed_hosts goes with network_mode = 'allowlist'",
    ),
    (
        '[agent]\nnetwork_mode = "allowlist"\nallowed_hosts = ["https://a.example"]\n',
        "task.toml: agent.allowed_hosts.0: 'https://a.example' is no host name, *.name, address or network",
    ),
    (
        '[environment]\nmemory = "much"\n',
        "task.toml: environment: memory = 'much' is no size such as '2G' or '512M'",
    ),
    (
        '[environment]\nmemory = "2G"\nmemory_mb = 1\n',
        "task.toml: environment: memory = '2G' and memory_mb = 1 do not agree",
    ),
    (
        "[environment]\nallow_internet = 1\n",
        "task.toml: environment: allow_internet = 1 is neither true nor false",
    ),
    ("[environment]\ncpus = -1\n", "task.toml: environment.cpus: Input should be greater than 0"),
    ('[environment]\nworkdir = "srv"\n', "task.toml: environment.workdir: 'srv' is no absolute path"),
    (
        '[environment]\nmcp_servers = [{name = "a", transport = "pigeon"}]\n',
        "task.toml: environment.mcp_servers.0.transport: Input should be 'stdio', 'sse' or 'streamable-http'",
    ),
    (
        '[environment]\nmcp_servers = [{name = "a", transport = "stdio"}]\n',
        "task.toml: environment.mcp_servers.0: transport 'stdio' needs command",
    ),
    (
        '[environment]\nmcp_servers = [{name = "a", url = "u"}, {name = "a", url = "u"}]\n',
        "task.toml: environment: mcp_servers: two have the same name",
    ),
    ('[environment]\nos = "windows"\n', "task.toml: environment.os: 'windows': sandboxes are Linux"),
    (PLAIN + "gpus = 1\n", "task.toml: environment.gpus: sandboxes have no accelerators"),
    (
        PLAIN + 'tpu = {type = "v4", topology = "2x2"}\n',
        "task.toml: environment.tpu: sandboxes have no accelerators",
    ),
    (
        PLAIN + "[verifier.environment]\ngpus = 2\n",
        "task.toml: verifier.environment.gpus: sandboxes have no accelerators",
    ),
    (
        'artifacts = ["/a/../../b"]\n',
        "task.toml: artifacts.0.source: '/a/../../b' leads out of where it begins",
    ),
    (
        'artifacts = [{source = "/a", destination = "/b"}]\n',
        "task.toml: artifacts.0.destination: '/b' is no relative path without ..",
    ),
    (
        'artifacts = [{source = "/a", service = "db"}]\n' + PLAIN,
        "task.toml: artifacts.0.service: 'db': only main, one service, runs here",
    ),
    (
        PLAIN + '[[verifier.collect]]\ncommand = "x"\nservice = "db"\n',
        "task.toml: verifier.collect.0.service: 'db': only main, one service, runs here",
    ),
    (
        STEPS + "[steps.agent]\ntimeout_sec = -1\n",
        "task.toml: steps.0.agent.timeout_sec: Input should be greater than",
    ),
    (
        '[[steps]]\nname = "a/b"\n',
        "task.toml: steps.0.name: 'a/b' cannot be a directory's name under steps/",
    ),
    ('[[steps]]\nname = "a"\n[[steps]]\nname = "A"\n', "task.toml: steps: two steps have the same name"),
    (
        "".join(f'[[steps]]\nname = "{number}"\n' for number in range(101)),
        "task.toml: steps: 101 steps; at most 100 are played",
    ),
    (STEPS, "steps/a/instruction.md: No such file or directory"),
    ("", "task.toml: environment.docker_image names no image, and "),
]


@pytest.mark.parametrize(("config", "words"), TOML)
def test_what_cannot_run_here_is_refused_with_its_field(tmp_path, config, words):
    with pytest.raises(SuiteError) as refused:
        load(make(tmp_path, config))
    assert str(refused.value).startswith(f"{tmp_path}/{words}")


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"instruction.md": None}, "instruction.md: No such file or directory"),
        ({"instruction.md": "# canary 1\n\n"}, "instruction.md: says nothing"),
        ({"tests/test.sh": None}, "tests/test.sh: missing; it is what a task is verified by"),
        (
            {"tests/test.sh": None, "tests/test.bat": ""},
            "tests/test.sh: missing; it is what a task is verified by",
        ),
        ({"task.toml": None}, "task.toml: No such file or directory"),
    ],
)
def test_what_is_missing_is_named(tmp_path, files, words):
    with pytest.raises(SuiteError) as refused:
        load(make(tmp_path, **files))
    assert str(refused.value) == f"{tmp_path}/{words}"


def test_an_instruction_that_is_no_text_is_refused(tmp_path):
    make(tmp_path)
    (tmp_path / "instruction.md").write_bytes(b"ab\xff")
    with pytest.raises(
        SuiteError, match=r"instruction\.md: is not UTF-8 text \(invalid start byte at byte 2\)"
    ):
        load(tmp_path)


def test_a_verifier_with_an_image_of_its_own_brings_its_tests_along(tmp_path):
    config = PLAIN + '[verifier]\nenvironment_mode = "separate"\n'
    task = load(make(tmp_path, config, **{"tests/test.sh": None, "tests/Dockerfile": "FROM base"}))
    assert task.tests_with_dockerfile(task.steps[0]) == tmp_path / "tests"


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("<!-- harbor-canary GUID 1 -->\n# CANARY 2\n\nDo it.\n# no canary\n", "Do it.\n# no canary\n"),
        ("# Task\ncanary\n", "# Task\ncanary\n"),
        ("\n\nDo it.", "Do it."),
    ],
)
def test_canary_lines_at_the_start_do_not_reach_the_model(text, rest):
    assert without_canary(text) == rest


def test_a_dockerfile_that_cannot_be_built_is_refused_with_the_line(tmp_path, monkeypatch):
    point = EntryPoint("dockerfile", "sandbox.images.dockerfile:load", "")
    gone = EntryPoint("gone", "no_such_module:load", "")
    monkeypatch.setattr(directory, "entry_points", lambda group: [gone, point])
    directory._dockerfile_readers.cache_clear()
    try:
        make(tmp_path, "", **{"environment/Dockerfile": "FROM base\nRUN true\nVOLUME /data\nONBUILD RUN x\n"})
        with pytest.raises(SuiteError, match=rf"^{tmp_path}/environment/Dockerfile:4: ONBUILD: "):
            load(tmp_path)
        assert load(tmp_path, check_image=False).config.environment.docker_image is None
        (tmp_path / "environment" / "Dockerfile").write_text("FROM base\nCOPY nothing /srv\n")
        with pytest.raises(SuiteError, match="Dockerfile:2: COPY: "):
            load(tmp_path)
    finally:
        directory._dockerfile_readers.cache_clear()


COMPOSE = """services:
  main:
    build:
      context: .
    image: ${MAIN_IMAGE_NAME}
    working_dir: /srv
    environment:
      MODE: compose
      LEVEL: "3"
    command: ["sh", "-c", "sleep infinity"]
    deploy: {resources: {limits: {cpus: "1"}}}
"""


def test_one_service_of_a_compose_file_is_taken_over(tmp_path):
    config = '[environment]\nenv = {LEVEL = "4"}\n'
    files = {"environment/Dockerfile": "FROM base", "environment/docker-compose.yaml": COMPOSE}
    environment = load(make(tmp_path, config, **files)).config.environment
    assert (environment.env, environment.workdir) == ({"MODE": "compose", "LEVEL": "4"}, "/srv")
    assert environment.docker_image is None  # the Dockerfile is


def test_a_compose_file_may_name_the_image(tmp_path):
    compose = "services:\n  main:\n    image: acme/base:1\n    environment:\n      - A=1\n      - B\n"
    task = load(make(tmp_path, "", **{"environment/singularity-compose.yaml": compose}))
    assert task.config.environment.docker_image == "acme/base:1"
    assert task.config.environment.env == {"A": "1", "B": "${B}"}


@pytest.mark.parametrize(
    ("compose", "words"),
    [
        (
            COMPOSE + "  db:\n    image: postgres\n",
            "line 12: service 'db': only main, one service, runs here",
        ),
        (COMPOSE + "    volumes: [a:/b]\n", "line 12: services.main.volumes: sandboxes have nothing like it"),
        (
            COMPOSE + "    privileged: true\n",
            "line 12: services.main.privileged: sandboxes have nothing like it",
        ),
        (
            "services:\n  main:\n    command: redis-server\n",
            "line 3: services.main.command: nothing is started beside",
        ),
        (
            "services:\n  main:\n    build: {dockerfile: dev}\n",
            "line 3: services.main.build: dockerfile: the image",
        ),
        ("services:\n  main:\n    build: ..\n", "line 3: services.main.build: context: the image is that of"),
        ("services:\n  main:\n    build: {target: a}\n", "line 3: services.main.build: target: the image is"),
        (
            "services:\n  main:\n    deploy: {resources: {reservations: {devices: [{count: 1}]}}}\n",
            "line 3: services.main.deploy: devices: sandboxes have none",
        ),
        ("services:\n  - main\n", "line 2: services is no mapping"),
        (
            "services:\n  main:\n    working_dir: srv\n",
            "line 3: services.main.working_dir: 'srv' is no absolute path",
        ),
    ],
)
def test_what_a_compose_file_asks_for_beyond_that_is_refused_with_the_line(tmp_path, compose, words):
    files = {"environment/Dockerfile": "FROM base", "environment/docker-compose.yaml": compose}
    with pytest.raises(SuiteError) as refused:
        load(make(tmp_path, "", **files))
    assert str(refused.value).startswith(f"{tmp_path}/environment/docker-compose.yaml, {words}")


def test_references_take_what_is_given_or_their_default_and_nothing_of_the_process():
    env = {"A": "${HOME:-x}-${B}", "C": "$HOME", "D": "${E:-}"}
    assert resolved(env, {"B": "2"}) == {"A": "x-2", "C": "$HOME", "D": ""}
    with pytest.raises(SuiteError, match=r"verifier\.env: \$\{PATH\} is not given here, and has no default"):
        resolved({"A": "${PATH}"}, {}, "verifier.env")


def test_a_suite_is_known_by_its_files(tmp_path):
    make(tmp_path / "set" / "a")
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "a.parquet").write_bytes(b"")
    (tmp_path / "rows" / "task.toml").write_text("")
    (tmp_path / "registry.json").write_text("[]")
    (tmp_path / "rows.json").write_text("[]")
    names = ("set", "set/a", "rows", "registry.json", "rows.json", "nowhere")
    assert [name for name in names if is_suite(tmp_path / name)] == ["set", "set/a", "registry.json"]


LAUGHS = "\n".join(["x0: &x0 [a]", *(f"x{n}: &x{n} [*x{n - 1}, *x{n - 1}]" for n in range(1, 60))])
MANY = 200_000


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"task.toml": "x = " + "[" * 100_000}, "task.toml: cannot be read"),
        ({"task.toml": PLAIN + "x = " + "9" * 5000}, "task.toml: cannot be read"),
        ({"task.toml": f"[environment]\nmemory = '{'9' * 400}G'"}, "task.toml: cannot be read"),
        ({"environment/docker-compose.yaml": "x: " + "[" * 10_000}, "environment/docker-compose.yaml: "),
        ({"environment/docker-compose.yaml": "#" * (300 << 10)}, "environment/docker-compose.yaml: larger"),
        (
            {"environment/docker-compose.yaml": f"{LAUGHS}\nservices: {{main: {{deploy: [*x59, devices]}}}}"},
            "environment/docker-compose.yaml, line 61: services.main.deploy: devices: sandboxes have none",
        ),
    ],
)
def test_what_is_made_to_take_for_ever_is_refused_at_once(tmp_path, files, words):
    began = time.monotonic()
    with pytest.raises(SuiteError) as refused:
        load(make(tmp_path, **files))
    assert str(refused.value).startswith(f"{tmp_path}/{words}")
    assert time.monotonic() - began < 20


def test_texts_that_hold_up_a_pattern_are_read_in_no_time():
    began = time.monotonic()
    assert without_canary("<!--" + "canary" * MANY).startswith("<!--")
    assert without_canary("\n" * (1 << 20)) == ""
    bait = "${A}" + "${a:-" * MANY
    assert resolved({"X": bait}, {"A": "1"}) == {"X": "1" + bait[4:]}
    assert time.monotonic() - began < 10


def test_names_that_move_the_cursor_are_told_as_plain_text(tmp_path):
    (warning,) = load(make(tmp_path, PLAIN + '"\\u001b[2J" = 1\n')).warnings
    assert warning.isprintable() and "x1b[2J is not known" in warning
