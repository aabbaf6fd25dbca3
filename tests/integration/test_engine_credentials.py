"""Engines that ask for a token, through the whole service: who gets it, and where it never turns up.

The engine repeats the headers of a request in each of its errors, as some do.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import httpx
import pytest

from rollout.client import ApiError
from rollout.policy import BackendUpdateState, Canary, UpdateState
from rollout.schema import Blame, RolloutRequest, State
from tests.helpers.fake_engine import fake_engine
from tests.helpers.keys import http
from tests.helpers.sandboxes import stop_host
from tests.helpers.stack import Stack, wait_until

PATIENCE_S = 120
OLD, NEW, WRONG = "tok-old-3f9a7c51d2e84b06", "tok-new-b1946ac92492d234", "tok-wrong-77de68daecd823ba"


def write(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}")
    draft.touch(0o600)
    draft.write_text(text)
    draft.replace(path)


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """A stack with a worker, an engine behind a token, and files of keys."""
    directory = tmp_path_factory.mktemp("credentials")
    keys = directory / "keys"
    keys.mkdir(mode=0o700)
    for name, text in (("gpu", OLD), ("wrong", WRONG), ("engine", OLD)):
        write(keys / name, text)
    (keys / "open").write_text(OLD)
    (keys / "open").chmod(0o644)
    env = {
        "ROLLOUT_ENGINE_KEYS": str(keys),
        "ROLLOUT_LOG_LEVEL": "DEBUG",
        "ROLLOUT_BACKEND_PROBE_S": "0.2",
        "ROLLOUT_BACKEND_WAIT_S": "2",
    }
    (directory / "stack").mkdir()
    # Socket paths end at 107 bytes: pytest's own directories are too long for them.
    with tempfile.TemporaryDirectory(prefix="rc-", dir="/tmp") as sandboxes:
        try:
            with (
                fake_engine(token_file=keys / "engine", answer_tokens=(5, 20)) as engine,
                Stack(directory / "stack", Path(sandboxes), env) as stack,
            ):
                stack.start_worker("init,run,eval", "all")
                yield stack, engine, keys
        finally:
            stop_host(Path(sandboxes))


def request(**options):
    return RolloutRequest(handler="digits", task={"digits": 5}, limits={"max_turns": 1, **options})


def tell(engine, route, token=OLD, **body):
    answer = httpx.post(engine.url + route, json=body, headers={"Authorization": f"Bearer {token}"})
    answer.raise_for_status()


@pytest.mark.parametrize(
    ("key", "why"),
    [
        (None, "register it with `key`"),
        ("wrong", "engine key 'wrong' was sent"),
        ("absent", "ROLLOUT_ENGINE_KEYS"),
        ("open", "is open to others"),
    ],
)
def test_a_server_is_registered_with_the_right_key_alone(service, key, why):
    stack, engine, _ = service
    with pytest.raises(ApiError) as caught:
        stack.client.add_backend(engine.url, key=key)
    (error,) = caught.value.problem.errors
    assert error.field == "key" and why in error.message


@pytest.mark.parametrize("key", ["../engine", "/etc/hostname", "a/b"])
def test_no_path_passes_for_a_key(service, key):
    stack, engine, _ = service
    answer = http.post(f"{stack.url}/v1/backends", json={"url": engine.url, "key": key})
    assert answer.status_code == 400 and answer.json()["errors"][0]["field"] == "key"


def test_every_call_brings_the_key_which_turns_up_nowhere(service):
    stack, engine, keys = service
    client = stack.client
    for route in ("/v1/models", "/metrics", "/weight_info", "/calls"):
        assert httpx.get(engine.url + route).status_code == 401
    assert httpx.post(engine.url + "/pause").status_code == 401
    backend = client.add_backend(engine.url, id="gpu", key="gpu")
    assert (backend.key, backend.policy_version) == ("gpu", "default")
    assert backend.capacity_tokens, "its metrics were read"
    answers = [backend.model_dump_json()]

    def one(state, **limits):
        done = client.run([request(**limits)])[0]
        answers.append(http.get(f"{stack.url}/v1/rollouts/{done.id}").text)
        assert done.state is state, done.error
        return done

    def takes(token):
        headers = {"Authorization": f"Bearer {token}"}
        return httpx.get(f"{engine.url}/calls", headers=headers).status_code == 200

    one(State.COMPLETED)
    # Weights by every step of the control routes, with a canary that is answered and then fails.
    canary = Canary(token_ids=[18, 22, 311, 220], logprobs=[-1.0, -1.0, -1.0], tolerance=1e-6)
    update = client.update_policy("v1", "/weights/v1", wait=PATIENCE_S)
    assert update.state is UpdateState.DONE, update
    assert client.backend("gpu").policy_version == "v1"
    assert one(State.COMPLETED).trajectory.chains[0].segments[-1].policy_version == "v1"
    failed = client.update_policy("v2", "/weights/v2", canary=canary, wait=PATIENCE_S)
    assert failed.backends["gpu"].state is BackendUpdateState.FAILED
    answers += [update.model_dump_json(), failed.model_dump_json()]
    assert client.update_policy("v3", "/weights/v3", wait=PATIENCE_S).state is UpdateState.DONE

    # A refused call is the model's fault unless it is the key that is refused.
    tell(engine, "/fault", kind="error", status=400, calls=1)
    refused = one(State.FAILED, max_attempts=1)
    assert refused.error.blame is Blame.MODEL
    assert "'Authorization': 'Bearer ***'" in refused.error.message, "the engine repeats the header"
    tell(engine, "/fault", kind="error", status=401, calls=1)
    assert one(State.COMPLETED).metrics["failed_calls"] == 1
    tell(engine, "/fault", kind="error", status=500, calls=2)
    assert one(State.COMPLETED).metrics["failed_calls"] == 2

    # The engine's token is exchanged while it takes both; nothing is started anew.
    write(keys / "engine", f"{OLD}\n{NEW}\n")
    wait_until(lambda: takes(NEW), PATIENCE_S, "the engine to take the new token")
    one(State.COMPLETED)
    write(keys / "gpu", f"{NEW}\n")
    one(State.COMPLETED)
    write(keys / "engine", NEW)
    wait_until(lambda: not takes(OLD), PATIENCE_S, "the engine to forget its old token")
    one(State.COMPLETED)

    # And here it is exchanged too soon: the service says what is wrong, and goes on once it is right.
    write(keys / "gpu", WRONG)
    lost = one(State.FAILED, max_attempts=1)
    assert lost.error.blame is Blame.INFRASTRUCTURE
    wait_until(lambda: not client.backend("gpu").reachable, PATIENCE_S, "the keeper to see it")
    away = client.backend("gpu")
    assert "HTTP 401" in away.error and "engine key 'gpu' was sent" in away.error
    (keys / "gpu").unlink()
    one(State.FAILED, max_attempts=1)
    write(keys / "gpu", NEW)
    wait_until(lambda: client.backend("gpu").healthy, PATIENCE_S, "the backend to come back")
    one(State.COMPLETED)

    paths = ("/v1/backends", "/metrics", "/v1/policy", "/v1/rollouts", "/openapi.json", "/v1/status")
    answers += [http.get(stack.url + path).text for path in paths]
    files = [path for path in stack.directory.rglob("*") if path.is_file()]
    written = {path.name: path.read_bytes() for path in files}
    # The append-only file has each command that Redis was sent.
    assert any(b"v3" in data for name, data in written.items() if "aof" in name), sorted(written)
    assert b"was sent" in written["all.log"] and b"***" in written["all.log"]
    for token in (OLD, NEW, WRONG):
        assert [name for name, data in written.items() if token.encode() in data] == []
        assert [text[:80] for text in answers if token in text] == []
