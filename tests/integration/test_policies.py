"""Several policies in one service: each on a backend of its own, and two as adapters of one engine."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

from rollout.batch import BatchRequest
from rollout.cli import main
from rollout.client import ApiError
from rollout.policy import Canary, PolicyUpdate
from rollout.schema import Backend, Rollout, RolloutRequest, State
from services.state.backends.store import BackendStore
from tests.helpers.fake_engine import fake_engine
from tests.helpers.fake_language import FakeLanguage
from tests.helpers.keys import http
from tests.helpers.llm_servers import LLMServer
from tests.helpers.sandboxes import stop_host
from tests.helpers.stack import Stack, wait_until

PATIENCE_S = 120
ROLLOUTS, TOKENS = 12, 400
"""Of each policy, and of each call: about two seconds of an engine."""
LANGUAGE = FakeLanguage(first_id=20, vocab_size=300)
IDS = [30, 40, 50, 60]
NUMBERS = {"red": 1, "blue": 11, "left": 21, "right": 31}
"""Of each policy's first weights. What weights take off a log-prob tells whose they are."""


@dataclass
class World:
    """A stack with one worker, two engines of one policy each, and one with two adapters."""

    stack: Stack
    engines: dict[str, LLMServer]
    weights: Path

    @property
    def client(self):
        return self.stack.client

    @property
    def redis(self):
        return self.stack.redis.client

    def path(self, policy: str, step: int) -> Path:
        path = self.weights / f"{policy}@{NUMBERS[policy] + step}"
        path.mkdir(exist_ok=True)
        return path

    def canary(self, policy: str, step: int) -> Canary:
        by = (NUMBERS[policy] + step) / 10
        return Canary(token_ids=IDS, logprobs=[value - by for value in LANGUAGE.prompt_logprobs(IDS)])

    def update(self, policy: str, step: int, **options) -> PolicyUpdate:
        lora = {"lora": {}} if policy in ("left", "right") else {}
        fields = {"canary": self.canary(policy, step), "wait": PATIENCE_S, **lora, **options}
        return self.client.update_policy(
            f"{policy}-{step}", str(self.path(policy, step)), policy=policy, **fields
        )

    def ended(self, update: PolicyUpdate) -> PolicyUpdate:
        def look() -> PolicyUpdate | None:
            now = self.client.policy_update(update.id, 30, policy=update.policy)
            return now if now.state.ended else None

        return wait_until(look, PATIENCE_S, "the update to end")

    def submit(self, policy: str, count: int = ROLLOUTS, tokens: int = TOKENS) -> list[str]:
        request = RolloutRequest(
            handler="digits",
            task={"digits": 5},
            n=count,
            policy=policy,
            sampling={"max_tokens": tokens, "seed": 1},
            limits={"max_turns": 1},
        )
        return [rollout.id for rollout in self.client.submit(request)]

    def results(self, ids: list[str]) -> list[Rollout]:
        for engine in self.engines:
            self.tell(engine, "/fault", {"kind": "none"})
        return list(self.client.stream(ids, timeout=PATIENCE_S))

    def tell(self, engine: str, route: str, body: dict | None = None, **query) -> None:
        answer = httpx.post(self.engines[engine].url + route, json=body, params=query, timeout=60)
        answer.raise_for_status()

    def ask(self, engine: str, route: str) -> dict:
        return httpx.get(self.engines[engine].url + route, timeout=60).json()

    def label(self, engine: str) -> str:
        return self.ask(engine, "/weight_info")["weight_version"]

    def under_way(self, engine: str) -> int:
        return sum(call["state"] == "running" for call in self.ask(engine, "/calls"))

    def live(self, policies: dict[str, str]) -> dict[str, list[str]]:
        """Rollouts of each policy, all of whose calls run on its engine, and slowly until `results`: none may
        end before the test has done what it does under them, on a slow machine either."""
        engines = set(policies.values())
        for engine in engines:
            self.tell(engine, "/pause", mode="keep")
            self.tell(engine, "/fault", {"kind": "slow", "factor": 10})
        ids = {policy: self.submit(policy) for policy in policies}

        def all_there() -> bool:
            return all(
                self.under_way(engine) == ROLLOUTS * [*policies.values()].count(engine) for engine in engines
            )

        wait_until(all_there, PATIENCE_S, "all calls to arrive")
        for engine in engines:
            self.tell(engine, "/resume")
        return ids


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    directory = tmp_path_factory.mktemp("policies")
    with ExitStack() as exits, tempfile.TemporaryDirectory(prefix="rs-", dir="/tmp") as sandbox_dir:
        exits.callback(stop_host, Path(sandbox_dir))
        pool = exits.enter_context(ThreadPoolExecutor(4))
        kinds = {"red": {}, "blue": {}, "both": {"adapters": True}}
        servers = {
            name: pool.submit(exits.enter_context, fake_engine(step_ms=5, **options))
            for name, options in kinds.items()
        }
        stack = exits.enter_context(Stack(directory, Path(sandbox_dir), {"ROLLOUT_BACKEND_PROBE_S": "0.5"}))
        stack.start_worker("init,run,eval")
        engines = {name: started.result() for name, started in servers.items()}
        world = World(stack, engines, directory)
        world.client.add_backend(engines["red"].url, id="red", policies={"red": None})
        world.client.add_backend(engines["blue"].url, id="blue", policies={"blue": None})
        adapters = {"left": "adapter-l", "right": "adapter-r"}
        world.client.add_backend(engines["both"].url, id="both", policies=adapters)
        for policy in NUMBERS:
            assert world.update(policy, 0).state == "done"
        yield world


def check_tokens(rollouts: list[Rollout], policy: str, versions: list[str]) -> None:
    """Each call is whole, and each token has the version of the weights that it was sampled from."""
    assert len(rollouts) == ROLLOUTS
    for rollout in rollouts:
        assert (rollout.state, rollout.attempt, rollout.drop) == (State.COMPLETED, 1, False), rollout.error
        chain = rollout.trajectory.chain
        sampled = [segment for segment in chain.segments if segment.sampled]
        assert [segment.policy_version for segment in sampled] == versions
        assert len({segment.call_id for segment in sampled}) == 1
        assert sum(len(segment.token_ids) for segment in sampled) == TOKENS
        truths = iter(LANGUAGE.prompt_logprobs(chain.prompt_ids + chain.response_ids)[-TOKENS:])
        for segment in sampled:
            step = int(segment.policy_version.removeprefix(f"{policy}-"))
            by = (NUMBERS[policy] + step) / 10
            assert [next(truths) - by for _ in segment.logprobs] == pytest.approx(segment.logprobs)


def at_once(*calls: Callable[[], PolicyUpdate]) -> list[PolicyUpdate]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def test_two_policies_with_backends_of_their_own_are_updated_at_once_under_live_rollouts(world):
    ids = world.live({"red": "red", "blue": "blue"})
    updates = at_once(lambda: world.update("red", 1), lambda: world.update("blue", 2))
    assert [(update.policy, update.state, [*update.backends]) for update in updates] == [
        ("red", "done", ["red"]),
        ("blue", "done", ["blue"]),
    ]
    check_tokens(world.results(ids["red"]), "red", ["red-0", "red-1"])
    check_tokens(world.results(ids["blue"]), "blue", ["blue-0", "blue-2"])
    status = {status.name: status for status in world.client.policies()}
    assert (status["red"].backends, status["red"].current.version) == (["red"], "red-1")
    assert status["blue"].current.version == "blue-2" and status["default"].current is None


def test_an_update_that_waits_for_calls_holds_up_no_other_policy_s(world):
    ids = world.live({"red": "red"})
    slow = world.update("red", 3, mode="wait", wait=0)
    assert world.update("blue", 3).state == "done"
    assert not world.client.policy_update(slow.id, policy="red").state.ended
    assert len(world.results(ids["red"])) == ROLLOUTS
    assert world.ended(slow).state == "done"


def test_two_adapters_of_one_engine_are_updated_at_once_under_live_rollouts(world):
    assert at_once(lambda: world.update("left", 1), lambda: world.update("right", 1))[0].state == "done"
    assert world.label("both") == "left=left-1&right=right-1"
    ids = world.live({"left": "both", "right": "both"})
    updates = at_once(lambda: world.update("left", 2), lambda: world.update("right", 4))
    assert [update.state for update in updates] == ["done", "done"]
    check_tokens(world.results(ids["left"]), "left", ["left-1", "left-2"])
    check_tokens(world.results(ids["right"]), "right", ["right-1", "right-4"])
    assert world.label("both") == "left=left-2&right=right-4"
    backend = world.client.backend("both")
    assert backend.versions == {"left": "left-2", "right": "right-4"} and not backend.paused


def test_an_adapter_that_fails_takes_only_its_own_policy_away(world):
    """Last year's canary for this year's adapter: what is there now is not what the trainer says."""
    for policy in ("left", "right"):
        assert world.update(policy, 5).state == "done"
    ids = world.live({"left": "both", "right": "both"})
    update = world.update("left", 6, canary=world.canary("left", 4))
    assert update.state == "failed" and "canary failed" in update.backends["both"].error
    # None of the wrong ones: the calls were made again, from the weights that came back.
    for rollout in world.results(ids["left"]):
        assert (rollout.state, rollout.policy_versions) == (State.COMPLETED, ["left-5"]), rollout.error
    check_tokens(world.results(ids["right"]), "right", ["right-5"])
    settled = lambda: world.label("both") == "left=left-5&right=right-5"  # noqa: E731
    wait_until(settled, PATIENCE_S, "the adapter to come back")
    assert world.ask("both", "/is_paused") == {"is_paused": False}


def test_an_adapter_that_is_not_there_leaves_the_old_one(world):
    world.update("left", 7)
    update = world.client.update_policy(
        "left-8", str(world.weights / "nowhere"), policy="left", lora={"name": "adapter-l"}, wait=PATIENCE_S
    )
    assert update.state == "failed" and "No adapter found" in update.backends["both"].error
    backend = world.client.backend("both")
    assert (backend.versions["left"], backend.rejected, backend.healthy) == ("left-7", {}, True)
    (rollout,) = world.results(world.submit("left", 1, 5))
    assert rollout.policy_versions == ["left-7"]


def test_an_engine_that_was_started_again_gets_the_weights_of_all_its_policies(world):
    for policy in ("left", "right"):
        assert world.update(policy, 9).state == "done"
    # What a restart leaves: other adapters, and the label that the engine begins with.
    for name, policy in (("adapter-l", "left"), ("adapter-r", "right")):
        body = {"lora_name": name, "lora_path": str(world.path(policy, 0)), "load_inplace": True}
        world.tell("both", "/v1/load_lora_adapter", body)
    world.tell("both", "/update_weight_version", {"new_version": "default"})
    caught_up = lambda: world.label("both") == "left=left-9&right=right-9"  # noqa: E731
    wait_until(caught_up, PATIENCE_S, "both adapters to be brought")
    for policy in ("left", "right"):
        wait_until(
            lambda policy=policy: world.client.backend("both").versions.get(policy) == f"{policy}-9",
            PATIENCE_S,
            "it to be noted",
        )
        (rollout,) = world.results(world.submit(policy, 1, 5))
        assert (rollout.state, rollout.policy_versions) == (State.COMPLETED, [f"{policy}-9"])


def test_what_would_reach_another_policy_is_refused(world):
    update, url = world.client.update_policy, world.stack.url
    with pytest.raises(ApiError, match="serves several policies") as whole:
        update("v", "/ckpt", policy="left")
    assert whole.value.status == 400
    with pytest.raises(ApiError, match="serves policy 'left' as model 'adapter-l'"):
        update("v", "/ckpt", policy="left", lora={"name": "adapter-r"})
    with pytest.raises(ApiError, match="there are for policy 'red': red"):
        update("v", "/ckpt", policy="red", backends=["blue"])
    assert http.post(url + "/v1/policy", json={"version": "v"}).status_code == 409, "nobody serves `default`"
    named, usual = (http.get(url + path) for path in ("/v1/policies/default", "/v1/policy"))
    assert (named.status_code, named.json()) == (200, usual.json())
    routes = (("GET", ""), ("POST", ""), ("DELETE", ""), ("GET", "/updates/u"))
    for method, tail in routes:
        answer = http.request(method, f"{url}/v1/policies/green{tail}", json={"version": "v"})
        assert answer.status_code == 404
        assert "there are: blue, default, left, red, right" in answer.json()["detail"]
    assert http.get(url + "/v1/policies/red/updates/none").status_code == 404
    assert not world.client.policy("left").update


@pytest.mark.parametrize("submit", ["rollout", "batch"])
def test_a_request_for_a_policy_that_is_not_there_is_refused(world, submit):
    request = RolloutRequest(handler="digits", task={"digits": 5}, policy="green")

    def submitted():
        if submit == "rollout":
            return world.client.submit(request)
        return world.client.batches.create(BatchRequest(groups=1, n=2, prompts=[request]))

    with pytest.raises(ApiError, match="unknown policy 'green'; there are: blue, default, left, red, right"):
        submitted()
    store = BackendStore(world.redis)
    text = {"model": "m", "tokenizer": "t", "max_model_len": 64, "api": "chat", "policies": {"green": "m"}}
    store.put(Backend(id="text", url="http://127.0.0.1:9", **text))
    try:
        with pytest.raises(ApiError, match="served as text alone"):
            submitted()
        with pytest.raises(ApiError, match="no LLM backend that serves policy 'green' and takes weights"):
            world.client.update_policy("v", "/ckpt", policy="green")
    finally:
        store.remove("text")


def test_a_policy_without_backends_is_forgotten_with_its_name(world):
    store = BackendStore(world.redis)
    described = store.get("red")
    store.put(described.model_copy(update={"id": "brown", "policies": {"brown": described.model}}))
    assert world.client.update_policy("brown-0", policy="brown", wait=PATIENCE_S).state == "done"
    with pytest.raises(ApiError, match="brown serve the current weights") as used:
        world.client.forget_policy("brown")
    assert used.value.status == 409
    store.remove("brown")
    assert "brown" in [status.name for status in world.client.policies()]
    world.client.forget_policy("brown")
    assert "brown" not in [status.name for status in world.client.policies()]


def test_a_server_described_anew_keeps_its_policies(world):
    url = world.engines["both"].url
    before = world.client.backend("both")
    again = world.client.add_backend(url)
    assert (again.policies, again.versions) == (before.policies, before.versions)
    with pytest.raises(ApiError, match="'adapter-l' is named for several"):
        world.client.add_backend(url, policies={"left": "adapter-l", "right": "adapter-l"})
    with pytest.raises(ApiError, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"):
        world.client.add_backend(world.engines["red"].url, policies={"red": None, "green": "adapter-g"})
    assert world.client.add_backend(world.engines["red"].url).policies == {"red": "fake"}


def test_an_adapter_that_is_yet_to_be_loaded_gets_no_rollouts_before_its_first_update(world):
    url = world.engines["both"].url
    policies = {"left": "adapter-l", "right": "adapter-r", "new": "adapter-n"}
    added = world.client.add_backend(url, policies=policies)
    assert "the first update of policy 'new' does it" in added.rejected["new"]
    ids = world.submit("new", 1, 5)
    NUMBERS["new"] = 41
    assert world.update("new", 0, lora={}).state == "done"
    (rollout,) = world.results(ids)
    assert (rollout.state, rollout.policy_versions) == (State.COMPLETED, ["new-0"])
    assert world.client.backend("both").rejected == {}


def test_the_command_line_names_policies(world):
    url = ["--url", world.stack.url]

    def run(*args: str) -> str:
        done = CliRunner().invoke(main, [*args, *url])
        assert done.exit_code == 0, done.output
        return done.output

    lines = run("policy").splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["blue", "default", "left"]
    run("policy", "update", "red-cli", "--policy", "red")
    assert "red-cli" in run("policy", "show", "red") and '"red-cli"' in run("policy", "show", "red", "--json")
    missing = CliRunner().invoke(main, ["policy", "forget", "--policy", "green", *url])
    assert missing.exit_code == 1 and "there is no policy 'green'" in missing.output
    server = world.engines["blue"].url
    assert "blue=" in run("backends", "add", server, "--policy", "blue=fake")
    assert "left=adapter-l" in run("backends", "list")


def test_updates_are_refused_one_policy_at_a_time(world):
    """The second update of a policy, not that of another."""
    lock = world.redis.lock("policy:lock:red", timeout=60, thread_local=False)
    assert lock.acquire(blocking_timeout=PATIENCE_S)
    try:
        first = world.update("red", 10, wait=0)
        with pytest.raises(ApiError, match=f"/v1/policies/red/updates/{first.id}"):
            world.update("red", 11, wait=0)
        assert world.update("blue", 10).state == "done"
    finally:
        lock.release()
    assert world.ended(first).state == "done"
