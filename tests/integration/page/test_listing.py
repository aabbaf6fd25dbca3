"""Lists of rollouts by what became of them: every filter, many records, a tenant's own."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest
from click.testing import CliRunner

from rollout.cli import rollouts as commands
from rollout.schema import RolloutPage
from services.state import keys
from services.state.rollouts import listing
from tests.helpers.tenants import World

MANY = 4000
RARE = 1000
"""Every so many rollouts one is unlike the others."""


@pytest.fixture(scope="module")
def made(server):
    """Some thousands of rollouts of a tenant and some of another one, of which a few have ended somehow."""
    world = World(server.url)
    for tenant in "ab":
        world.key(tenant)
    world.gate.guard.forget()
    ids = []
    for _ in range(MANY // 1000):
        ids += [item["id"] for item in world.submit("a", n=1000).json["rollouts"]]
    others = [item["id"] for item in world.submit("b", n=20).json["rollouts"]]
    with world.redis.pipeline(transaction=False) as pipe:
        for at, rollout_id in enumerate(ids):
            versions = ["step-1", "step-10"] if at % 2 else ["step-10"]
            fields = {"policy_versions": json.dumps(versions), "reward": at / MANY}
            if at % RARE == 7:
                fields = {"blame": "sandbox", "drop": "1", "reward": "", "policy_versions": "[]"}
            pipe.hset(keys.record(rollout_id), mapping=fields)
        for rollout_id in others:
            pipe.hset(keys.record(rollout_id), mapping={"blame": "sandbox", "drop": "1"})
        pipe.execute()
    return world, ids, others


def walk(world, who="a", limit=500, **filters):
    """Ids that fit, and the number of pages; each page's cursor is beyond that of the one before."""
    found, cursor, pages = [], 0, 0
    while True:
        query = {"limit": limit, "cursor": cursor, **filters}
        answer = world.get("/v1/rollouts", who, query_string=query)
        assert answer.status_code == 200, answer.text
        pages += 1
        found += [item["id"] for item in answer.json["rollouts"]]
        assert len(answer.json["rollouts"]) <= limit
        if answer.json["cursor"] is None:
            return found, pages
        assert int(answer.json["cursor"]) > cursor
        cursor = int(answer.json["cursor"])


@pytest.mark.parametrize(
    ("filters", "fits"),
    [
        ({}, lambda at, rare: True),
        ({"policy_version": "step-1"}, lambda at, rare: not rare and at % 2 == 1),
        ({"policy_version": "step-10", "reward_min": 0.9}, lambda at, rare: not rare and at >= 0.9 * MANY),
        ({"blame": "sandbox"}, lambda at, rare: rare),
        ({"drop": "true", "state": "queued"}, lambda at, rare: rare),
        ({"drop": "false", "reward_max": 0.01}, lambda at, rare: not rare and at <= 0.01 * MANY),
        ({"reward_min": 0.5, "reward_max": 0.5}, lambda at, rare: at == MANY // 2),
        ({"reward_min": 2}, lambda at, rare: False),
        ({"handler": "boxed"}, lambda at, rare: False),
        ({"blame": "sandbox", "handler": "noop"}, lambda at, rare: rare),
    ],
)
def test_a_list_holds_what_fits_all_filters_and_nothing_else(made, filters, fits):
    world, ids, _ = made
    found, _ = walk(world, **filters)
    assert len(found) == len(set(found))
    assert set(found) == {item for at, item in enumerate(ids) if fits(at, at % RARE == 7)}


def test_a_tenant_finds_its_own_and_an_operator_everybodys(made):
    world, _, others = made
    assert set(walk(world, "b", drop="true")[0]) == set(others)
    assert not set(walk(world, "a", state="queued", drop="true")[0]) & set(others)
    assert world.get("/v1/rollouts?tenant=b&drop=true", "a").status_code == 403


def test_a_call_looks_at_so_many_and_its_cursor_goes_on_also_from_an_empty_page(made, monkeypatch):
    world, *_ = made
    monkeypatch.setattr(listing, "MOST_LOOKED", 300)
    found, pages = walk(world, limit=100, blame="sandbox")
    assert len(found) == MANY // RARE and pages > MANY // 300
    monkeypatch.setattr(listing, "MOST_LOOKED", 20_000)
    monkeypatch.setattr(listing, "MOST_S", 0.0)
    assert sorted(walk(world, limit=100, blame="sandbox")[0]) == sorted(found), "slow as it is, it goes on"


def test_small_pages_pass_over_nothing(made):
    world, *_ = made
    found, _ = walk(world, limit=3, blame="sandbox")
    assert len(found) == len(set(found)) == MANY // RARE


def test_records_that_are_gone_or_damaged_are_passed_over(made):
    world, ids, _ = made
    gone, damaged = ids[11], ids[12]
    world.redis.rename(keys.record(gone), "aside")
    world.redis.hset(keys.record(damaged), mapping={"policy_versions": '["step-1', "reward": "much"})
    try:
        assert not {gone, damaged} & set(walk(world, reward_min=0)[0])
        assert damaged not in walk(world, policy_version="step-1")[0]
    finally:
        world.redis.rename("aside", keys.record(gone))
        world.redis.hset(
            keys.record(damaged), mapping={"policy_versions": '["step-10"]', "reward": 12 / MANY}
        )


@pytest.mark.parametrize("query", ["blame=nobody", "drop=perhaps", "reward_min=nan", "reward_max=x"])
def test_a_filter_that_means_nothing_is_refused(made, query):
    answer = made[0].get(f"/v1/rollouts?{query}", "a")
    assert answer.status_code == 400 and answer.json["errors"][0]["field"] == query.split("=")[0]


def test_the_command_hands_its_filters_to_the_client(monkeypatch):
    asked = {}

    class Told:
        def list(self, **filters):
            asked.update({name: value for name, value in filters.items() if value is not None})
            return RolloutPage(rollouts=[])

    monkeypatch.setattr(commands, "connect", lambda url: nullcontext(Told()))
    words = "--blame sandbox --not-dropped --policy-version v2 --reward-min 0.5 --reward-max 1 --json"
    result = CliRunner().invoke(commands.list_, words.split())
    assert result.exit_code == 0, result.output
    wanted = {"blame": "sandbox", "drop": False, "policy_version": "v2", "reward_min": 0.5, "reward_max": 1.0}
    assert asked == {"limit": 51, **wanted}
