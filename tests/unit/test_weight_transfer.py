"""Weights that a trainer's process sends itself: what is asked for, told to engines, and left by failures."""

from __future__ import annotations

import base64
import json
import pickle
import threading

import pytest
from pydantic import ValidationError

from rollout.policy import MOST_TRANSFER_BYTES, BackendUpdate, PolicyRequest, PolicyUpdate, WeightTransfer
from rollout.weight_sync import WeightsNotSent, WeightSync
from services.state.policy.store import LeaseLost, identity_of
from tests.helpers.described import describing
from tests.unit.test_policy import SCORES, VLLM, Store, backend
from workers.exchange import BROKEN_OFF, Exchange

INIT = {"master_address": "10.0.0.1", "master_port": 29500, "rank_offset": 1, "world_size": 7}
UPDATE = {"names": ["w"], "dtype_names": ["float32"], "shapes": [[2, 3]]}
SENT = {"ranks": {"other": 1, "s": 5}, "init_info": INIT, "update_info": UPDATE}
JOIN, START, RECEIVE, FINISH = (
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
)
LABEL = "/update_weight_version"
STEPS = ["/pause", JOIN, START, RECEIVE, FINISH, LABEL, "/resume"]


def request(transfer=None, **fields) -> PolicyRequest:
    return PolicyRequest(version="v1", transfer=transfer or SENT, **fields)


def exchange(asked: PolicyRequest, answers=None, *, fresh=True, store=None, **fields):
    """An exchange with a vLLM that does what it is told, or answers as given: calls, words to placement, and
    the end."""
    store, calls = store or Store(), []
    routes = {f"POST {step}": {"message": "done"} for step in STEPS} | (answers or {})
    with describing(routes, calls) as url:
        done = Exchange(store, backend(url, **{**VLLM, **fields}), asked).run(lambda _: None, fresh=fresh)
    return calls, [word for word, *_ in store.orders], done


def test_an_engine_joins_the_group_receives_is_labelled_and_only_then_resumed():
    calls, words, done = exchange(request())
    assert (done.state, done.error) == ("resumed", None)
    assert [path for path, _ in calls] == STEPS
    told = dict(calls)
    assert told[JOIN] == {"init_info": {**INIT, "rank_offset": 5}}, "its own rank, not the first one's"
    assert told[RECEIVE] == {"update_info": UPDATE}
    assert told[LABEL] == {"new_version": "v1"}
    # vLLM 0.22 reads a body there, and refuses none.
    assert told[START] == told[FINISH] == {}
    assert words == ["pause", "set_version", "recover", "resume"]
    assert {"connect", "reload"} <= done.seconds.keys()


def test_what_a_broken_sending_left_in_the_engine_is_ended_before_the_next():
    failing = {f"POST {FINISH}": iter_of((500, {"error": {"message": "none is active"}}), 200)}
    calls, _, done = exchange(request(), failing, healthy=False)
    assert done.state == "resumed"
    assert [path for path, _ in calls] == [*STEPS[:2], START, FINISH, *STEPS[2:]]


def iter_of(*answers):
    """One after the other."""
    return iter(answers).__next__


@pytest.mark.parametrize(
    ("part", "absent"),
    [("init_info", {JOIN}), ("update_info", {START, RECEIVE, FINISH})],
    ids=["connected before", "only connected"],
)
def test_connecting_and_receiving_may_be_two_updates(part, absent):
    calls, _, done = exchange(request({**SENT, part: None}))
    assert done.state == "resumed"
    assert [path for path, _ in calls] == [step for step in STEPS if step not in absent]


class Fleet(Store):
    """Where new rollouts want version `v1`."""

    def wanted_version(self, policy: str) -> str:
        return "v1"


@pytest.mark.parametrize(
    ("fields", "steps", "state"),
    [
        ({"policy_version": "v1"}, ["/pause", JOIN, LABEL, "/resume"], "resumed"),
        # Started again from its checkpoint, say: it goes on, and its tokens are not labelled as others.
        ({"policy_version": "default"}, ["/pause", JOIN, "/resume"], "skipped"),
        # Half of a sending may be in it.
        ({"policy_version": "v1", "healthy": False}, ["/pause", JOIN], "skipped"),
    ],
    ids=["current", "other", "unknown"],
)
def test_who_is_only_connected_gets_the_label_if_it_has_the_weights(fields, steps, state):
    store = Fleet()
    calls, words, done = exchange(request({**SENT, "update_info": None}), store=store, **fields)
    assert [path for path, _ in calls] == steps
    assert (done.state, done.error) == (state, None)
    assert "connect" in done.seconds
    assert (words == ["pause", "resume"]) == (state == "skipped"), "what is not healthy stays so"


@pytest.mark.parametrize("step", STEPS[:3])
def test_until_weights_arrive_a_failure_leaves_the_old_ones_in_service(step):
    answer = (
        (404, {"detail": "Not Found"}) if step == START else (500, {"error": {"message": "not configured"}})
    )
    calls, words, done = exchange(request(), {f"POST {step}": answer})
    assert done.state == "failed" and step in done.error
    assert ("transfers as docs/policy.md says" in done.error) == (step == START)
    assert [path for path, _ in calls] == [*STEPS[: STEPS.index(step) + 1], "/resume"]
    assert words == ["pause", "resume"]


@pytest.mark.parametrize("step", STEPS[2:])
def test_from_then_on_a_failure_takes_the_backend_out_and_it_is_never_resumed(step):
    calls, words, done = exchange(request(), {f"POST {step}": (500, {"error": {"message": "half of it"}})})
    assert done.state == "failed" and "half of it" in done.error
    assert [path for path, _ in calls] == [*STEPS[: STEPS.index(step) + 1], "/pause"]
    assert words == ["pause", "fail", "resume"]


SGLANG = {
    f"POST /{route}": {"success": True}
    for route in (
        "pause_generation",
        "init_weights_update_group",
        "update_weights_from_distributed",
        "update_weight_version",
        "continue_generation",
    )
}


def test_a_failed_canary_takes_it_out_too():
    asked = request(canary={"token_ids": [1, 2, 3], "logprobs": [-1.5, -9.0]})
    answers = SGLANG | {"POST /generate": SCORES}
    calls, words, done = exchange(asked, answers, engine="sglang", api="sglang")
    assert "canary failed" in done.error
    assert words == ["pause", "fail", "resume"]
    assert calls[-1] == ("/pause_generation", {"mode": "abort"})


def test_a_trainer_that_dies_in_the_middle_costs_its_time_limit_and_the_backend():
    over = threading.Event()
    try:
        calls, words, done = exchange(
            request(timeout_s=0.5), {"POST " + RECEIVE: lambda: over.wait(30) and 200}
        )
    finally:
        over.set()
    assert "no answer within" in done.error
    assert [path for path, _ in calls] == [*STEPS[:4], "/pause"]
    assert words == ["pause", "fail", "resume"]


def test_what_a_dead_worker_has_begun_is_not_repeated_and_not_trusted():
    calls, words, done = exchange(request(), fresh=False)
    assert done.state == "failed" and BROKEN_OFF in done.error
    assert [path for path, _ in calls] == ["/pause"], "nothing but that its calls end"
    assert words == ["pause", "fail", "resume"]


def test_a_worker_that_lost_its_lease_while_weights_came_neither_labels_nor_resumes():
    store, calls, steps = Store(), [], []

    def report(progress):
        steps.append(progress.state.value)
        if steps[-2:] == ["loading", "loading"]:
            raise LeaseLost("another worker goes on")

    with (
        describing({f"POST {step}": 200 for step in STEPS}, calls) as url,
        pytest.raises(LeaseLost),
    ):
        Exchange(store, backend(url, **VLLM), request()).run(report)
    assert [path for path, _ in calls] == STEPS[:5]
    assert store.orders == [("pause", "s")]


def test_sglang_joins_by_its_own_routes_and_takes_no_handles_of_memory():
    sent = {"names": ["w"], "dtypes": ["float32"], "shapes": [[2, 3]], "group_name": "g"}
    asked = request({**SENT, "update_info": sent})
    calls, _, done = exchange(asked, SGLANG, engine="sglang", api="sglang")
    assert done.state == "resumed"
    assert calls[1:3] == [
        ("/init_weights_update_group", {**INIT, "rank_offset": 5}),
        ("/update_weights_from_distributed", {**sent, "flush_cache": False, "abort_all_requests": False}),
    ]
    by_ipc = request({"backend": "ipc", "update_info": {"names": []}})
    _, words, done = exchange(by_ipc, SGLANG, engine="sglang", api="sglang")
    assert "by nccl only" in done.error
    assert words == ["pause", "resume"], "its weights are as they were"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"path": "/ckpt"}, "without `path`"),
        ({"path": "/ckpt", "lora": {"name": "l"}}, "without `path`"),
        ({"concurrency": 1}, "all backends at once"),
        ({"backends": ["s"]}, "not those of `transfer.ranks`"),
        ({"transfer": {"ranks": {"s": 1}}}, "nothing to do"),
        ({"transfer": {"update_info": UPDATE}}, "`ranks` are needed"),
        ({"transfer": {"backend": "ipc", "ranks": {"s": 1}, "update_info": {}}}, "`ranks` are needed"),
        ({"transfer": {"backend": "gloo", "update_info": {}}}, "'nccl' or 'ipc'"),
        ({"transfer": {**SENT, "ranks": {"s": 0}}}, "greater than or equal to 1"),
        ({"transfer": {**SENT, "ranks": {"s": 1, "t": 1}}}, "each another one"),
        ({"transfer": {**SENT, "ranks": {"s": 7}}}, "below `world_size`"),
        ({"transfer": {"backend": "ipc", "init_info": {"packed": True}}}, "packed=False"),
        ({"transfer": {"backend": "ipc", "update_info": {"tensor_sizes": [1]}}}, "packed=False"),
        ({"transfer": {**SENT, "update_info": {"scale": float("nan")}}}, "not JSON compliant"),
        ({"transfer": {**SENT, "update_info": {"names": ["n" * MOST_TRANSFER_BYTES]}}}, "bytes of JSON"),
    ],
)
def test_what_cannot_be_sent_is_refused_before_anybody_waits_for_it(fields, words):
    with pytest.raises(ValidationError, match=words):
        PolicyRequest.model_validate({"version": "v1", "transfer": SENT, **fields})


def test_an_update_is_for_the_members_of_the_group_and_the_same_only_for_one_sending():
    first = request()
    assert first.backends == ["other", "s"]
    again = PolicyRequest.model_validate_json(first.model_dump_json())
    assert identity_of(first) == identity_of(again), "a caller that lost the answer"
    assert identity_of(first) != identity_of(request()), "a trainer that sends once more"


class Told:
    """A client that notes the updates that it is asked for."""

    def __init__(self, *states: str) -> None:
        self.states, self.updates = list(states), []
        self.backends = {"a": BackendUpdate(seconds={"connect": 0.1})}

    def update_policy(self, version, path=None, **fields) -> PolicyUpdate:
        patience = fields.pop("wait")
        self.updates.append(PolicyRequest(version=version, path=path, **fields))
        assert patience > fields["timeout_s"] == 600
        return PolicyUpdate(
            id="u",
            **self.updates[-1].model_dump(include={"version", "path", "mode"}),
            verified=False,
            state=self.states.pop(0),
            backends=self.backends,
            created_at=0.0,
        )


def test_vllm_s_trainer_engine_finds_in_it_the_client_that_it_knows():
    client = Told("done", "done", "partly")
    sync = WeightSync(client, "step-0", gpus={"a": 2, "b": 4}, mode="abort")
    assert sync.world_size == 7
    sync.init_weight_transfer_engine(INIT)
    sync.version, sync.canary = "step-1", {"token_ids": [1, 2], "logprobs": [-1.0]}
    sync.start_weight_update()
    sync.update_weights({**UPDATE, "unset": None})
    sync.finish_weight_update()
    joined, sent = client.updates
    assert [joined.version, sent.version] == ["step-0", "step-1"]
    assert joined.transfer.ranks == sent.transfer.ranks == {"a": 1, "b": 3}
    assert (joined.transfer.init_info, joined.transfer.update_info, joined.canary) == (INIT, None, None)
    assert (sent.transfer.init_info, sent.transfer.update_info) == (None, UPDATE)
    assert (sent.mode, sent.canary.token_ids) == ("abort", [1, 2])
    assert joined.transfer.id != sent.transfer.id
    client.backends = {"a": BackendUpdate(state="failed", error="backend a: no answer")}
    with pytest.raises(WeightsNotSent, match="'step-1' are partly: backend a: no answer") as failed:
        sync.update_weights(UPDATE)
    assert failed.value.update is sync.update


@pytest.mark.parametrize(
    ("state", "backend_state", "seconds", "connected"),
    [
        ("failed", "skipped", {"connect": 0.1}, True),  # with other weights: the first sending mends it
        ("failed", "skipped", {}, False),  # removed
        ("failed", "failed", {"connect": 9.0}, False),
        ("partly", "resumed", {"connect": 0.1}, True),
    ],
)
def test_a_trainer_is_connected_when_all_have_joined_whatever_weights_they_have(
    state, backend_state, seconds, connected
):
    client = Told(state)
    client.backends = {"a": BackendUpdate(state=backend_state, seconds=seconds)}
    sync = WeightSync(client, "step-0", gpus={"a": 1})
    if connected:
        sync.init_weight_transfer_engine(INIT)
    else:
        with pytest.raises(WeightsNotSent):
            sync.init_weight_transfer_engine(INIT)


def test_handles_of_memory_go_as_vllm_s_own_client_sends_them():
    client = Told("done")
    handles = [{"GPU-0": ("rebuild", 1, (2, 3))}]
    WeightSync(client, "v").update_weights({**UPDATE, "ipc_handles": handles})
    sent = client.updates[0].transfer
    assert sent.ranks is None
    assert pickle.loads(base64.b64decode(sent.update_info.pop("ipc_handles_pickled"))) == handles
    assert sent.update_info == UPDATE
    assert json.loads(sent.model_dump_json())["backend"] == "ipc"
    assert WeightTransfer(backend="ipc", init_info={"packed": False}).init_info_of("x") == {"packed": False}
