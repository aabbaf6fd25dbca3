"""Capture's processes as objects, on a real Redis: several share sessions; Redis forgets what it did last."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import ClientError, ClientSession, web

from rollout.schema import Backend
from rollout.trajectory import Message
from services.capture import app as routes
from services.capture import serving
from services.capture.call import ModelCall, Refusal
from services.capture.serving import Caller, Service
from services.capture.tree import Tree
from services.engines.base import Completion
from services.settings import Settings
from services.state import keys
from services.state.backends.store import BackendStore, PlacementPolicy
from services.state.capture.session import MODEL, key_of
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


# -- bounds ----------------------------------------------------------------------------------------


def test_a_session_that_has_filled_its_share_of_redis_is_answered_without_the_model(processes, says):
    service = processes.start()
    assert asyncio.run(processes.call(service, "a")) == "answer 4"
    stored = sum(map(len, processes.captured.store.nodes(processes.captured.id, 1)))
    key = keys.capture(processes.captured.id, 1)
    assert 0 <= stored - int(processes.captured.client.hget(key, "bytes")) < 16
    processes.captured.client.hset(key, "bytes", 64 << 20)
    assert asyncio.run(processes.call(processes.start(), "b")) == serving.STOPPED
    assert processes.captured.summary.stopped == "turn_limit"


def test_a_body_that_no_context_holds_is_not_even_rendered(processes, says, monkeypatch):
    rendered = []
    monkeypatch.setattr(Bytes, "render", lambda self, *args: rendered.append(args) or [1])

    async def scenario() -> Refusal:
        call = ModelCall([Message(role="user", content="x")], size=32 * 4096 + 1)
        for asking in (
            processes.start().count(processes.caller, call),
            (await processes.start().turn(processes.caller, "chat", call, b"b", None, False)).result,
        ):
            with pytest.raises(Refusal) as caught:
                await asking
        return caught.value

    refusal = asyncio.run(scenario())
    assert (refusal.kind, refusal.most_tokens, rendered) == ("context", 4096, [])


def test_trees_of_sessions_that_are_not_called_are_dropped(processes, says, monkeypatch):
    monkeypatch.setattr(serving, "IDLE_S", 0.2)

    async def scenario() -> list[int]:
        service = processes.start()
        living = asyncio.create_task(service.live())
        await processes.call(service, "a")
        kept = [len(service._known)]
        await asyncio.sleep(1.5)
        kept.append(len(service._known))
        await processes.call(service, "b")
        living.cancel()
        return [*kept, len(service._known)]

    assert asyncio.run(scenario()) == [1, 0, 1]
    assert len(processes.captured.nodes) == 2


def test_trees_are_kept_up_to_a_bound_in_bytes_and_a_larger_one_is_served_all_the_same(
    processes, says, monkeypatch
):
    monkeypatch.setattr(serving, "MOST_BYTES", serving.SESSION_BYTES + 10)

    async def scenario() -> list[int]:
        service, kept = processes.start(), []
        for word in ("a", "b", "c"):
            await processes.call(service, word)
            service._known[Caller("another", 1)] = service._known[processes.caller]
            kept.append(len(service._known))
        return kept

    assert asyncio.run(scenario()) == [1, 1, 1]
    assert len(processes.captured.nodes) == 3


SECRET = "secret"


class Served:
    """One process' routes."""

    def __init__(self, processes: Processes) -> None:
        self.processes, self.service = processes, processes.start()
        self.key = key_of(SECRET, MODEL, processes.captured.id, 1)

    async def __aenter__(self) -> Served:
        store, send = self.processes.captured.store, self.service._placements.send
        app = routes.create_app(self.service, SECRET, store, send, 32 << 20)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        self.http = ClientSession()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.http.close()
        await self._runner.cleanup()

    async def ask(self, text: str, data: Any = None, **headers: str) -> tuple[int, Any]:
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]})
        headers = {"Authorization": f"Bearer {self.key}", **headers}
        url = f"{self.url}/v1/chat/completions"
        async with self.http.post(url, data=data or body, headers=headers) as answer:
            return answer.status, await answer.json()


def test_tokens_of_a_prompt_are_counted_over_http(processes, says):
    async def scenario() -> tuple[int, Any]:
        async with Served(processes) as served:
            body = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "abc"}]}
            url, headers = f"{served.url}/v1/messages/count_tokens", {"x-api-key": served.key}
            async with served.http.post(url, json=body, headers=headers) as answer:
                return answer.status, await answer.json()

    assert asyncio.run(scenario()) == (200, {"input_tokens": len("u:abc;")})


def test_bodies_of_calls_under_way_are_bounded_and_room_comes_back(processes, says, monkeypatch):
    monkeypatch.setattr(routes, "MOST_HELD_OF_ONE", 1000)

    async def scenario() -> list[int]:
        go = asyncio.Event()

        async def late(router: Any, request: Any) -> str:
            await go.wait()
            return "x"

        says(late)
        async with Served(processes) as served:
            waiting = asyncio.create_task(served.ask("a" * 700))
            await asyncio.sleep(0.3)
            busy, _ = await served.ask("b" * 700)
            go.set()
            first, _ = await waiting
            after, _ = await served.ask("c" * 700)
            return [first, busy, after]

    assert asyncio.run(scenario()) == [200, 429, 200]


def test_a_body_that_does_not_come_is_given_up(processes, says, monkeypatch):
    monkeypatch.setattr(routes, "BODY_S", 0.3)

    async def slowly() -> Any:
        yield b"{"
        await asyncio.sleep(5)

    async def scenario() -> tuple[int, Any]:
        async with Served(processes) as served:
            return await served.ask("", data=slowly())

    status, answer = asyncio.run(scenario())
    assert status == 400 and "did not come" in answer["error"]["message"]


@pytest.mark.parametrize("name", ["é", "a b", "x" * 65, "c\"'{"])
def test_a_call_under_a_name_that_is_none_gets_one(processes, says, name):
    async def scenario() -> int:
        async with Served(processes) as served:
            return (await served.ask("a", **{routes.CALL_HEADER: name}))[0]

    assert asyncio.run(scenario()) == 200
    (node,) = processes.captured.nodes
    assert node.call_id != name and node.call_id.isascii()


def test_a_call_through_the_bridge_to_a_process_that_ends_breaks_and_one_of_others_is_told(processes, says):
    async def scenario() -> int:
        async with Served(processes) as served:
            await served.service.close(0.1)
            status, _ = await served.ask("a")
            with pytest.raises(ClientError):
                await served.ask("a", **{routes.CALL_HEADER: "c1"})
            return status

    assert asyncio.run(scenario()) == 503


@pytest.mark.parametrize("asked", [{"seed": 10**30}, {"max_tokens": 10**30}, {"seed": -(2**70)}])
def test_numbers_that_no_record_holds_cost_no_turn(processes, says, asked):
    async def scenario() -> int:
        async with Served(processes) as served:
            body = {"model": "m", "messages": [{"role": "user", "content": "a"}], **asked}
            return (await served.ask("", json.dumps(body)))[0]

    assert asyncio.run(scenario()) == 200
    (node,) = processes.captured.nodes
    assert set(node.asked) == set(asked)


def test_a_program_that_sends_much_at_once_leaves_threads_for_others(processes, says, monkeypatch):
    at_once, most = 0, 0

    def slowly(self: Any, *args: Any) -> list[int]:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        time.sleep(0.1)
        at_once -= 1
        return [1]

    monkeypatch.setattr(Bytes, "render", slowly)

    async def scenario() -> None:
        service = processes.start()
        call = ModelCall([Message(role="user", content="x" * 30_000)])
        await asyncio.gather(*(service.count(processes.caller, call) for _ in range(8)))

    asyncio.run(scenario())
    assert most == 2


def test_redis_that_is_killed_again_and_again_costs_calls_time_and_nothing_else(mortal, says):
    """Two processes, of which one or the other is asked; a kill takes up to a second of what was written."""
    servers, processes = mortal
    seen: dict[str, list[int]] = {}

    async def said(router: Any, request: Any) -> str:
        seen[request.call_id] = list(request.prompt)
        await asyncio.sleep(0.02)
        return f"answer {len(request.prompt)}"

    says(said)

    def outages() -> None:
        for _ in range(2):
            time.sleep(0.5)
            servers[-1].crash()
            time.sleep(1)
            servers.append(servers[-1].restarted())

    async def conversation(number: int, both: list[Service]) -> list[str]:
        names, texts = [], [f"hello {number}"]
        for turn in range(10):
            names.append(f"c{number}-{turn}")
            texts.append(await processes.call(both[(number + turn) % 2], *texts, name=names[-1]))
            texts.append(f"then {turn}")
        return names

    async def scenario() -> list[str]:
        both = [processes.start(), processes.start()]
        living = [asyncio.create_task(service.live()) for service in both]
        broken = asyncio.create_task(asyncio.to_thread(outages))
        told = await asyncio.gather(*(conversation(number, both) for number in range(6)))
        await broken
        for task in living:
            task.cancel()
        return [name for names in told for name in names]

    asyncio.run(scenario())
    stored = processes.captured.nodes
    assert len({node.call_id for node in stored}) == len(stored)
    assert processes.held() == [seen[node.call_id] for node in stored]
