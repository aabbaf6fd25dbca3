"""The one reader of what happens, by itself, on a real Redis."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import pytest

from rollout.arrays import pack_ids
from rollout.schema import Rollout, RolloutRequest, State
from rollout.trajectory import Message
from services.gateway.page.hub import MOST_PIECES, Hub, Viewer
from services.gateway.waiting import Waiter
from services.settings import Settings
from services.state import keys
from services.state.results.stream import ResultStream
from services.state.turns.entries import Appended, Begun, encode, to_json
from tests.helpers.stack import wait_until
from tests.integration.conftest import emptied

client = emptied
PATIENCE_S = 30


@pytest.fixture
def gate(client, server):
    """As much of a gateway as a hub takes; `its` is the one rollout that it has."""
    agent = {"harness": "command", "command": ["true"]}
    requests = {"driven": {"handler": "h", "agent": agent}, "plain": {"handler": "h"}}
    its = {
        name: Rollout(
            **{"id": name, "group_id": name, "index": 0, "handler": "h", "tenant": "t", "attempt": 1},
            state=State.RUNNING,
            request=RolloutRequest(**request),
            **{"created_at": 1.0, "updated_at": 1.0, "deadline_at": 2.0},
        )
        for name, request in requests.items()
    }
    many = lambda names, trajectory: [its[name] for name in names]  # noqa: E731
    gate = SimpleNamespace(
        settings=Settings(redis_url=server.url),
        redis=client,
        result_stream=ResultStream(client),
        rollouts=SimpleNamespace(get_many=many),
        its=its,
    )
    gate.live = Hub(gate)
    return gate


class Reader:
    """A viewer that reads when it is asked to."""

    def __init__(self, gate, **looks) -> None:
        self.gate, self.viewer = gate, Viewer(Waiter(), "t", **looks)
        gate.live.enter(self.viewer, lambda tenants: {})

    def take(self) -> list[tuple[str, dict]]:
        lines = self.viewer.take().decode().split("\n\n")
        pairs = [line.removeprefix("event: ").split("\ndata: ") for line in lines if line.startswith("event")]
        return [(name, json.loads(data)) for name, data in pairs]

    def until(self, name: str) -> dict:
        found: list[dict] = []

        def look() -> bool:
            found.extend(data for one, data in self.take() if one == name)
            return bool(found)

        wait_until(look, PATIENCE_S, name)
        return found[0]

    def close(self) -> None:
        self.gate.live.leave(self.viewer)


def counted(gate, name: str, entries: int) -> None:
    """Wait until the hub has seen that a log has so many entries: what comes from then on is news."""

    def look() -> bool:
        with gate.live._lock:
            return gate.live._watched[name].length == entries

    wait_until(look, PATIENCE_S, "the entries that there are")


def said(number: int) -> bytes:
    message = [Message(role="user", content=str(number))]
    return encode(Appended(pack_ids([number]), to_json(message)))


def begun() -> bytes:
    return encode(Begun(pack_ids([1]), to_json([Message(role="user", content="go")]), backend="{}"))


def test_what_a_program_calls_is_told_as_something_to_be_read_anew(gate, client):
    client.rpush(keys.capture_nodes("driven", 1), "one")
    reader = Reader(gate, rollout="driven")
    assert reader.until("rollout")["state"] == "running"
    counted(gate, "driven", 1)
    assert reader.take() == [], "what there was it reads by itself"
    client.rpush(keys.capture_nodes("driven", 1), "two")
    assert reader.until("turns") == {"attempt": 1, "refetch": True}
    reader.close()


def test_whoever_reads_slowly_is_told_to_begin_anew_and_holds_little(gate, client):
    log = keys.turns("plain", 1)
    client.rpush(log, begun())
    reader = Reader(gate, rollout="plain")
    reader.until("rollout")
    counted(gate, "plain", 1)
    client.rpush(log, said(2))
    told = reader.until("turns")
    assert [(piece["chain"], piece["place"]) for piece in told["pieces"]] == [(0, 1)]
    for number in range(MOST_PIECES + 1):
        for one in gate.live._of(gate.its["plain"]):
            one.add("turns", b"event: turns\ndata: {}\n\n", gate.live._watched["plain"].refetch)
        for end in (2 * number, 2 * number + 1):
            gate.live._hear(
                keys.live("plain"),
                json.dumps(
                    {
                        "operation": 1,
                        "kind": "bash",
                        "offset": end,
                        "end": end + 1,
                        "text": "x",
                        "running": True,
                    }
                ),
            )
    news = reader.take()
    assert len(news) <= 2 * MOST_PIECES + 2
    assert ("turns", {"attempt": 1, "refetch": True}) in news
    outputs = [data for name, data in news if name == "output"]
    whole = 2 * (MOST_PIECES + 1)
    assert outputs[0]["offset"] == 0 and outputs[-1]["end"] == whole
    assert "".join(data["text"] for data in outputs) == "x" * whole
    assert not any(data["skipped"] for data in outputs)
    reader.close()


def test_a_log_that_redis_has_lost_a_part_of_is_read_anew(gate, client):
    log = keys.turns("plain", 1)
    client.rpush(log, begun(), said(2), said(3))
    reader = Reader(gate, rollout="plain")
    reader.until("rollout")
    counted(gate, "plain", 3)
    client.delete(log)
    client.rpush(log, begun(), said(4))
    assert reader.until("turns") == {"attempt": 1, "refetch": True}
    client.rpush(log, said(5))
    assert [piece["place"] for piece in reader.until("turns")["pieces"]] == [2]
    reader.close()


def test_another_attempt_is_read_anew(gate, client):
    reader = Reader(gate, rollout="plain")
    reader.until("rollout")
    gate.its["plain"] = gate.its["plain"].model_copy(update={"attempt": 2})
    client.xadd(keys.EVENTS, {"id": "plain", "state": "running", "attempt": 2})
    assert reader.until("turns") == {"attempt": 2, "refetch": True}
    reader.close()


def test_with_the_last_viewer_all_ends_and_it_begins_again_with_the_next(gate, client):
    for _ in range(2):
        readers = [Reader(gate, ids=frozenset({"plain"})), Reader(gate, rollout="driven")]
        assert readers[0].until("states")["plain"]["state"] == "running"
        thread = gate.live._thread
        for reader in readers:
            reader.close()
            reader.close()
        thread.join(PATIENCE_S)
        assert not thread.is_alive() and gate.live._thread is None and gate.live.open == 0
        assert not gate.live._states and not gate.live._watched
    before = client.info("stats")["total_commands_processed"]
    time.sleep(1)
    assert client.info("stats")["total_commands_processed"] - before < 5, "nothing is read for nobody"
