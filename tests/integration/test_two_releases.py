"""Workers of this release and of the one before serve one queue, and neither undoes what the other did."""

from __future__ import annotations

import io
import subprocess
import tarfile
import tempfile
from pathlib import Path

import pytest

from rollout.batch import BatchRequest
from rollout.schema import RolloutRequest, State, new_id
from services.state.keys import by_state
from tests.helpers.fake_engine import fake_engine
from tests.helpers.sandboxes import stop_host
from tests.helpers.stack import AS_DEPLOYED, ROOT, Process, Stack, wait_until

RELEASE = "4f85e171fc421e742080d3d064d790ac219f36f4"
"""Tag 0.2.0: the last one without a turn log."""
PATIENCE_S = 120
LINES = 8

pytestmark = pytest.mark.may_skip  # a copy of the tree without its history has no other release


@pytest.fixture(scope="module")
def before(tmp_path_factory):
    """The tree of the release before, with the handler of these tests."""
    made = subprocess.run(["git", "archive", RELEASE], cwd=ROOT, capture_output=True, check=False)
    if made.returncode:
        pytest.skip(f"no release 0.2.0 in this copy: {made.stderr.decode(errors='replace').strip()}")
    tree = tmp_path_factory.mktemp("release")
    with tarfile.open(fileobj=io.BytesIO(made.stdout)) as archive:
        archive.extractall(tree, filter="data")
    diary = (ROOT / "tests" / "helpers" / "diary.py").read_text()
    diary = diary.replace("    repeatable = EVERY_STAGE\n", "").replace("EVERY_STAGE, ", "")
    (tree / "tests" / "helpers" / "diary.py").write_text(diary)
    return tree


@pytest.fixture
def service(tmp_path):
    env = {"ROLLOUT_HANDLERS": "tests.helpers.diary:Diary"}
    with (
        tempfile.TemporaryDirectory(prefix="rs-", dir="/tmp") as sandbox_dir,
        fake_engine(script="tests.helpers.diary:script", step_ms=0.2) as engine,
        Stack(tmp_path, Path(sandbox_dir), env) as stack,
    ):
        stack.client.add_backend(engine.url, id="fake")
        try:
            yield stack
        finally:
            stop_host(Path(sandbox_dir))


def start_before(service: Stack, tree: Path, queues: str, name: str) -> Process:
    """A worker of the release before. Celery looks for its application where it is started."""
    command = service.worker_argv(queues, name)
    where = f'cd {tree} && exec "$@"'
    environment = {"PYTHONPATH": f"{AS_DEPLOYED}:{tree}"}
    worker = service.start(name, ["sh", "-c", where, "sh", *command, "-c", "32"], environment)
    service._await_worker(worker)
    source = Path(f"/proc/{worker.pid}/cwd").resolve()
    assert source == tree.resolve(), "it is of the release before"
    return worker


def diaries(count: int, pause_s: float) -> list[RolloutRequest]:
    task = {"lines": LINES, "pause_s": pause_s}
    return [RolloutRequest(handler="diary", id=new_id(), task=task) for _ in range(count)]


def require_true(service: Stack, ids: list[str]) -> list:
    """All have ended with what their sandboxes say."""
    get = service.client.get
    wait_until(lambda: all(get(i, include="summary").state.terminal for i in ids), PATIENCE_S, "all ends")
    items = [get(i, include="summary") for i in ids]
    assert {(item.state, item.reward) for item in items} == {(State.COMPLETED, 1.0)}, [
        (item.id, item.state, item.error, [note.text for note in item.notes]) for item in items
    ]
    assert all(item.metrics["turns"] == LINES + 1 for item in items)
    return items


def test_both_releases_serve_one_service_while_batches_run(service, before):
    """First only the old one, then both, of which the new RUN worker is killed, then only the new one."""
    old = [start_before(service, before, "init,eval", "old"), start_before(service, before, "run", "old-run")]
    prompts = [request.model_copy(update={"id": None}) for request in diaries(3, 0.2)]
    batch = BatchRequest(id=new_id(), prompts=prompts, n=2, groups=3, carry="none", filters=[])
    service.client.batches.create(batch)
    early = diaries(3, 0.2)
    service.client.submit(early)
    new = service.start_workers({"new": "init,eval", "new-run": "run"})
    more = diaries(8, 0.5)
    service.client.submit(more)
    client = service.redis.client

    def held_by(name: str) -> bool:
        """Whether a worker is some turns into a rollout."""
        ids = client.zrange(by_state("running"), 0, -1)
        owners = [(i, client.hget(f"rollout:{{{i}}}", "owner") or "") for i in ids]
        return any(name in owner and client.llen(f"rollout:{{{i}}}:turns:1") > 4 for i, owner in owners)

    wait_until(lambda: held_by("new-run"), PATIENCE_S, "turns on the new worker", new[1])
    new[1].kill()
    # Which release's reaper looks after what it held is open: it is taken over, or begins anew.
    second = service.start_worker("run", "second-run")
    for worker in old:
        worker.ask_to_stop()
    for worker in old:
        worker.stop()
    service.client.submit(last := diaries(4, 0.5))
    wait_until(lambda: held_by("second-run"), PATIENCE_S, "turns on the second worker", second)
    second.kill()
    service.start_worker("run", "third-run")
    items = require_true(service, [request.id for request in early + more + last])
    assert any(item.resumed for item in items), "the new release takes its own rollouts over"
    group_ids = [f"{batch.id}.{group}.{member}" for group in range(1, 4) for member in range(2)]
    require_true(service, group_ids)
    assert not client.keys("*:turns:*")
