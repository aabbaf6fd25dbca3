"""The Lua that owns every change of state, against a model of it in Python, with everything out of order.

Nobody behaves: messages come twice, late and in any order; workers finish what they lost long ago; leases run
out in the middle. Time passes by moving the times that are stored in Redis back, so nothing waits.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from rollout.schema import Backend, HandlerInfo, RolloutRequest, Stage, State
from services.dispatch import _expand
from services.settings import Settings
from services.state import keys as names
from services.state.fleet import FleetStore
from services.state.redis import connect
from services.state.rollouts.store import MAX_REQUEUE_S, Finish, RolloutStore
from services.state.tenants import Tenant, TenantStore
from services.state.turns.store import TurnStore
from tests.helpers.fair_model import FairOrder
from tests.helpers.heap import Heap
from tests.helpers.lifecycle_model import Lifecycle
from tests.helpers.long_forms import CHAOS

EXAMPLES = CHAOS("orders of events", short=60, long=1000)
EVENTS = CHAOS("events of an order", short=30, long=60)
REPLAYS = 10_000
LEASE_S, REQUEUE_S, DEADLINE_S, STOP_PATIENCE_S = 1000.0, 300.0, 3150.0, 60.0
PRIORITY_STEP_S = 500.0
STEPS_S = (370.0, 1110.0)
"""How far time jumps. No sum of them comes within 100 s of a time at which something happens, or of what the
priorities 0 to 2 are worth: what a slow machine spends between two steps changes nothing."""
TENANTS = ("a", "b", "c")
BOUNDS = st.one_of(st.none(), st.integers(1, 4))

ONWARDS = {Stage.INIT: "ready", Stage.RUN: "evaluating", Stage.EVAL: "completed"}
ACTS = (
    "heartbeat",
    "note",
    "place",
    "onwards",
    "onwards",
    "again",
    "handback",
    "turn",
    "passed on",
    "cancel",
    "failed",
    "timed_out",
)
"""What a worker may do with a claim, whether it still holds it or not."""

LATER = """
local ms, due = tonumber(ARGV[1]), KEYS[1]
local function earlier(value) return string.format('%.17g', value - ms) end
for i = 2, #KEYS do
  for _, name in ipairs({'deadline', 'lease', 'since', 'claimed', 'cancel', 'rank'}) do
    local value = redis.call('HGET', KEYS[i], name)
    if value then redis.call('HSET', KEYS[i], name, earlier(value)) end
  end
end
local last = redis.call('GET', 'fair:order')
if last then redis.call('SET', 'fair:order', earlier(last)) end
for i = 2, #ARGV do
  for _, id in ipairs(redis.call('ZRANGE', ARGV[i], 0, -1)) do redis.call('ZINCRBY', ARGV[i], -ms, id) end
end
for _, id in ipairs(redis.call('ZRANGE', due, 0, -1)) do redis.call('ZINCRBY', due, -ms, id) end
"""


def store_of(client, server):
    settings_ = Settings(
        redis_url=server.url,
        lease_s=LEASE_S,
        requeue_s=REQUEUE_S,
        stop_patience_s=STOP_PATIENCE_S,
        priority_step_s=PRIORITY_STEP_S,
    )
    return RolloutStore(client, settings_)


def machine_of(server):
    """The state machine on a server; a class of its own, because hypothesis makes the instances."""
    client = connect(server.url)
    store, backends, turns = store_of(client, server), Heap(client), TurnStore(client)
    later = client.register_script(LATER)

    class Machine(RuleBasedStateMachine):
        ids = Bundle("ids")
        messages = Bundle("messages")
        claims = Bundle("claims")

        @initialize(
            target=ids,
            attempts=st.tuples(st.integers(1, 3), st.integers(2, 3)),
            weights=st.tuples(*[st.sampled_from([0.3, 1, 2, 5])] * len(TENANTS)),
        )
        def start(self, attempts, weights):
            client.flushall()
            FleetStore(client).put_handlers([HandlerInfo(name="steady", repeatable=list(Stage))])
            weighed = dict(zip(TENANTS, weights, strict=True))
            for name, weight in weighed.items():
                TenantStore(client).set(Tenant(name=name, weight=weight))
            self.model = Lifecycle(
                lease=LEASE_S,
                requeue=REQUEUE_S,
                longest=MAX_REQUEUE_S,
                patience=STOP_PATIENCE_S,
                priority_step=PRIORITY_STEP_S,
                order=FairOrder(weighed),
            )
            self.submitted = []
            self.tokens = itertools.count()
            self.latest = {}
            backends.put(
                Backend(
                    id="b",
                    url="http://127.0.0.1:1",
                    model="m",
                    tokenizer="t",
                    max_model_len=100,
                    max_rollouts=1000,
                )
            )
            return multiple(*(self.submit_one(most, "a", 0) for most in attempts))

        # -- messages ---------------------------------------------------------------------------

        @rule(
            target=ids,
            max_attempts=st.integers(1, 3),
            tenant=st.sampled_from(TENANTS),
            priority=st.integers(0, 2),
            steady=st.booleans(),
        )
        def submit(self, max_attempts, tenant, priority, steady):
            return self.submit_one(max_attempts, tenant, priority, steady)

        def submit_one(self, max_attempts, tenant, priority, steady=True):
            limits = {"deadline_s": DEADLINE_S, "max_attempts": max_attempts}
            name = f"r{len(self.submitted)}"
            handler = "steady" if steady else "noop"
            request = RolloutRequest(handler=handler, id=name, limits=limits, tags=["t"], priority=priority)
            new = _expand(request)
            expected = self.model.submit(name, DEADLINE_S, max_attempts, tenant, priority, steady)
            assert store.submit(new, Tenant(name=tenant)) == [expected]
            self.submitted.append((new, tenant))
            return name

        @rule(rollout_id=ids)
        def submit_again(self, rollout_id):
            """A client that got no answer tries once more."""
            new, tenant = self.submitted[int(rollout_id[1:])]
            expected = self.model.submit(rollout_id, DEADLINE_S, 1, tenant, 0)
            assert store.submit(new, Tenant(name=tenant)) == [expected]

        @rule(target=messages, rollout_id=ids, attempt=st.integers(1, 3), stage=st.sampled_from(Stage))
        def a_message_from_anywhere(self, rollout_id, attempt, stage):
            return (rollout_id, attempt, stage)

        # -- workers ----------------------------------------------------------------------------

        @rule(target=claims, message=messages)
        def claim(self, message):
            return self.claim_one(*message, times=1)

        @rule(target=claims, rollout_id=ids, times=st.integers(1, 2))
        def claim_what_waits(self, rollout_id, times):
            life = self.model.lives[rollout_id]
            return self.claim_one(rollout_id, life.attempt, life.awaited or Stage.EVAL, times)

        def claim_one(self, rollout_id, attempt, stage, times):
            expected = self.model.claim(rollout_id, attempt, stage)
            token = f"t{next(self.tokens)}"
            for _ in range(times):
                # A connection's retry of the same claim is the same claim.
                claim = store.claim(rollout_id, attempt, stage, f"w-{token}", token=token)
                if expected != "ok":
                    assert claim == expected
                    return multiple()
                assert claim.fence == self.model.lives[rollout_id].fence
            self.latest[rollout_id] = claim
            return claim

        @rule(
            target=claims,
            node=st.sampled_from(["n1", "n2"]),
            bounds=st.tuples(BOUNDS, BOUNDS),
            times=st.integers(1, 2),
        )
        def a_bell_rings(self, node, bounds, times):
            """Whose turn it is gets INIT."""
            return self.ring_one(node, bounds, times)

        @rule(count=st.integers(2, 4), bells=st.integers(1, 8), order=st.permutations(TENANTS))
        def tenants_flood_one_after_the_other(self, count, bells, order):
            for tenant in order:
                for _ in range(count):
                    self.submit_one(2, tenant, 0)
                self.ring_one("n1")
            for _ in range(bells):
                self.ring_one("n2")

        @rule(target=claims, again=st.booleans())
        def whoever_is_next_fails_and_waits_out_its_delay(self, again):
            claim = self.ring_one("n1")
            if getattr(claim, "fence", None) is not None:
                self.act(claim, "again")
                self.pass_time(STEPS_S[0])
                self.reap_all()
                if again:
                    return self.ring_one("n2")
            return claim

        def ring_one(self, node, bounds=(None, None), times=1):
            expected = self.model.claim_next(node, *bounds)
            token = f"t{next(self.tokens)}"
            for _ in range(times):
                claim = store.claim_next(
                    f"w-{token}",  # as if each were another worker: see test_poison.py for one's suspects
                    node=node,
                    most_on_node=bounds[0],
                    most_without_sandbox=bounds[1],
                    token=token,
                )
                if expected in ("full", "nobody"):
                    assert claim == expected
                    return multiple()
                assert (claim.rollout_id, claim.attempt) == (expected, self.model.lives[expected].attempt)
                assert claim.fence == self.model.lives[expected].fence
            self.latest[expected] = claim
            return claim

        @rule(claim=claims, act=st.sampled_from(ACTS))
        def somebody_acts_on_any_claim(self, claim, act):
            self.act(claim, act)

        @rule(
            target=claims,
            rollout_id=ids,
            onwards=st.integers(0, 2),
            acts=st.lists(st.sampled_from(ACTS), min_size=1, max_size=4),
        )
        def a_worker_takes_it_and_acts(self, rollout_id, onwards, acts):
            for done in range(onwards + 1):
                life = self.model.lives[rollout_id]
                claim = self.claim_one(rollout_id, life.attempt, life.awaited or Stage.EVAL, 1)
                if done < onwards and rollout_id in self.latest:
                    self.act(self.latest[rollout_id], "onwards")
            if rollout_id in self.latest:
                for act in acts:
                    self.act(self.latest[rollout_id], act)
            return claim

        def act(self, claim, act):
            model, life = self.model, self.model.lives[claim.rollout_id]
            mine = model.owns(claim.rollout_id, claim.fence)
            if act == "heartbeat":
                expected = model.heartbeat(claim.rollout_id, claim.fence)
                assert store.heartbeat([(claim.rollout_id, claim.fence)]) == [expected]
            elif act == "note":
                assert store.note(claim.rollout_id, claim.fence, {"node": f"n{claim.fence}"}) is mine
                life.node = f"n{claim.fence}" if mine else life.node
            elif act == "place":
                placed = backends.acquire(claim.rollout_id, fence=claim.fence)
                assert placed.word == ("ok" if mine else "lost")
                life.pinned |= mine
            elif act == "turn" and claim.stage is Stage.RUN:
                log = names.turns(claim.rollout_id, claim.attempt)
                append = turns.append(claim.rollout_id, claim.attempt, claim.fence, client.llen(log), [b"x"])
                assert append[0].send(append[1])["word"] == ("ok" if mine else "lost")
                life.turns += mine
            elif act == "turn":
                pass
            elif act == "cancel":
                assert store.cancel(claim.rollout_id)[0] == model.cancel(claim.rollout_id)
            else:
                to = ONWARDS[claim.stage] if act == "onwards" else act
                if to == "passed on" and claim.stage is not Stage.RUN:
                    to = "handback"
                expected = model.finish(claim.rollout_id, claim.fence, claim.stage, to)
                fields = {"reward": "1.0"} if to == "completed" else {}
                for _ in range(2):
                    # The same finish again, from a client that got no answer.
                    assert store.finish(claim, Finish(to, fields)) == expected

        @rule(target=claims, rollout_id=ids)
        def another_worker_takes_over(self, rollout_id):
            """The holder falls silent; the reaper and the next worker come; then the old one wakes up."""
            old = self.latest.get(rollout_id)
            self.pass_time(STEPS_S[1])
            self.reap_all()
            life = self.model.lives[rollout_id]
            new = self.claim_one(rollout_id, life.attempt, life.awaited or Stage.EVAL, 1)
            if old is not None:
                for act in ("heartbeat", "place", "onwards"):
                    self.act(old, act)
            return new

        @rule(target=claims, rollout_id=ids)
        def a_worker_says_that_it_lives_and_holds_on_past_its_first_lease(self, rollout_id):
            life = self.model.lives[rollout_id]
            claim = self.claim_one(rollout_id, life.attempt, life.awaited or Stage.EVAL, 1)
            if rollout_id in self.latest:
                for step in (2 * STEPS_S[0], STEPS_S[0]):
                    self.pass_time(step)
                    self.act(self.latest[rollout_id], "heartbeat")
                    self.reap_all()
            return claim

        @rule(rollout_id=ids, patiently=st.booleans())
        def a_cancel_is_ignored(self, rollout_id, patiently):
            if rollout_id in self.latest:
                self.act(self.latest[rollout_id], "cancel")
                for _ in range(2):
                    self.act(self.latest[rollout_id], "heartbeat")
                    self.pass_time(STEPS_S[0])
                    if not patiently:
                        self.reap_all()

        # -- everybody else ---------------------------------------------------------------------

        @rule(rollout_id=ids)
        def cancel(self, rollout_id):
            assert store.cancel(rollout_id)[0] == self.model.cancel(rollout_id)

        @rule(step=st.sampled_from(STEPS_S))
        def time_passes(self, step):
            self.pass_time(step)

        def pass_time(self, step):
            live = [f"rollout:{{{i}}}" for i, life in self.model.lives.items() if not life.state.terminal]
            lines = [names.fair_waiting(tenant) for tenant in TENANTS]
            later(keys=["rollouts:due", *live], args=[int(step * 1000), *lines])
            self.model.now += step

        @rule()
        def reap(self):
            self.reap_all()

        def reap_all(self):
            reaped = store.overdue(limit=10_000)  # the model sweeps all that is due at once
            actions = {(item.action, item.rollout_id, item.attempt, item.stage) for item in reaped}
            # The order of completions within one sweep is Redis' own: by due time.
            ended = [entry["id"] for _, entry in client.xrange("results")]
            expected = self.model.overdue()
            offset = len(self.model.completions) - sum(action == "ended" for action, *_ in expected)
            assert sorted(ended[offset:]) == sorted(self.model.completions[offset:])
            self.model.completions[offset:] = ended[offset:]
            assert actions == expected

        # -- what always holds ------------------------------------------------------------------

        @invariant()
        def the_records_are_the_models(self):
            if not hasattr(self, "model"):
                return
            model = self.model
            records = {item.id: item for item in store.get_many(model.lives, trajectory=False)}
            for rollout_id, life in model.lives.items():
                item = records[rollout_id]
                assert (item.state, item.attempt) == (life.state, life.attempt)
                assert len(item.timeline) == life.changes
                assert (item.reward is not None) == (life.state is State.COMPLETED)

        @invariant()
        def every_count_is_exact(self):
            if not hasattr(self, "model"):
                return
            model = self.model
            assert store.counts() == model.counts()
            with client.pipeline(transaction=False) as pipe:
                for state in State:
                    pipe.zrange(f"rollouts:state:{state}", 0, -1)
                by_state = dict(zip(State, pipe.execute(), strict=True))
            for state, members in by_state.items():
                assert set(members) == {i for i, life in model.lives.items() if life.state is state}
            assert [entry["id"] for _, entry in client.xrange("results")] == model.completions
            assert max(Counter(model.completions).values(), default=1) == 1
            assert set(client.zrange("rollouts:due", 0, -1)) == {
                i for i, life in model.lives.items() if not life.state.terminal
            }
            pins = {i for i, life in model.lives.items() if life.pinned}
            assert set(client.hkeys("backends:pins")) == pins
            assert backends.get("b").live_rollouts == len(pins)
            assert store.totals().get("retries", 0) == model.retries

        @invariant()
        def the_order_is_the_models(self):
            if not hasattr(self, "model"):
                return
            model = self.model
            for tenant in TENANTS:
                assert client.zrange(names.fair_waiting(tenant), 0, -1) == model.order.line(tenant)
            assert set(client.zrange(names.FAIR_TENANTS, 0, -1)) == {
                tenant for tenant in TENANTS if model.order.line(tenant)
            }
            claims = {name: int(count) for name, count in client.hgetall(names.FAIR_CLAIMS).items()}
            assert claims == model.order.claims
            for node in ("n1", "n2"):
                assert store.ahead(node) == (model.ahead(node), model.ahead(names.NO_SANDBOX))

        def teardown(self):
            """However it stands: without any worker, everything ends, once, and leaves nothing."""
            if not hasattr(self, "model"):
                return
            for _ in range(4):
                self.pass_time(STEPS_S[1])
                self.reap_all()
            self.the_records_are_the_models()
            self.every_count_is_exact()
            assert sorted(self.model.completions) == sorted(self.model.lives)
            assert client.keys("fair:waiting:*") == client.keys("ahead:*") == []
            assert client.hlen("backends:pins") == 0 and client.zscore("backends:load", "b") == 0

    return Machine


def test_every_order_of_events_comes_to_what_the_model_says(server):
    run_state_machine_as_test(
        machine_of(server),
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=EVENTS,
            deadline=None,
            derandomize=not CHAOS,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_ten_thousand_messages_twice_and_out_of_order_end_nothing_twice(server):
    """Every message that any attempt could send, drawn at random again and again; what is won is finished."""
    client = connect(server.url)
    client.flushall()
    store = store_of(client, server)
    rng = random.Random(5)
    ids = [f"m{k}" for k in range(150)]
    store.submit(
        [
            new
            for i in ids
            for new in _expand(RolloutRequest(handler="noop", id=i, limits={"max_attempts": 2}))
        ]
    )
    messages = [(i, attempt, stage) for i in ids for attempt in (1, 2) for stage in Stage]
    words, finished = Counter(), []
    for _ in range(REPLAYS):
        claim = store.claim(*rng.choice(messages), "w")
        if isinstance(claim, str):
            words[claim] += 1
            continue
        words["won"] += 1
        again = claim.attempt == 1 and rng.random() < 0.3
        outcome = Finish("again" if again else ONWARDS[claim.stage], {} if again else {"reward": "1.0"})
        finished.append((claim, outcome))
        answer = store.finish(claim, outcome)
        assert answer == ("queued" if again else ONWARDS[claim.stage])
        late, outcome = rng.choice(finished)
        if late.fence != claim.fence or late.rollout_id != claim.rollout_id:
            before = store.state(late.rollout_id)
            store.finish(late, outcome)
            assert store.state(late.rollout_id) is before, "an old finish changed a state"
    assert store.counts()["completed"] == len(ids), "10,000 draws reach every message many times over"
    ended = Counter(entry["id"] for _, entry in client.xrange("results"))
    assert ended == Counter(ids), "each id once"
    assert words["ended"] and words["stale"], words
    claims = [(item.id, event.fence) for item in store.get_many(ids) for event in item.timeline]
    assert max(fence for _, fence in claims) <= 6, "at most three stages in each of two attempts"
    assert client.zcard("rollouts:due") == 0
