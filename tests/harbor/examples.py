"""Tasks that together use every field of the format, each with an agent's turns and what comes of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.helpers.harbor_tasks import MCP_HTTP, MCP_STDIO, NO_NETWORK, bash, calling, checks
from workers.agent.replay import Action


@dataclass(frozen=True)
class Example:
    """A task and a rollout of it."""

    toml: str = NO_NETWORK
    turns: tuple[Action | str, ...] = (bash("touch done.txt"),)
    """Of the agent; empty: the task's own solution is played."""
    parts: Mapping[str, Any] = field(default_factory=dict)
    """Of the directory, as `write_task` has them."""
    task: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the request's task."""
    reward: float | None = 1.0
    """None: the task is refused."""
    components: Mapping[str, float] | None = None
    said: tuple[str, ...] = ()
    """Parts of what the tools answer."""
    told: str = ""
    """Part of the prompt."""
    warned: str = ""
    """Part of a warning, or of why it is refused."""
    artifacts: Mapping[str, str] = field(default_factory=dict)


def steps(*names: str, **more: str) -> dict[str, Any]:
    """Parts of a task whose steps each want a file of their name; `more`: further files."""
    files = {f"steps/{name}/instruction.md": f"Make {name}." for name in names}
    files |= {f"steps/{name}/tests/test.sh": checks(f"test -f {name}") for name in names}
    return {"instruction": None, "test": None, "solution": None, "files": files | more}


def gives(reward: object) -> dict[str, str]:
    return {"test": f"echo '{json.dumps(reward)}' >/logs/verifier/reward.json\n"}


FAILS_AT_FIRST = "echo >>/tmp/looks; test $(wc -l </tmp/looks) -gt 3"
TOY = f"""{NO_NETWORK}
[[environment.mcp_servers]]
name = "toy"
transport = "stdio"
command = "python3"
args = ["-c", {json.dumps(MCP_STDIO)}]
"""
WEB = """
[environment]
network_mode = "no-network"
[environment.healthcheck]
command = "python3 -c 'import socket; socket.create_connection((\\"127.0.0.1\\", 8765))'"
start_period_sec = 30
start_interval_sec = 0.05
[[environment.mcp_servers]]
name = "web"
transport = "%s"
url = "http://localhost:8765%s"
headers = { X-Key = "${KEY:-sesame}" }
[[steps]]
name = "one"
[[steps]]
name = "two"
"""
STARTS = "python3 server.py >/dev/null 2>/tmp/server.log &"
SERVED = {
    "steps/one/workdir/setup.sh": STARTS,
    "steps/one/workdir/server.py": MCP_HTTP,
    "steps/two/workdir/setup.sh": STARTS,
}
WEB_TURNS = (calling("web__add", a=2, b=40), "Done.", bash("touch two"), calling("web__count"))
WEB_SAID = ("42", '{"calls": 1}')

EXAMPLES = {
    "described": Example(
        """
        schema_version = "1.4"
        source = "elsewhere"
        [task]
        name = "org/described"
        version = "1.0"
        description = "Make a file."
        authors = [{ name = "A", email = "a@example.org" }]
        keywords = ["files"]
        [metadata]
        difficulty = "easy"
        [environment]
        network_mode = "no-network"
        """
    ),
    "of older names": Example(
        """
        version = "1.0"
        [environment]
        memory = "1G"
        storage = "0.5G"
        allow_internet = false
        """,
        turns=(bash("ulimit -d -f; env | grep -i _proxy"), bash("touch done.txt")),
        said=(f"{1 << 20}", f"{512 << 10}"),
    ),
    "undone": Example(turns=("I will not.",), reward=0.0),
    "in a directory": Example(
        "[environment]\nworkdir = '/srv/work'\nenv = { A = 'a b', B = '${NO_SUCH:-else}' }\n",
        turns=(bash('echo "$PWD|$A|$B"'), bash("touch done.txt")),
        said=("/srv/work|a b|else",),
        told="The working directory is /srv/work.",
    ),
    "of a variable that nobody gives": Example(
        "[environment]\nenv = { KEY = '${NO_SUCH}' }\n", reward=None, warned="ROLLOUT_TASK_VARIABLES"
    ),
    "of a variable that its verifier misses": Example(
        NO_NETWORK + "[[steps]]\nname = 'one'\n[steps.verifier]\nenv = { KEY = '${NO_SUCH}' }\n",
        parts=steps("one"),
        reward=None,
        warned="NO_SUCH",
    ),
    "of a user": Example(
        NO_NETWORK + "[agent]\nuser = 'games'\n[verifier]\nuser = 'root'\n",
        turns=(bash("echo $USER $LOGNAME $HOME"), bash("touch done.txt")),
        parts={"test": checks('test -f done.txt -a "$USER $HOME" = "root /root"')},
        said=("games games /usr/games",),
        warned="one uid",
    ),
    "of a number": Example(
        NO_NETWORK + "[agent]\nuser = 5\n", turns=(bash("echo $USER; touch done.txt"),), said=("games",)
    ),
    "of nobody's user": Example(NO_NETWORK + "[agent]\nuser = 'nemo'\n", reward=None, warned="'nemo'"),
    "bounded": Example(
        NO_NETWORK + "memory_mb = 300\nstorage_mb = 50\ncpus = 2\n",
        turns=(bash("ulimit -d -f; touch done.txt"),),
        said=(f"{300 << 10}", f"{50 << 10}"),
        warned="cpus = 2 is not enforced",
    ),
    "too large": Example(NO_NETWORK + "memory_mb = 9000000\n", reward=None, warned="memory_mb=9000000"),
    "of a GPU": Example(NO_NETWORK + "gpus = 1\ngpu_types = ['H100']\n", reward=None, warned="gpus"),
    "of a TPU": Example(NO_NETWORK + "tpu = { type = 'v6e', topology = '2x2' }\n", reward=None, warned="tpu"),
    "of Windows": Example(NO_NETWORK + "os = 'windows'\n", reward=None, warned="windows"),
    "of an image that is not here": Example(
        "[environment]\ndocker_image = 'nobody/none:1'\n",
        reward=None,
        warned="rollout images build nobody-none-1",
    ),
    "of another image": Example(
        "[environment]\ndocker_image = 'nobody/none:1'\n", task={"image": "base"}, told="directory is /."
    ),
    "of an image that may not be built": Example(
        "[environment]\nbuild_timeout_sec = 100\n",
        parts={"files": {"environment/Dockerfile": "FROM base\nRUN true\n"}},
        reward=None,
        warned="ROLLOUT_IMAGE_BUILDS",
    ),
    "of a verifier with variables": Example(
        NO_NETWORK + "[verifier]\ntimeout_sec = 60\nenv = { WANTED = 'done.txt' }\nnetwork_mode = 'public'\n",
        turns=(bash("echo [$WANTED]; touch done.txt"),),
        parts={"test": checks('test -f $WANTED -a -n "$HTTP_PROXY"')},
        said=("[]",),
    ),
    "of a separate verifier": Example(
        "artifacts = [{ source = '/srv/out', exclude = ['drop'], service = 'main' }]\n"
        + NO_NETWORK
        + "docker_image = 'base'\n"
        + """
        [verifier]
        environment_mode = "separate"
        [verifier.environment]
        docker_image = "base"
        workdir = "/srv"
        [[verifier.collect]]
        command = "mkdir -p /srv/out; cp /done.txt /srv/out/; touch /srv/out/drop"
        service = "main"
        timeout_sec = 20
        user = "games"
        """.replace("        ", ""),
        turns=(bash("echo x >done.txt; touch /other"),),
        parts={"test": checks("test -f /srv/out/done.txt -a ! -e /other -a ! -e /srv/out/drop")},
    ),
    "of rewards with names": Example(
        parts=gives({"reward": 0.25, "style": 1}), reward=0.25, components={"reward": 0.25, "style": 1.0}
    ),
    "of a reward that is named": Example(
        parts=gives({"speed": 0.5, "style": 1}), task={"reward_key": "speed"}, reward=0.5
    ),
    "of artifacts": Example(
        "artifacts = ['out.txt', { source = '/srv/all', destination = 'all', exclude = ['*.o'] }]\n"
        + NO_NETWORK,
        turns=(
            bash("mkdir -p /srv/all/a; echo 2 >/srv/all/a/b; touch /srv/all/a/c.o; echo 1 >out.txt"),
            bash("echo 3 >/logs/artifacts/c; printf '\\377' >/logs/artifacts/binary; touch done.txt"),
        ),
        artifacts={"artifacts/out.txt": "1\n", "artifacts/all/a/b": "2\n", "artifacts/c": "3\n"},
    ),
    "in health": Example(
        NO_NETWORK
        + f"healthcheck = {{ command = {json.dumps(FAILS_AT_FIRST)}, interval_sec = 0.01, timeout_sec = 9, "
        "retries = 9 }\n",
    ),
    "of skills": Example(NO_NETWORK + "skills_dir = '/opt/skills'\n", told="are in /opt/skills."),
    "of a server by its pipes": Example(
        TOY, turns=(calling("toy__add", a=2, b=40), bash("touch done.txt")), said=("42",)
    ),
    "of a server over HTTP": Example(
        WEB % ("streamable-http", "/mcp"), WEB_TURNS, steps("one", "two", **SERVED), reward=0.5, said=WEB_SAID
    ),
    "of a server by its events": Example(
        WEB % ("sse", "/sse"), WEB_TURNS, steps("one", "two", **SERVED), reward=0.5, said=WEB_SAID
    ),
    "of all networks": Example(
        "[environment]\nnetwork_mode = 'public'\n",
        turns=(bash("env | grep -ci _proxy; touch done.txt"),),
        said=("6",),
    ),
    "of listed hosts": Example(
        "[environment]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['*.example.org']\n"
        "[verifier]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['192.0.2.0/24']\n",
        turns=(
            bash("python3 -c 'import urllib.request as r; r.urlopen(\"http://x.test\")'"),
            bash("touch done.txt"),
        ),
        said=("403",),
    ),
    "of an agent's own hosts": Example(
        NO_NETWORK + "[agent]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['example.org']\n",
        turns=(bash("echo [$no_proxy]; touch done.txt"),),
        said=("[localhost,127.0.0.1,::1]",),
    ),
    "in steps": Example(
        NO_NETWORK
        + """
        workdir = "/work"
        [[steps]]
        name = "one"
        min_reward = 1.0
        artifacts = ["one"]
        [steps.agent]
        timeout_sec = 100
        [steps.verifier]
        env = { X = "1" }
        [[steps]]
        name = "two"
        min_reward = { reward = 0.5 }
        healthcheck = { command = "test -f given" }
        [[steps]]
        name = "three"
        """.replace("        ", ""),
        turns=(bash("echo 1 >one"), "Done.", bash("cat given"), "Done."),
        parts=steps("one", "two", "three", **{"steps/two/workdir/given": "GIVEN"}),
        reward=0.5,
        components={"reward": 0.5, "step.one": 1.0, "step.two": 0.0},
        said=("GIVEN",),
        artifacts={"artifacts/one/one": "1\n"},
    ),
    "of a last step that counts": Example(
        "multi_step_reward_strategy = 'final'\n"
        + NO_NETWORK
        + "[[steps]]\nname = 'one'\n[[steps]]\nname = 'two'\n",
        turns=("No.", bash("touch two")),
        parts=steps("one", "two"),
    ),
    "of an oracle": Example(
        NO_NETWORK + "workdir = '/work'\n[solution]\nenv = { NAME = '${NO_SUCH:-done.txt}' }\n",
        turns=(),
        parts={"solution": "cat /solution/more; touch $NAME\n", "files": {"solution/more": "more\n"}},
        artifacts={"solution.log": "more\n"},
    ),
    "of an oracle in steps": Example(
        NO_NETWORK + "[[steps]]\nname = 'one'\n[[steps]]\nname = 'two'\n",
        turns=(),
        parts=steps(
            "one",
            "two",
            **{"steps/one/solution/solve.sh": "touch one", "steps/two/solution/solve.sh": "touch two"},
        ),
        components={"reward": 1.0, "step.one": 1.0, "step.two": 1.0},
    ),
}
