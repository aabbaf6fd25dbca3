"""How results are kept in Redis: compressed, until acknowledged or past retention. Real Redis, no workers."""

from __future__ import annotations

import random

import pytest

from rollout import arrays
from rollout.schema import RolloutRequest, Stage, State
from rollout.trajectory import Trajectory
from services.dispatch import _expand
from services.settings import Settings
from services.state import keys
from services.state.results.store import ResultStore
from services.state.results.stream import ResultStream
from services.state.rollouts import payloads
from services.state.rollouts.store import Finish, RolloutStore
from services.state.tenants import DEFAULT_TENANT
from tests.helpers.rollouts import chain, sampled
from tests.helpers.stack import wait_until
from tests.integration.conftest import emptied

client = emptied


def trajectory(ids=2000, seed=0):
    """As long and as irregular as real ones: token ids and log-probs."""
    draw = random.Random(seed)
    prompt, answer = ([draw.randrange(150_000) for _ in range(number)] for number in (50, ids))
    logprobs = [-draw.expovariate(2.0) for _ in range(ids)]
    return Trajectory(chains=[chain(prompt, sampled(answer, logprobs, policy_version="v1"))])


def stores(client, **settings):
    chosen = Settings(**settings)
    return RolloutStore(client, chosen), ResultStore(client, chosen)


def ended(store, ids=2000, seed=0):
    """The id of a rollout that went all the way and left a trajectory."""
    rollout_id = submitted(store)
    run_to_evaluating(store, rollout_id, trajectory(ids, seed))
    claim = store.claim(rollout_id, 1, Stage.EVAL, "w")
    assert claim.trajectory() == trajectory(ids, seed)
    assert store.finish(claim, Finish(State.COMPLETED, {"reward": "1.0"})) == State.COMPLETED
    return rollout_id


def submitted(store):
    new = _expand(RolloutRequest(handler="noop"))
    store.submit(new)
    return new[0].id


def run_to_evaluating(store, rollout_id, trajectory):
    store.finish(store.claim(rollout_id, 1, Stage.INIT, "w"), Finish(State.READY))
    claim = store.claim(rollout_id, 1, Stage.RUN, "w")
    assert store.finish(claim, Finish(State.EVALUATING, trajectory=trajectory)) == State.EVALUATING


def test_a_long_trajectory_is_stored_compressed_and_read_back_as_it_was(client):
    store, results = stores(client)
    rollout_id = ended(store)
    stored = payloads.get(client, keys.trajectory(rollout_id))
    assert len(stored) < 0.6 * len(trajectory().model_dump_json())
    assert store.get(rollout_id).trajectory == trajectory()
    assert results.stored_bytes() == len(stored)


@pytest.mark.parametrize(
    "stored", [b"", b"{", b"\x03later", b"\xff\xfe", payloads.encode_trajectory(trajectory())[:-1]]
)
def test_a_value_that_cannot_be_read_is_an_error_and_no_other_trajectory(stored):
    with pytest.raises(payloads.PayloadError):
        payloads.decode_trajectory(stored)


def test_acknowledging_says_for_each_id_what_it_did(client):
    store, results = stores(client)
    done, live = ended(store), submitted(store)
    words = results.acknowledge([done, live, "nobody", done])
    assert words == ["acknowledged", "live", "unknown", "already"]
    assert store.get(done).acknowledged_at is not None and store.get(live).acknowledged_at is None
    assert not client.exists(keys.record("nobody"))


def test_another_tenants_results_cannot_be_acknowledged(client):
    store, results = stores(client)
    done = ended(store)
    assert results.acknowledge([done], "somebody-else") == ["unknown"]
    assert store.get(done).acknowledged_at is None
    assert results.acknowledge([done], DEFAULT_TENANT) == ["acknowledged"]


def test_records_are_passed_on_once_a_rollout_has_ended_and_are_there_before(client):
    store, _ = stores(client)
    done, live, new = ended(store), submitted(store), submitted(store)
    run_to_evaluating(store, live, trajectory(70))
    by_id = {rollout.id: record for rollout, record in store.get_records([done, live, "nobody", new])}
    assert by_id.keys() == {done, live, new} and by_id[new] is None
    assert arrays.decode(by_id[live]).trajectory() == trajectory(70), "it may change, so it is read at once"
    assert [arrays.decode(raw).trajectory() for raw in store.records({done: by_id[done]})] == [trajectory()]
    assert list(store.get_records([done], tenant="somebody-else")) == []


@pytest.mark.parametrize("wrong", ["absent", "longer", "shorter"])
def test_a_record_that_has_changed_since_its_size_was_told_ends_the_reading(client, wrong):
    store, _ = stores(client)
    first, second = ended(store), ended(store)
    sizes = {rollout.id: size for rollout, size in store.get_records([first, second])}
    if wrong == "absent":
        client.delete(keys.trajectory(second))
    else:
        sizes[second] += 1 if wrong == "longer" else -1
    reading = store.records(sizes)
    assert len(next(reading)) == sizes[first]
    with pytest.raises(payloads.PayloadError, match=f"{second}.* is not what it was"):
        next(reading)


def test_an_acknowledged_trajectory_is_freed_early_only_where_the_setting_says_so(client):
    store, results = stores(client)
    acked, unread = ended(store), ended(store)
    results.acknowledge([acked])
    assert results.sweep() == []
    _, results = stores(client, keep_acked_s=3600)
    assert results.sweep() == []
    _, results = stores(client, keep_acked_s=0)
    assert [(drop.rollout_id, drop.reason) for drop in results.sweep()] == [(acked, "acknowledged")]
    assert [record for _, record in store.get_records([acked, unread])] == [
        None,
        client.strlen(keys.trajectory(unread)),
    ]
    freed = store.get(acked)
    assert freed.trajectory is None and freed.trajectory_dropped == "acknowledged" and freed.reward == 1.0
    assert store.get(unread).trajectory is not None
    assert results.stored_bytes() == client.strlen(keys.trajectory(unread))
    assert results.totals()["dropped_acknowledged"] == 1
    assert results.sweep() == []


def test_what_the_archive_has_not_read_is_not_freed_by_an_acknowledgement(client):
    store, results = stores(client, keep_acked_s=0)
    first, second = ended(store), ended(store)
    results.acknowledge([first, second])
    client.set(keys.ARCHIVE_CURSOR, store.get(first).completion)
    assert [drop.rollout_id for drop in results.sweep()] == [first]
    client.set(keys.ARCHIVE_CURSOR, store.get(second).completion)
    assert [drop.rollout_id for drop in results.sweep()] == [second]


def test_beyond_the_limit_of_bytes_acknowledged_ones_go_first_then_the_oldest_and_never_a_live_one(client):
    store, results = stores(client)
    live = submitted(store)
    run_to_evaluating(store, live, trajectory(20_000))
    done = [ended(store, seed=number) for number in range(5)]
    results.acknowledge([done[3]])
    sizes = {id_: client.strlen(keys.trajectory(id_)) for id_ in done}
    assert results.stored_bytes() == sum(sizes.values()), "the live one does not count"
    room = sizes[done[1]] + sizes[done[2]] + sizes[done[4]]
    _, results = stores(client, results_max_bytes=room)
    dropped = results.sweep()
    assert [(drop.rollout_id, drop.acknowledged) for drop in dropped] == [(done[3], True), (done[0], False)]
    assert {drop.bytes for drop in dropped} == {sizes[done[3]], sizes[done[0]]}
    assert store.get(done[0]).trajectory_dropped == "size"
    _, results = stores(client, results_max_bytes=1)
    assert len(results.sweep()) == 3
    assert results.stored_bytes() == 0 and results.totals()["dropped_size"] == 5
    assert store.claim(live, 1, Stage.EVAL, "w").trajectory(), "the live one has kept its own"


def test_results_past_their_retention_leave_the_account(client):
    store, results = stores(client, retention_s=0.2)
    rollout_id = ended(store)
    wait_until(lambda: store.get(rollout_id) is None, 120, "the record to expire")
    results.sweep()
    assert results.stored_bytes() == 0
    assert client.hlen(keys.RESULTS_SIZES) == client.zcard(keys.RESULTS_ENDED) == 0


def test_what_is_past_its_retention_is_in_no_list_any_more(client):
    """Else lists would grow by all that is done in eight days, however soon it is forgotten."""
    store, _ = stores(client)
    kept = ended(store)
    short, results = stores(client, retention_s=0.05)
    before = set(client.keys())
    new = _expand(RolloutRequest(handler="noop", task={"reward": 0.5}, n=5, tags=["a", "b"]))
    short.submit(new)
    for rollout in new:
        run_to_evaluating(short, rollout.id, trajectory(10))
        short.finish(short.claim(rollout.id, 1, Stage.EVAL, "w"), Finish(State.COMPLETED))
    wait_until(lambda: not any(short.get(rollout.id) for rollout in new), 30, "the records to expire")
    results.sweep()
    cursor = ResultStream(client).tail()
    wait_until(
        lambda: not results.trim() and not client.zscore(keys.CREATED, new[-1].id), 30, "the end of them"
    )
    assert store.get(kept), "that of a longer retention stays, in the lists too"
    names = [keys.CREATED, keys.by_tenant(DEFAULT_TENANT), keys.by_state(State.COMPLETED)]
    assert [client.zrange(name, 0, -1) for name in names] == [[kept]] * 3
    assert set(client.keys()) - before == {keys.RESULTS_TRIMMED}, "nothing is left of them"
    bodies = client.zrange(keys.requests_of(DEFAULT_TENANT), 0, -1)
    assert len(bodies) == 1 and client.hget(keys.TENANTS_BYTES, DEFAULT_TENANT) == bodies[0].split()[1]
    assert not ResultStream(client).missed(cursor), "who had read all has missed nothing"


def test_a_slow_reader_loses_no_completion_within_retention_and_is_told_of_those_past_it(client):
    store, results = stores(client)
    completions = ResultStream(client)
    done = [ended(store, ids=10) for _ in range(3)]
    assert results.trim() == 0
    ids, cursor = completions.since("0", limit=1)
    assert ids == done[:1] and cursor == store.get(done[0]).completion
    assert completions.since(cursor, limit=10)[0] == done[1:] and not completions.missed(cursor)

    _, short = stores(client, retention_s=0.05)
    forgotten = []
    # One after the other passes its retention, so they may go in several calls.
    wait_until(
        lambda: forgotten.append(short.trim()) or sum(forgotten) == 3,
        30,
        "the completions to be past retention",
    )
    assert completions.since(cursor, limit=10)[0] == []
    assert completions.missed(cursor) and not completions.missed("0")
    last = ended(store, ids=10)
    assert completions.since(cursor, limit=10)[0] == [last]
    assert not completions.missed(store.get(last).completion)


@pytest.mark.parametrize(
    ("archived", "freed"), [("100-5", 0), ("100-6", 1), ("100-7", 1), ("99-9", 0), ("101-0", 1)]
)
def test_of_those_that_ended_in_one_millisecond_the_archive_has_read_some(client, archived, freed):
    store, results = stores(client, keep_acked_s=0)
    done = ended(store, ids=10)
    client.hset(keys.record(done), "completion", "100-6")
    client.set(keys.ARCHIVE_CURSOR, archived)
    results.acknowledge([done])
    assert len(results.sweep()) == freed


def test_a_live_one_in_the_account_keeps_its_trajectory(client):
    """Whatever put it there."""
    store, _ = stores(client)
    live = submitted(store)
    run_to_evaluating(store, live, trajectory(100))
    client.zadd(keys.RESULTS_ENDED, {live: 1})
    client.hset(keys.RESULTS_SIZES, live, 10)
    client.incrby(keys.RESULTS_BYTES, 10)
    _, results = stores(client, results_max_bytes=1)
    assert results.sweep() == [] and results.stored_bytes() == 0
    assert store.claim(live, 1, Stage.EVAL, "w").trajectory() == trajectory(100)


@pytest.mark.parametrize("who", [{"tenant": "a"}, {"tag": "mine"}])
def test_a_page_of_one_tenant_or_tag_has_no_more_than_asked_for_and_loses_nothing(client, who):
    for number, mine in enumerate((0, 0, 0, 1, 1, 0, 1, 1, 1, 0, 0, 0)):
        fields = {
            "id": f"r{number}",
            "group": "g",
            "tenant": "ab"[not mine],
            "tags": "x,mine" if mine else "x",
        }
        client.xadd(keys.RESULTS, fields)
    completions, pages, cursor = ResultStream(client), [], "0"
    for _ in range(4):
        ids, cursor = completions.since(cursor, limit=2, **who)
        pages.append(ids)
    assert pages == [["r3", "r4"], ["r6", "r7"], ["r8"], []]
    assert cursor == completions.tail(), "entries of others are behind it"
