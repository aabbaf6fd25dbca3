"""Batches through the whole service: gateway, workers, client; and what the API refuses."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time

import pytest
from click.testing import CliRunner

from rollout.batch import BatchRequest, BatchState, FilterSpec, Verdict
from rollout.cli import main
from rollout.client import ApiError, AsyncClient
from rollout.schema import RolloutRequest, new_id
from tests.helpers.keys import http
from tests.helpers.stack import Stack, wait_until


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    """Two workers for all stages and no model: the noop handler gives the rewards it is told."""
    env = {"ROLLOUT_HANDLERS": "tests.helpers.handlers:all_handlers"}
    with Stack(tmp_path_factory.mktemp("stack"), tmp_path_factory.mktemp("sandboxes"), env) as stack:
        stack.start_workers({"one": "init,run,eval", "two": "init,run,eval"})
        yield stack


@pytest.fixture
def batches(stack):
    return stack.client.batches


def prompt(**task) -> RolloutRequest:
    return RolloutRequest(handler="lottery", task=task)


def finished(batch) -> bool:
    decided = batch.kept + batch.filtered + batch.failed + batch.cancelled
    return batch.started + batch.carried_in == decided + batch.carried_out + batch.open


def test_a_batch_gives_informative_groups_as_they_come_and_stops(stack, batches, capsys):
    prompts = [prompt(rewards=[1, 1]) for _ in range(6)] + [prompt(rewards=[0, 1]) for _ in range(12)]
    request = BatchRequest(id=new_id(), prompts=prompts, n=4, groups=5, carry="none")
    groups = list(stack.client.batch(request, progress=True))
    assert len(groups) == 5 and "5/5" in capsys.readouterr().err
    assert [group.id for group in stack.client.batch(request)] == [group.id for group in groups], "a restart"
    for group in groups:
        assert group.verdict is Verdict.KEPT and len(group.rollouts) == 4
        assert {rollout.reward for rollout in group.rollouts} == {0.0, 1.0}
        assert [rollout.index for rollout in group.rollouts] == [0, 1, 2, 3]
        assert {rollout.group_id for rollout in group.rollouts} == {group.id}
    done = batches.get(groups[0].batch, wait=20)
    assert (done.state, done.kept) == (BatchState.DONE, 5)
    wait_until(lambda: batches.get(done.id).open == 0, 120, "the redundant groups to end")
    done = batches.get(done.id)
    assert done.in_flight == 0 and finished(done) and done.filtered >= 1


def test_every_decided_group_can_be_read_and_a_cursor_goes_on(batches):
    prompts = [prompt(rewards=[1, 1]), prompt(rewards=[0, 1]), prompt(rewards=[0, 0])]
    made = batches.create(BatchRequest(prompts=prompts, n=2, groups=3))
    assert batches.get(made.id, wait=30).state is BatchState.EXHAUSTED
    page = batches.groups(made.id, every=True, include="verdicts")
    assert sorted((group.verdict.value, group.reason) for group in page.groups) == [
        ("filtered", "uniform_reward"),
        ("filtered", "uniform_reward"),
        ("kept", None),
    ]
    assert page.groups[0].rollouts == [] and page.batch.reasons == {"uniform_reward": 2}
    ids, cursor = [], "0"
    for _ in range(3):
        page = batches.groups(made.id, cursor, every=True, limit=1, include="summary")
        ids += [group.id for group in page.groups]
        cursor = page.cursor
        assert all(rollout.trajectory is None for rollout in page.groups[0].rollouts)
    assert len(set(ids)) == 3 and batches.groups(made.id, cursor).groups == []


def test_an_open_batch_takes_prompts_while_it_runs_each_call_once(stack, batches):
    made = batches.create(BatchRequest(n=2, groups=2, closed=False))
    assert made.state is BatchState.RUNNING
    groups = []
    reader = threading.Thread(target=lambda: groups.extend(batches.stream(made.id)))
    reader.start()
    body = {"id": "first", "prompts": [prompt(rewards=[0, 1]).model_dump(mode="json", exclude_defaults=True)]}
    for _ in range(3):
        answer = http.post(f"{stack.url}/v1/batches/{made.id}/prompts", json=body)
        assert answer.status_code == 200, answer.text
    wait_until(lambda: len(groups) == 1, 120, "the first group")
    assert batches.get(made.id).started == 1
    batches.extend(made.id, [prompt(rewards=[1, 0])], closed=True)
    reader.join(30)
    assert len(groups) == 2 and batches.get(made.id).state is BatchState.DONE
    with pytest.raises(ApiError) as refused:
        batches.extend(made.id, [prompt(rewards=[1, 0])])
    assert refused.value.status == 409


def test_a_pause_across_a_weight_update_and_a_cancel(batches):
    # More than can end before it is paused, however late that is.
    slow = [prompt(rewards=[0, 1], run_s=0.3) for _ in range(240)]
    made = batches.create(BatchRequest(prompts=slow, n=2, groups=200, max_in_flight=4))
    wait_until(lambda: batches.get(made.id).kept >= 1, 120, "a group")
    assert batches.pause(made.id).paused
    wait_until(lambda: batches.get(made.id).in_flight == 0, 120, "what runs to end")
    still = batches.get(made.id)
    time.sleep(1.0)
    assert batches.get(made.id).started == still.started
    batches.resume(made.id)
    wait_until(lambda: batches.get(made.id).started > still.started, 120, "the next group")
    assert batches.cancel(made.id).state is BatchState.CANCELLED
    wait_until(lambda: batches.get(made.id).open == 0, 120, "the rest to be cancelled")
    done = batches.get(made.id)
    assert finished(done) and done.in_flight == 0


def test_the_next_batch_goes_on_with_what_was_under_way(stack, batches):
    prompts = [prompt(rewards=[0, 1])] + [prompt(rewards=[0, 1], run_s=1.5) for _ in range(3)]
    first = batches.create(BatchRequest(prompts=prompts, n=2, groups=1, oversample=4))
    assert batches.get(first.id, wait=30).state is BatchState.DONE
    second = BatchRequest(n=2, groups=3, carry_from=first.id)
    groups = list(stack.client.batch(second))
    assert len(groups) == 3 and all(group.carried for group in groups)
    assert all(rollout.reward is not None for group in groups for rollout in group.rollouts)
    assert batches.get(first.id).carried_out == 3 and batches.get(first.id).started == 4, "nothing ran twice"


def test_a_killed_worker_changes_nothing(stack, batches):
    prompts = [prompt(rewards=[0, 1], run_s=0.2) for _ in range(30)]
    made = batches.create(BatchRequest(prompts=prompts, n=2, groups=20, max_in_flight=8))
    wait_until(lambda: batches.get(made.id).kept >= 3, 120, "some groups")
    victim = next(process for process in stack.processes if process.name == "two")
    os.killpg(victim.pid, signal.SIGKILL)
    victim.popen.wait(10)
    try:
        groups = list(batches.stream(made.id, timeout=240))
    finally:
        stack.start_worker("init,run,eval", "two")
    assert len(groups) == 20 and len({group.id for group in groups}) == 20
    assert finished(batches.get(made.id))


def test_a_page_says_where_the_full_pages_behind_the_next_one_begin(batches):
    prompts = [prompt(rewards=[0, 1] if k % 3 else [1, 1]) for k in range(30)]
    made = batches.create(BatchRequest(prompts=prompts, n=2, groups=17, carry="none"))
    wait_until(lambda: batches.get(made.id).state.ended, 120, "the batch")
    pages = [batches.groups(made.id, limit=2)]
    while pages[-1].groups:
        pages.append(batches.groups(made.id, pages[-1].cursor, limit=2))
    ends = [page.cursor for page in pages if len(page.groups) == 2]
    assert len(ends) == 8
    for number, page in enumerate(pages[:8]):
        # What is not kept lies between, and counts when the gateway looks ahead for a few pages.
        assert page.ahead == ends[number + 1 :][: len(page.ahead)]
        assert page.ahead or number >= 6
    assert [group.id for group in batches.stream(made.id)] == [
        group.id for page in pages for group in page.groups
    ]


def test_the_asynchronous_client_does_the_same(stack):
    async def run() -> list:
        async with AsyncClient(stack.url) as client:
            request = BatchRequest(prompts=[prompt(rewards=[0, 1])] * 3, n=2, groups=2, carry="none")
            groups = [group async for group in client.batch(request)]
            assert (await client.batches.get(groups[0].batch)).state is BatchState.DONE
            return groups

    assert len(asyncio.run(run())) == 2


def test_more_prompts_than_one_call_holds_come_in_several(batches):
    many = [prompt(rewards=[0, 1], number=k) for k in range(1500)]
    made = batches.create(BatchRequest(prompts=many, n=1, groups=2, filters=[], carry="none"))
    done = batches.get(made.id, wait=30)
    assert (done.state, done.kept) == (BatchState.DONE, 2)


def test_the_same_id_is_the_same_batch_and_another_body_is_refused(batches):
    request = BatchRequest(id=new_id(), prompts=[prompt(rewards=[0, 1])], n=2, groups=1)
    assert batches.create(request).id == batches.create(request).id == request.id
    with pytest.raises(ApiError) as refused:
        batches.create(request.model_copy(update={"groups": 2}))
    assert refused.value.status == 409


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "groups"),
        ({"groups": 1}, "(body)"),
        ({"groups": 1, "prompts": [{"handler": "no_such"}]}, "prompts.0.handler"),
        ({"groups": 1, "prompts": [{"handler": "noop", "n": 2}]}, "(body)"),
        ({"groups": 1, "prompts": [{"handler": "noop", "id": "x"}]}, "(body)"),
        ({"groups": 1, "prompts": [{"handler": "noop", "task": {"run_s": "x"}}]}, "prompts.0.task.run_s"),
        ({"groups": 1, "n": 2, "min_scored": 3, "prompts": [{"handler": "noop"}]}, "(body)"),
        ({"groups": 1, "filters": [{"name": "nope"}], "prompts": [{"handler": "noop"}]}, "filters.0.name"),
        ({"groups": 1, "carry_from": "no-such"}, "carry_from"),
        ({"groups": 1, "filter": [], "prompts": [{"handler": "noop"}]}, "filter"),
    ],
)
def test_a_bad_batch_names_the_field_and_starts_nothing(stack, batches, body, field):
    before = len(batches.list(1000))
    answer = http.post(f"{stack.url}/v1/batches", json=body)
    assert answer.status_code == 400, answer.text
    assert [error["field"] for error in answer.json()["errors"]] == [field]
    assert len(batches.list(1000)) == before


def test_a_batch_that_is_not_there_is_404_everywhere(stack):
    for method, path in (
        ("GET", ""),
        ("GET", "/groups"),
        ("GET", "/groups?wait=5"),
        ("POST", "/pause"),
        ("POST", "/cancel"),
    ):
        answer = http.request(method, f"{stack.url}/v1/batches/no-such{path}")
        assert answer.status_code == 404 and answer.json()["title"] == "No such batch"
    assert http.post(f"{stack.url}/v1/batches/no-such/prompts", json={"prompts": []}).status_code == 404


def test_a_filter_of_the_workers_is_known_to_the_gateway(stack, batches):
    request = BatchRequest(
        prompts=[prompt(rewards=[0.2, 0.4])],
        n=2,
        groups=1,
        filters=[FilterSpec(name="all_below", options={"reward": 0.5})],
    )
    assert list(stack.client.batch(request)) == []


def test_batches_are_counted_in_metrics_and_shown_by_the_command(stack, batches):
    made = batches.create(
        BatchRequest(prompts=[prompt(rewards=[0, 1]), prompt(rewards=[1, 1])], n=2, groups=2)
    )
    assert batches.get(made.id, wait=30).state is BatchState.EXHAUSTED
    text = http.get(f"{stack.url}/metrics").text
    for line in (
        'rollout_batches_ended_total{state="exhausted"}',
        'rollout_batch_groups_total{verdict="kept"}',
        'rollout_batch_groups_refused_total{reason="uniform_reward"}',
    ):
        (sample,) = [row for row in text.splitlines() if row.startswith(line)]
        assert float(sample.split()[-1]) >= 1
    for command in (["batches", "list"], ["batches", "show", made.id], ["batches", "cancel", made.id]):
        result = CliRunner().invoke(main, [*command, "--url", stack.url], env={"COLUMNS": "200"})
        assert result.exit_code == 0 and "exhausted" in result.output and "1/2" in result.output
        assert ("uniform_reward" in result.output) == ("show" in command)
