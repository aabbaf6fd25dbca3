"""Capture's processes as objects, on a real Redis: several share sessions; Redis forgets what it did last."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rollout.schema import Backend
from rollout.trajectory import Message
from services.capture import serving
from services.capture.call import ModelCall, Refusal
from services.capture.serving import Caller, Service
from services.capture.tree import Tree
from services.engines.base import Completion
from services.settings import Settings
from services.state import keys
from services.state.backends.store import BackendStore, PlacementPolicy
from services.state.redis import connect
from services.state.rollouts.store import RolloutStore
from tests.helpers.stack import RedisServer
from tests.integration.conftest import emptied
from tests.integration.test_capture_state import Captured, kept, lose
from workers.agent.placement import Placements
from workers.agent.router import RolloutLost

client = emptied
BACKEND = Backend(
    id="b", url="http://127.0.0.1:9", model="m", tokenizer="t", engine="vllm", max_model_len=4096
).model_dump_json()


class Bytes:
    """A chat format whose ids are the bytes of what is said."""

    digest, stop_token_ids, vocab_size, end_ids = "bytes@0", [0], 256, None

    def render(self, messages: list[Message], tools: list[Any]) -> list[int]:
        return list("".join(f"{message.role[0]}:{message.text};" for message in messages).encode())

    def bridge(self, prompt: list[int], sampled: list[int], new: list[Message]) -> list[int]:
        return self.render(new, [])

    def parse(self, prompt: list[int], sampled: list[int]) -> Any:
        message = Message(role="assistant", content=bytes(sampled).decode(errors="replace").strip("\0"))
        return SimpleNamespace(message=message, malformed=False)


@pytest.fixture
def says(monkeypatch) -> Callable[[Callable[..., Awaitable[str]]], None]:
    """Sets what the model says to a request."""
    script: list[Callable[..., Awaitable[str]]] = []

    class Router:
        def __init__(self, rollout_id: str, *args: Any, fence: int, **more: Any) -> None:
            self.backend, self.accepts, self.fence = None, None, fence

        async def generate(self, request: Any, timeout_s: float, watch: Any = None) -> Completion:
            ids = [*(await script[-1](self, request)).encode(), 0]
            return Completion(request.call_id, ids, [-0.5] * len(ids), "stop", [(None, 0, len(ids))])

    monkeypatch.setattr(serving, "BackendRouter", Router)
    monkeypatch.setattr(serving, "load_codec", lambda tokenizer: Bytes())

    async def echo(router: Any, request: Any) -> str:
        return f"answer {len(request.prompt)}"

    script.append(echo)
    return script.append


class Processes:
    """Capture processes, and calls of one attempt to them."""

    def __init__(self, captured: Captured, url: str) -> None:
        self.captured, self.url = captured, url
        self.caller = Caller(captured.id, 1)

    def start(self) -> Service:
        placements = Placements(BackendStore(connect(self.url), PlacementPolicy()))
        return Service(self.captured.store, placements, None)

    async def call(self, service: Service, *texts: str, name: str | None = None) -> str:
        """What the model says to a conversation, whose texts are a user's and the model's by turns."""
        roles = ("user", "assistant")
        messages = [Message(role=roles[at % 2], content=text) for at, text in enumerate(texts)]
        body = json.dumps(texts).encode()[-16:]
        turn = await service.turn(self.caller, "chat", ModelCall(messages), body, name, False)
        return (await turn.result).message.text

    def held(self) -> list[list[int]]:
        """All prompts as the stored tree has them."""
        tree = Tree(self.captured.nodes)
        return [tree.prompt(place) for place in range(len(tree.nodes))]


@pytest.fixture
def processes(client, server) -> Processes:
    rollouts = RolloutStore(client, Settings(redis_url=server.url, lease_s=30))
    captured = Captured(client, rollouts, opened=False)
    captured.open(backend=BACKEND)
    return Processes(captured, server.url)


@pytest.fixture
def mortal(tmp_path):
    servers = [RedisServer(tmp_path)]
    client = connect(servers[0].url)
    rollouts = RolloutStore(client, Settings(redis_url=servers[0].url, lease_s=300))
    captured = Captured(client, rollouts, opened=False)
    captured.open(backend=BACKEND)
    yield servers, Processes(captured, servers[0].url)
    servers[-1].stop()


def remember(seen: dict[str, list[int]]) -> Callable[..., Awaitable[str]]:
    async def said(router: Any, request: Any) -> str:
        seen[request.call_id] = list(request.prompt)
        return f"answer {len(seen)}"

    return said


def test_turns_that_redis_lost_and_others_replaced_are_written_again_below_their_own_parents(mortal, says):
    servers, processes = mortal
    seen: dict[str, list[int]] = {}
    says(remember(seen))

    async def scenario() -> None:
        one, other = processes.start(), processes.start()
        first = await processes.call(one, "a", name="a")
        since = kept(servers)
        second = await processes.call(one, "a", first, "b", name="b")
        lose(servers, since)
        await processes.call(other, "x", name="x")
        third = await processes.call(one, "a", first, "b", second, "c", name="c")
        await processes.call(one, "a", first, "b", second, "c", third, "d", name="d")
        await processes.call(other, "a", first, "b", second, "c", third, "e", name="e")

    asyncio.run(scenario())
    stored = processes.captured.nodes
    assert [node.call_id for node in stored] == ["a", "x", "b", "c", "d", "e"]
    assert [node.parent for node in stored] == [-1, -1, 0, 2, 3, 3]
    assert processes.held() == [seen[node.call_id] for node in stored]


def test_a_process_whose_last_turns_were_replaced_reads_what_is_there(mortal, says):
    servers, processes = mortal
    seen: dict[str, list[int]] = {}
    says(remember(seen))

    async def scenario() -> None:
        one, other = processes.start(), processes.start()
        first = await processes.call(one, "a", name="a")
        since = kept(servers)
        await processes.call(one, "lost", name="lost")
        lose(servers, since)
        instead = await processes.call(other, "a", first, "b", name="b")
        after = await processes.call(other, "a", first, "b", instead, "c", name="c")
        await processes.call(one, "a", first, "b", instead, "c", after, "d", name="d")
        # Told again by a process that had another turn in its place.
        assert await processes.call(one, "a", first, "b", name="b") == instead

    asyncio.run(scenario())
    stored = processes.captured.nodes
    assert [node.parent for node in stored] == [-1, 0, 1, 2]
    assert processes.held() == [seen[node.call_id] for node in stored]


def test_a_turn_that_another_process_has_answered_first_is_gone_on_from_as_it_was_told(processes, says):
    """Two texts that are the same when spaces around them are ignored, with other ids."""
    seen: dict[str, list[int]] = {}

    async def scenario() -> None:
        slow, fast = processes.start(), processes.start()
        go = asyncio.Event()

        async def late(router: Any, request: Any) -> str:
            seen[request.call_id] = list(request.prompt)
            if request.call_id == "a" and not go.is_set():
                await go.wait()
                return "same "
            return "same"

        says(late)
        waiting = asyncio.create_task(processes.call(slow, "a", name="a"))
        await asyncio.sleep(0.3)
        processes.captured.die(slow.process)

        async def at_once(router: Any, request: Any) -> str:
            return "same"

        says(at_once)
        assert await processes.call(fast, "a", name="a") == "same"
        says(late)
        go.set()
        assert await waiting == "same"
        await processes.call(slow, "a", "same", "b", name="b")

    asyncio.run(scenario())
    stored = processes.captured.nodes
    assert [node.parent for node in stored] == [-1, 0]
    assert processes.held()[1] == seen["b"]


def test_a_call_goes_on_under_the_fence_of_whoever_has_taken_the_rollout_over(processes, says):
    fences = []

    async def lost_once(router: Any, request: Any) -> str:
        fences.append(router.fence)
        if len(fences) == 1:
            raise RolloutLost("another worker holds it")
        return "x"

    says(lost_once)
    assert asyncio.run(processes.call(processes.start(), "a")) == "x"
    assert fences == [processes.captured.claim.fence] * 2


def test_who_listens_is_told_of_the_end_though_redis_refuses_to_hear_of_it(processes, says, monkeypatch):
    async def broken(router: Any, request: Any) -> str:
        raise RuntimeError("unheard of")

    says(broken)

    async def scenario() -> None:
        service = processes.start()
        send = service._placements.send

        async def refuses(call: Any) -> Any:
            if call[1][0] == "note":
                raise ValueError("no")
            return await send(call)

        monkeypatch.setattr(service._placements, "send", refuses)
        with pytest.raises(Refusal, match="RuntimeError"):
            await asyncio.wait_for(processes.call(service, "a"), 10)

    asyncio.run(scenario())


def test_a_process_that_ends_gives_its_calls_up_for_others_to_begin_at_once(processes, says):
    async def never(router: Any, request: Any) -> str:
        await asyncio.sleep(600)
        return ""

    async def scenario() -> None:
        one, other = processes.start(), processes.start()
        says(never)
        broken = asyncio.create_task(processes.call(one, "a", name="a"))
        await asyncio.sleep(0.3)
        await one.close(0.1)
        with pytest.raises(Refusal) as caught:
            await broken
        assert caught.value.kind == "unavailable"
        with pytest.raises(Refusal):
            await processes.call(one, "b", name="b")

        async def soon(router: Any, request: Any) -> str:
            return "x"

        says(soon)
        assert await asyncio.wait_for(processes.call(other, "a", name="a"), 3) == "x"

    asyncio.run(scenario())
    assert processes.captured.client.exists(keys.capture(processes.captured.id, 1))
    assert processes.captured.summary.refused == {"unavailable": 1}


def test_a_turn_whose_session_was_lost_is_written_when_it_is_open_again(mortal, says):
    _, processes = mortal
    captured = processes.captured

    async def scenario() -> None:
        service = processes.start()

        async def loses(router: Any, request: Any) -> str:
            captured.client.delete(keys.capture(captured.id, 1))
            return "x"

        says(loses)
        call = asyncio.create_task(processes.call(service, "a"))
        await asyncio.sleep(1)
        captured.open(backend=BACKEND)
        assert await asyncio.wait_for(call, 5) == "x"

    asyncio.run(scenario())
