"""What a sandbox's server says of itself is enough for a fresh one to be like it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox.client import SandboxClient
from sandbox.connection import Address
from sandbox.errors import SandboxAhead, SandboxRequestError, SandboxTaken
from sandbox.layer import Layer
from tests.helpers.blocking import SyncHostClient, exchange, sandbox_of
from tests.helpers.sandboxes import server_modules
from tests.helpers.stack import wait_until
from tests.sandbox.test_ledger import Notebook, cancelled

pytestmark = pytest.mark.apptainer
WAIT_S = 60.0
ODD = r"""
mkdir -p /workspace/deep/below; cd /workspace/deep; cd below
export PLAIN=1 EMPTY= SPACES='  a  b ' MULTI=$'one\ntwo\n\n' QUOTES=$'\'"`$(exit 3)${x}\\' TAB=$'\t' DASH=-n
export BYTES=$'\377\376\001\177' GLOB='*?[a]' EQUALS=a=b=c UMLAUT=äß SEMICOLON='; exit 9 #' END=$'\n'
export LONG=$(printf '%0200000d' 7); declare -rx FIXED='x y'; declare -ix NUMBER=7; export -n TERM
unset PAGER; inner='not exported'; declare -r FIXED_HERE=q; list=(a 'b c' $'d\ne'); declare -n other=inner
declare -A map=([k 1]='v 2'); declare -x UNSET_BUT_EXPORTED
f() { cat <<END; case $1 in a) echo "a;; $1";; esac; }
text of $1
END
export -f f; g() { f "$@"; }; alias ll='ls -l'; shopt -s nullglob extglob; set -o pipefail; set -f; umask 027
h() { case $1 in +(a|b)) echo yes;; esac; }; cd() { builtin cd "$@" && echo moved; }
trap 'echo E >>/tmp/err-trap' ERR; trap 'echo bye' EXIT; set -a; later=exported; set +a
(exit 5)
"""
TOLD = r"""
code=$?; pwd; echo "$OLDPWD" ${#LONG}; export -n LONG; for name in PLAIN EMPTY SPACES MULTI QUOTES TAB DASH \
  BYTES GLOB EQUALS UMLAUT SEMICOLON END FIXED NUMBER TERM PAGER UNSET_BUT_EXPORTED \
  inner FIXED_HERE list map later; do declare -p $name 2>&1; done
echo $other ${#list[2]} "${map[k 1]}"; f a; g b; h abab; alias; trap -p; umask; shopt; set -o; type ll
declare -F | grep -v __sbx; (cd ..); bash -c 'f z'; wc -l </tmp/err-trap; echo $code
"""


@pytest.fixture(scope="module")
def host(shared_state):
    return SyncHostClient(shared_state)


@pytest.fixture
def pair(host) -> Iterator[Any]:
    """Two sandboxes, each with a client: one that is used, and a fresh one."""
    with sandbox_of(host) as used, sandbox_of(host) as fresh:
        yield used, fresh


def state_of(info: Any, wait_s: float = 0.0) -> dict[str, Any]:
    state = exchange(info.socket, {"op": "state", "wait_s": wait_s}, WAIT_S)
    return state | exchange(info.socket, {"op": "trees"}, WAIT_S)


def restore(info: Any, state: dict[str, Any]) -> None:
    assert exchange(info.socket, {"op": "restore", "state": state}, WAIT_S) == {}


def scratch(info: Any) -> Path:
    own = Path(Address.parse(info.socket).path).parent
    return own.parent / "scratch" / own.name


def copy(source: Path, target: Path, name: str) -> None:
    subprocess.run(["cp", "-aT", source / name, target / name], check=True)


def test_an_odd_shell_is_the_same_in_another_sandbox_and_notices_nothing_in_its_own(pair):
    (used, agent), (fresh, copied) = pair
    assert agent.bash(ODD).exit_code == 5
    state = state_of(used)
    assert (state["jobs"], state["kernel"]["lost"], state["shell"]["restarted"]) == (False, False, False)
    again = state_of(used)
    assert all(state[name] == again[name] for name in state if name != "exports"), "asking changes nothing"
    copy(scratch(used), scratch(fresh), "workspace")
    copied.write_file("/tmp/err-trap", agent.read_file("/tmp/err-trap"))
    restore(fresh, state)
    before, after = agent.bash(TOLD), copied.bash(TOLD)
    assert after.output == before.output and len(before.output) > 2000
    said = before.output.splitlines()
    assert said[:2] == ["/workspace/deep/below", "/workspace/deep 200000"] and said[-2:] == ["2", "5"]
    for line in ("not exported 3 v 2", 'declare -rx FIXED="x y"', "a;; a", "text of z", "yes"):
        assert line in said, line
    for result in (before, after):
        assert not result.shell_restarted and result.late_output == ""
        assert result.previous_cwd == result.cwd == "/workspace/deep/below"
    with pytest.raises(SandboxRequestError, match="only a fresh sandbox"):
        copied.setup({})
        exchange(fresh.socket, {"op": "take", "fence": 1}, WAIT_S)
        restore(fresh, state)


def test_processes_that_are_lost_are_told_of_and_a_kernel_without_variables_is_none(pair):
    (used, agent), (fresh, copied) = pair
    agent.setup({"GIVEN": "by init"})
    agent.bash("mkdir gone; cd gone; export MINE=1")
    for info, client in pair:
        client.ipython_warm()
        assert not any(state_of(info)["jobs"] for _ in range(10)), "a kernel that starts is not the agent's"
    agent.ipython("x = 1")
    agent.bash("sleep 1000 &")
    agent.bash("(until [ -e /tmp/go ]; do sleep 0.05; done; echo later; touch /tmp/said) & cd .")
    agent.write_file("/tmp/go", "")
    wait_until(lambda: agent.stat("/tmp/said").kind, WAIT_S, "the job to speak")
    state = state_of(used)
    assert state["jobs"] and state["kernel"]["lost"] and state["env"] == {"GIVEN": "by init"}
    restore(fresh, state)
    result = copied.bash("pwd; echo $MINE $GIVEN; jobs")
    assert result.shell_restarted and result.output == "/workspace\n1 by init\n"
    assert "later" in result.late_output and result.previous_cwd == "/workspace/gone"
    assert not copied.bash("cd /").shell_restarted
    assert copied.ipython("1").restarted and not copied.ipython("1").restarted
    assert copied.ipython("import os; os.environ['GIVEN']").output.strip() == "'by init'"
    mine = agent.bash("jobs")
    assert "Running" in mine.output and "later" in mine.late_output and not mine.shell_restarted


def test_a_shell_that_cannot_be_asked_leaves_its_directory_and_what_was_set_up(pair):
    (used, agent), (fresh, copied) = pair
    agent.setup({"GIVEN": "by init"})
    agent.bash("mkdir -p d; cd d; export MINE=1")
    assert agent.bash("cat", on_timeout="keep", quiet_timeout=0.3).running
    state = state_of(used)
    assert state["jobs"] and state["cwd"] == "/workspace/d" and state["exports"] is None
    copied.bash("mkdir d")
    restore(fresh, state)
    with pytest.raises(SandboxRequestError, match="no command is running"):
        copied.send_input("more")
    result = copied.bash('pwd; echo "$MINE$GIVEN"')
    assert result.shell_restarted and result.output == "/workspace/d\nby init\n"
    assert agent.send_input("still", WAIT_S).output.endswith("still\n")


def test_a_dead_shell_and_a_function_that_no_bash_reads_again_are_told_of(pair):
    (used, agent), (fresh, copied) = pair
    agent.bash("export MINE=1")
    agent.exec(["true"])
    state = state_of(used)
    broken = dict(state, exports="declare -x MINE=2\nf () { if }\ndeclare -x NEVER=1\n")
    assert state["exports"] is None and state["shell"]["restarted"]
    restore(fresh, broken)
    result = copied.bash("echo $MINE$NEVER")
    assert result.output == "2\n" and result.shell_restarted
    assert agent.bash("echo $MINE").shell_restarted


def test_what_was_abandoned_has_an_outcome_for_who_asks_again_elsewhere(pair):
    (used, _), (fresh, _) = pair
    record: dict[int, dict] = {}

    async def first() -> None:
        async with SandboxClient(used.socket) as client:
            await client.take(3)
            client.journal = Notebook(3, record)
            await client.bash("echo one")
            await cancelled(used, client.bash("echo x >begun; sleep 1000", 2000))

    async def again() -> None:
        async with SandboxClient(fresh.socket) as client:
            assert await client.take(4) == (2, 1)
            client.journal = Notebook(4, record)
            assert (await client.bash("echo one")).output == "one\n"
            result = await client.bash("echo x >begun; sleep 1000", 2000)
            assert result.interrupted and result.exit_code == 130
            assert (await client.bash("echo three")).output == "three\n"
        async with SandboxClient(fresh.socket) as client:
            client.journal = Notebook(3, {})
            with pytest.raises(SandboxTaken):
                await client.bash("echo one")

    asyncio.run(first())
    began = time.monotonic()
    state = state_of(used, wait_s=0.5)
    assert time.monotonic() - began > 0.5
    assert [state["ledger"][name] for name in ("fence", "last", "known")] == [3, 2, 1]
    restore(fresh, state)
    other = {"op": "bash", "command": "echo other", "timeout": 5, "number": 2, "fence": 4, "known": 1}
    with pytest.raises(SandboxAhead):
        exchange(fresh.socket, other, WAIT_S)
    with pytest.raises(SandboxAhead):
        exchange(fresh.socket, dict(other, number=1), WAIT_S)
    asyncio.run(again())


AGENT = r"""
cd /workspace/tree; echo b >changed; touch -d @0 changed; rm removed; echo n >new; mkdir made; mv moved made/
chmod 600 shut/in; chmod 0 shut; ln -sf nowhere link; touch same
"""


def test_noted_trees_and_layers_say_of_a_copy_what_they_said_of_the_original(pair):
    (used, agent), (fresh, copied) = pair
    agent.bash(
        "mkdir -p tree/shut; cd tree; echo a | tee changed removed moved same kept shut/{in,kept};"
        "ln -s kept link; mkdir -p /opt/x/shut; echo a | tee /opt/x/{changed,removed,kept} /opt/x/shut/kept"
    )
    noted = agent.note_tree("tree", exclude=["out"], directories=True)
    layer = Layer(Address.parse(used.socket))
    layer.note()
    agent.bash(AGENT + "cd /opt/x; echo b >changed; rm removed; echo n >new; rm -r /etc/ssl; chmod 0 shut")
    state, unchanged = state_of(used), layer.unchanged()
    assert noted == 9 and unchanged["/opt/x/kept"] and not unchanged["/opt/x/changed"]
    assert {*state["trees"]["/workspace/tree"]["altered"]} == {
        "changed",
        "removed",
        "moved",
        "shut",
        "shut/in",
        "link",
        "same",
    }
    for name in ("workspace", "home", "tmp", "overlay/upper"):
        copy(scratch(used), scratch(fresh), name)
    other = Layer(Address.parse(fresh.socket))
    other.note_again(unchanged)
    restore(fresh, state)
    for one in (agent, copied):
        one.bash("echo c >/workspace/tree/out; chmod 700 /opt/x/shut")
    for _ in range(2):
        tree = [one.changed_tree("tree") for one in (agent, copied)]
        assert sorted(tree[1].removed) == sorted(tree[0].removed) == ["moved", "removed"]
        assert (
            by_path(tree[1]) == by_path(tree[0])
            and {"new", "made/moved", "shut/in"} <= by_path(tree[0]).keys()
        )
        changes = [of_layer.changes() for of_layer in (layer, other)]
        assert changes[1].changed == changes[0].changed and "/opt/x/changed" in changes[0].changed
        assert (
            sorted(changes[1].removed) == sorted(changes[0].removed)
            and "/opt/x/removed" in changes[0].removed
        )
        assert changes[1].replaced == changes[0].replaced
        agent.bash("echo d >>/workspace/tree/kept; echo d >>/opt/x/kept")
        with contextlib.suppress(FileNotFoundError):
            (scratch(fresh) / "overlay/upper/opt/x/kept").write_text("d")
        copied.bash("echo d >>/workspace/tree/kept")
    assert {"kept"} <= by_path(tree[0]).keys() and "/opt/x/kept" in changes[0].changed


def by_path(changes: Any) -> dict[str, tuple]:
    return {
        entry.path: (entry.kind, entry.size, entry.mode, entry.link, entry.new) for entry in changes.changed
    }


def test_more_changes_than_can_be_told_stay_so_elsewhere(tmp_path, monkeypatch):
    with server_modules("state", "tree", "errors") as (state, tree, errors):
        trees, again = tree.Trees(str(tmp_path)), tree.Trees(str(tmp_path))
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            trees.op_note_tree({"path": name}, None)
        for number in range(100):
            os.mknod(tmp_path / "a" / str(number))
        os.mknod(tmp_path / "b" / "new")
        for limit, most in (("MAX_CHANGED", 99), ("MOST_NAME_BYTES", 500)):
            with monkeypatch.context() as patch:
                patch.setattr(state, limit, most)
                told = state.State(None, None, None, trees, {}, {}).op_trees({}, None)["trees"]
            assert [told[str(tmp_path / name)]["new"] for name in ("a", "b")] in (
                [None, ["new"]],
                [None, None],
            )
            state.State(None, None, None, again, {}, {}).note_again(told)
            with pytest.raises(errors.RequestError, match="more than 100000 files are not what they were"):
                again.op_changed_tree({"path": "a"}, None)
