"""When groups start: slots, oversampling, prompts, pauses, quotas."""

from __future__ import annotations

import pytest

from rollout.batch import BatchState, Verdict
from rollout.schema import RolloutRequest
from services.dispatch import _expand
from services.state.batches.store import BatchEnded, BatchStore
from services.state.tenants import QuotaExceeded, Tenant
from tests.helpers.batch_world import balanced


def test_groups_start_at_once_and_only_informative_ones_are_kept(world):
    batch = world.create(n=2, groups=2, prompts=4, oversample=2)
    assert world.get(batch).started == 4 and len(world.live()) == 8
    world.end_group(f"{batch}.1", [1, 1])
    world.end_group(f"{batch}.3", [1, 0])
    now = world.get(batch)
    assert (now.state, now.kept, now.filtered, now.open) == (BatchState.RUNNING, 1, 1, 2)
    assert now.reasons == {"uniform_reward": 1}
    world.end_group(f"{batch}.2", [0, 1])
    now = world.get(batch)
    assert (now.state, now.kept, now.open, now.in_flight) == (BatchState.DONE, 2, 1, 2)
    assert [(group.group_id, group.verdict) for group in world.batches.groups(batch, "0", 10)] == [
        (f"{batch}.1", Verdict.FILTERED),
        (f"{batch}.3", Verdict.KEPT),
        (f"{batch}.2", Verdict.KEPT),
    ]
    assert balanced(now) and now.finished_at is not None


def test_a_slot_that_frees_starts_the_next_prompt_without_waiting_for_the_rest(world):
    batch = world.create(n=1, groups=8, prompts=8, max_in_flight=2, oversample=1)
    assert world.live() == [f"{batch}.1", f"{batch}.2"]
    world.end_group(f"{batch}.2", [1])
    assert world.live() == [f"{batch}.1", f"{batch}.3"], "the straggler keeps nobody waiting"


def test_a_half_done_group_frees_its_slots(world):
    batch = world.create(n=4, groups=2, prompts=2, max_in_flight=4)
    assert world.live() == [f"{batch}.1.{k}" for k in range(4)]
    for k in range(3):
        world.end(f"{batch}.1.{k}", 1)
    world.settle()
    assert world.live() == [f"{batch}.1.3", *(f"{batch}.2.{k}" for k in range(3))]


def test_no_slot_stays_free_until_a_whole_group_fits(world):
    batch = world.create(n=4, groups=3, prompts=3, max_in_flight=6)
    assert world.live() == [*(f"{batch}.1.{k}" for k in range(4)), f"{batch}.2.0", f"{batch}.2.1"]
    world.end_group(f"{batch}.1", [0, 1, 0, 1])
    assert world.get(batch).in_flight == 6
    world.end_group(f"{batch}.2", [0, 1, 0, 1])
    world.end_group(f"{batch}.3", [0, 1, 0, 1])
    assert (world.get(batch).state, world.get(batch).kept) == (BatchState.DONE, 3)


def test_no_more_groups_are_under_way_than_are_missing_times_the_oversampling(world):
    batch = world.create(n=1, groups=4, prompts=20, oversample=1.5)
    assert world.get(batch).open == 6
    for number in range(1, 4):
        world.end_group(f"{batch}.{number}", [1])
    assert world.get(batch).open == 3, "one is missing: 1.5 are under way, those begun before included"


def test_a_group_larger_than_all_slots_is_sent_piece_by_piece(world):
    batch = world.create(n=5, groups=1, prompts=1, max_in_flight=2)
    for k in range(5):
        assert world.get(batch).in_flight == min(2, 5 - k)
        world.end(f"{batch}.1.{k}", k)
        world.settle()
    assert world.get(batch).state is BatchState.DONE


def test_a_group_that_was_sent_in_part_is_carried_over_and_completed(world):
    first = world.create(n=3, groups=1, prompts=2, max_in_flight=4)
    world.end(f"{first}.2.0", 1)
    world.batches.pause(first, True, None)  # so that its other members stay behind
    world.end_group(f"{first}.1", [0, 1, 1])
    assert world.get(first).state is BatchState.DONE
    second = world.create(n=2, groups=1, prompts=0, carry_from=first)
    live = [id_ for id_ in world.live() if id_.startswith(f"{first}.2.")]
    assert live == [f"{first}.2.1", f"{first}.2.2"], "a carried group keeps its own size"
    for rollout_id in live:
        world.end(rollout_id, 0)
    world.settle()
    assert world.get(second).state is BatchState.DONE


def test_cancelling_ends_a_group_that_was_sent_in_part(world):
    batch = world.create(n=4, groups=1, prompts=2, max_in_flight=6)
    world.end(f"{batch}.2.0", 1)
    world.batches.cancel(batch, None)
    world.settle()
    now = world.get(batch)
    assert (now.open, now.in_flight, now.cancelled, world.live()) == (0, 0, 2, [])


def test_without_prompts_a_batch_ends_as_exhausted(world):
    batch = world.create(n=2, groups=3, prompts=2)
    world.end_group(f"{batch}.1", [1, 0])
    assert world.get(batch).state is BatchState.RUNNING
    world.end_group(f"{batch}.2", [0, 0])
    now = world.get(batch)
    assert (now.state, now.kept, now.filtered) == (BatchState.EXHAUSTED, 1, 1)


def test_an_open_batch_waits_for_more_prompts(world):
    batch = world.create(n=2, groups=2, prompts=1, closed=False)
    world.end_group(f"{batch}.1", [0, 1])
    assert world.get(batch).state is BatchState.RUNNING
    more = RolloutRequest(handler="noop", task={"number": 9}).model_dump_json()
    assert world.batches.extend(batch, [more], None, "default") == 1
    world.settle()
    assert world.get(batch).started == 2
    world.batches.extend(batch, [], True, "default")
    with pytest.raises(BatchEnded, match="is closed"):
        world.batches.extend(batch, [more], None, "default")
    world.end_group(f"{batch}.2", [0, 1])
    assert world.get(batch).state is BatchState.DONE
    with pytest.raises(BatchEnded):
        world.batches.extend(batch, [], True, "default")


def test_a_pause_starts_nothing_and_what_runs_goes_on(world):
    batch = world.create(n=1, groups=4, prompts=8, max_in_flight=1)
    world.batches.pause(batch, True, "default")
    world.end_group(f"{batch}.1", [1])
    now = world.get(batch)
    assert (now.kept, now.paused, world.live()) == (1, True, [])
    world.batches.pause(batch, False, "default")
    world.settle()
    assert world.live() == [f"{batch}.2"]


# -- what is kept ----------------------------------------------------------------------------


def test_a_tenants_quota_holds_a_batch_back_and_does_not_end_it(world, monkeypatch):
    world.tenants.set(Tenant(name="small", quota_live=2))
    asked = []
    later = BatchStore.later

    def noted(store, todo, delay):
        asked.append((todo.kind, delay))
        later(store, todo, 0.0 if len(asked) < 3 else 60.0)

    monkeypatch.setattr(BatchStore, "later", noted)
    batch = world.create(n=2, groups=2, prompts=2, tenant="small")
    assert world.live() == [f"{batch}.1.0", f"{batch}.1.1"]
    assert asked and all(delay > 0 for _, delay in asked)
    world.end_group(f"{batch}.1", [0, 1])
    monkeypatch.undo()
    world.redis.zadd("batches:todo", dict.fromkeys(world.redis.zrange("batches:todo", 0, -1), 0))
    world.settle()
    assert world.live() == [f"{batch}.2.0", f"{batch}.2.1"]
    with pytest.raises(QuotaExceeded):
        world.rollouts.submit(_expand(RolloutRequest(handler="noop")), Tenant(name="small", quota_live=2))
