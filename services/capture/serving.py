"""A model call of a program, from what it asks to its answer.

The turn is served by a task of its own: whoever listens may go away and come back, in this process or, when
it has ended, in another one. What a program may act on is said only when the turn is written.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import aiohttp
import msgspec
import structlog
from cachetools import TTLCache

from rollout.arrays import pack_ids, pack_logprobs
from rollout.schema import Backend, SamplingParams, new_id
from rollout.trajectory import Message
from services.capture import metrics
from services.capture.call import Answer, ModelCall, Refusal
from services.capture.matching import after
from services.capture.prompts import Prompts
from services.capture.tree import Attachment, Tree
from services.capture.turn import Shown, Turn, told
from services.engines.base import Completion, SampleRequest
from services.state.capture.nodes import ROOT, Node, decode, encode
from services.state.capture.session import Session
from services.state.capture.store import CaptureStore
from services.state.scripts import Call
from services.state.turns.entries import to_json
from workers.agent.codec import load_codec, takeover_obstacle
from workers.agent.formats import Codec, CodecError
from workers.agent.llm import BrokenCall
from workers.agent.placement import Placements
from workers.agent.router import BackendRouter, RolloutLost
from workers.errors import InfrastructureError, ModelError
from workers.patience import ask

log = structlog.get_logger("capture")

MOST_BYTES = 512 << 20
"""Of sessions' trees that a process keeps; of further ones the oldest is read again when it is called for."""
SESSION_BYTES = 4 << 10
"""Of one without turns, roughly."""
MOST_AT_ONCE = 256
"""Calls of one attempt that a process works on at a time."""
EARLY_S = 30.0
"""For RUN to open a session that is asked for before; then the program is told to come again."""
TAKEOVER_S = 300.0
"""For another worker to take the rollout over whose RUN worker was lost."""
LAST_WORDS_S = 2.0
"""For calls that a process breaks off when it ends, to be given up in Redis."""
LOOK_S = 0.2
"""Between two looks at what another process, or worker, is to do."""
MOST_BYTES_OF_AN_ID = 32
"""Of a body, for each id of the context: no text that means anything takes so many, and a larger body is not
even rendered, which takes seconds a megabyte."""
IDLE_S = 600.0
"""Of a session without a call, after which its tree is read again, too."""
LEAST_ROOM = 256
"""Ids that a turn must find free, of a context large enough; else the program is told that it is full."""
MOST_STOPPED = 20
"""Calls past a limit that are answered in peace; who goes on is told that the attempt has ended."""
STOPPED = "The budget of this task is used up. Stopping here."


class Caller(NamedTuple):
    """Whose call it is, by its key."""

    rollout_id: str
    attempt: int


@dataclass
class Known:
    """What a process keeps of a session."""

    caller: Caller
    session: Session
    sampling: SamplingParams
    first: Backend
    """The backend that RUN was placed on, to which others are held."""
    backend: Backend
    """The one that answered last."""
    codec: Codec | None = None
    """That of its tokenizer, once it is loaded."""
    tree: Tree = field(default_factory=Tree)
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)
    rendering: asyncio.Semaphore = field(default_factory=partial(asyncio.Semaphore, 2))
    """For its prompts: large ones take seconds of the threads that all sessions share."""
    running: int = 0


@dataclass(frozen=True)
class Begun:
    """A call that this process is to answer."""

    known: Known
    turn: Turn
    call: ModelCall
    dialect: str
    body: bytes
    answer: dict[str, Any]
    """What Redis said of it."""


class Service:
    """All calls of a process."""

    def __init__(self, store: CaptureStore, placements: Placements, http: aiohttp.ClientSession) -> None:
        self.process = new_id()
        self.ending = False
        """Whether the process takes no further calls."""
        self._store, self._placements, self._http = store, placements, http
        self._known: TTLCache[Caller, Known] = TTLCache(MOST_BYTES, IDLE_S, getsizeof=_bytes)
        self._prompts = Prompts()
        self._codecs: list[Codec] = []
        self._opening: dict[tuple[Caller, str], asyncio.Task[Turn]] = {}
        self._turns: dict[tuple[Caller, str], Turn] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    async def live(self) -> None:
        """Say again and again that this process lives."""
        while True:
            await self._placements.send(self._store.alive(self.process))
            self._known.expire()
            await asyncio.sleep(1.0)

    async def close(self, patience_s: float) -> None:
        """Give the calls under way some time; what is not written then is begun again elsewhere."""
        self.ending = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=patience_s)
        if left := set(self._tasks):
            for task in left:
                task.cancel()
            # They say in Redis that they end: who comes again need not wait until this process is missed.
            await asyncio.wait(left, timeout=LAST_WORDS_S)

    # -- one call ----------------------------------------------------------------------------

    async def turn(
        self, caller: Caller, dialect: str, call: ModelCall, body: bytes, call_id: str | None, retry: bool
    ) -> Turn:
        """The turn that answers a call: a new one, or the one that it repeats.

        Args:
            body: Digest of the request's body.
            call_id: The id that a bridge gives each call, and repeats with it.
            retry: The program says that it repeats a call.

        Raises:
            Refusal: It is not served.
        """
        if self.ending:
            raise Refusal("unavailable", "this process ends", retry_after_s=1)
        call_id = call_id or new_id()
        if turn := self._turns.get((caller, call_id)):
            return turn
        opening = self._opening.get((caller, call_id))
        if opening is None:
            # A task of its own: a program that goes away in between must not leave a call that nobody serves.
            opening = self._task(self._open(caller, dialect, call, body, call_id, retry))
            self._opening[caller, call_id] = opening
            opening.add_done_callback(lambda _: self._opening.pop((caller, call_id), None))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            if not opening.done():
                self._task(self._unheard(caller, opening))
            raise

    def told(self, caller: Caller, turn: Turn) -> None:
        """The program has got the whole answer."""
        self._task(self._send(self._store.told, caller, turn.call_id))

    def orphan(self, caller: Caller, turn: Turn) -> None:
        """The program went away before. The turn goes on, for it may come again."""
        metrics.GONE.inc()
        self._task(self._send(self._store.orphan, caller, turn.call_id))

    async def count(self, caller: Caller, call: ModelCall) -> int:
        """Ids of a call's prompt."""
        known = await self._looked_up(caller)
        _check_size(known, call)
        codec = await self._codec(known)
        async with known.rendering:
            return len((await self._prompts.of(known.tree, codec, call)).ids)

    async def _unheard(self, caller: Caller, opening: asyncio.Task[Turn]) -> None:
        """Whoever asked went away before the turn had begun."""
        with suppress(Refusal):
            self.orphan(caller, await opening)

    async def _looked_up(self, caller: Caller) -> Known:
        """A session as it is now."""
        answer = await self._look(caller)
        known = self._know(caller, answer)
        await self._read(known, answer["nodes"])
        return known

    async def _look(self, caller: Caller) -> dict[str, Any]:
        """What Redis says of a session that may be called."""
        answer = await self._send(self._store.look, caller)
        if answer["word"] != "ok":
            raise not_open(answer["word"])
        return answer

    async def _send(self, call: Callable[..., Call], caller: Caller, *args: Any, **more: Any) -> Any:
        return await self._placements.send(call(*caller, *args, **more))

    def _task(self, work: Awaitable[Any]) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    async def _open(
        self, caller: Caller, dialect: str, call: ModelCall, body: bytes, call_id: str, retry: bool
    ) -> Turn:
        ends, waited = time.monotonic() + EARLY_S, False
        begin = partial(self._store.begin, body=body.hex(), process=self.process, call_id=call_id)
        while True:
            answer = await self._send(begin, caller, retry=None if waited else retry)
            word = answer["word"]
            if word == "joined":
                if turn := self._turns.get((caller, answer["call"])):
                    metrics.JOINED.inc()
                    return turn
                if answer["process"] == self.process:
                    # Redis was not told that it was refused.
                    await self._send(self._store.fail, caller, answer["call"], "internal")
                waited = True
            elif word != "early" or time.monotonic() > ends:
                break
            await asyncio.sleep(LOOK_S)
        if word == "limit":
            return self._stopped(call_id, answer)
        if word == "again":
            metrics.JOINED.inc()
            return await self._replay(caller, answer["call"], answer["node"])
        if word != "ok":
            raise not_open(word)
        known = self._know(caller, answer)
        if known.running >= MOST_AT_ONCE:
            await self._send(self._store.fail, caller, answer["call"], "busy")
            raise Refusal("busy", f"{known.running} calls of this rollout are under way", retry_after_s=1)
        turn = self._turns[caller, answer["call"]] = Turn(answer["call"])
        self._task(self._serve(Begun(known, turn, call, dialect, body, answer)))
        return turn

    def _know(self, caller: Caller, answer: dict[str, Any]) -> Known:
        """What is kept of the session that Redis tells of."""
        known = self._known.get(caller)
        if known is None:
            session = msgspec.json.decode(answer["session"], type=Session)
            backend = Backend.model_validate_json(session.backend)
            sampling = SamplingParams.model_validate_json(session.sampling)
            known = Known(caller, session, sampling, backend, backend)
        # Anew with each call: its tree has grown.
        self._known[caller] = known
        return known

    def _stopped(self, call_id: str, answer: dict[str, Any]) -> Turn:
        """A last answer past a limit, as if the model had ended by itself."""
        metrics.STOPPED.labels(answer["why"]).inc()
        if answer["answered"] > MOST_STOPPED:
            raise Refusal("ended", f"this rollout has ended ({answer['why']})")
        turn = Turn(call_id)
        message = Message(role="assistant", content=STOPPED)
        turn.end(Answer(call_id, message, "stop", 0, 0, created=turn.created))
        return turn

    async def _replay(self, caller: Caller, call_id: str, place: int) -> Turn:
        tree = (await self._looked_up(caller)).tree
        if len(tree.nodes) <= place or tree.nodes[place].call_id != call_id:
            # Redis lost turns, and what is here is not what is there.
            self._known.pop(caller, None)
            tree = (await self._looked_up(caller)).tree
        node = tree.nodes[place]
        turn = Turn(node.call_id)
        turn.prompt_tokens = len(tree.prompt(place))
        turn.end(_answer(node, turn))
        return turn

    async def _serve(self, begun: Begun) -> None:
        known, turn = begun.known, begun.turn
        structlog.contextvars.bind_contextvars(**known.caller._asdict(), call=turn.call_id)
        known.running += 1
        began, kind = time.monotonic(), "ok"
        refusal = Refusal("unavailable", "this process ends", retry_after_s=1)
        try:
            turn.end(await self._answered(begun))
        except asyncio.CancelledError:
            kind = "cancelled"
            await self._send(self._store.fail, known.caller, turn.call_id, "unavailable")
            raise
        except Exception as error:
            refusal = refusal_of(error)
            kind = refusal.kind
            write = log.info if isinstance(error, Refusal) else log.warning
            trace = error if kind == "internal" and not isinstance(error, ModelError) else None
            write("call refused", kind=kind, error=str(error), exc_info=trace)
            if kind != "ended":
                await self._send(self._store.fail, known.caller, turn.call_id, kind)
        finally:
            # However it ended: who listens must not do so for ever.
            turn.end(refusal)
            known.running -= 1
            self._turns.pop((known.caller, turn.call_id), None)
            metrics.CALLS.labels(begun.dialect, kind).inc()
            metrics.SECONDS.observe(time.monotonic() - began)

    async def _answered(self, begun: Begun) -> Answer:
        known, turn, call = begun.known, begun.turn, begun.call
        _check_size(known, call)
        codec = await self._codec(known)
        await self._read(known, begun.answer["nodes"])
        tree = known.tree
        async with known.rendering:
            made = await self._prompts.of(tree, codec, call)
        prompt, place = made.ids, made.place
        request = self._request(begun, codec, prompt, place)
        turn.prompt_tokens = len(prompt)
        turn.begun.set_result(None)
        shown = Shown(turn, codec, prompt) if call.stream else None
        Shown.live += call.stream
        try:
            completion = await self._sample(begun, request, shown)
        finally:
            Shown.live -= call.stream
        backend = f"{known.backend.engine} {known.backend.id}"
        message = told(codec, prompt, completion, shown and turn)
        root = place.parent == ROOT
        (metrics.BRANCHES if root else metrics.ATTACHED).inc()
        node = Node(
            turn.call_id,
            place.parent,
            after(place.path, message),
            pack_ids(made.given),
            to_json(call.messages if root else place.tail),
            json.dumps(call.tools) if root and call.tools else "",
            pack_ids(completion.token_ids),
            *pack_logprobs(completion.logprobs),
            completion.spans,
            completion.finish_reason,
            message.model_dump_json(exclude_defaults=True),
            begun.dialect,
            backend,
            call.asked | ({"max_tokens": call.max_tokens} if call.max_tokens else {}),
            begun.body,
            completion.cached_tokens,
            completion.routed_experts,
            codec.digest if root else "",
            round(1000 * (time.monotonic() - turn.began)),
        )
        metrics.TOKENS.inc(len(completion.token_ids))
        return _answer(await self._write(known, tree, node), turn)

    # -- its prompt --------------------------------------------------------------------------

    async def _codec(self, known: Known) -> Codec:
        if known.codec is None:
            known.codec = await asyncio.to_thread(load_codec, known.first.tokenizer)
            if known.codec not in self._codecs:
                self._codecs.append(known.codec)
                # Hundreds of thousands of objects that stay: to look through them stops all calls for long.
                gc.collect()
                gc.freeze()
        return known.codec

    async def _read(self, known: Known, length: int) -> None:
        """Have at least so many nodes of the tree here."""
        while len(known.tree.nodes) < length:
            async with known.reading:
                tree, here = known.tree, known.tree.nodes
                if len(here) >= length:
                    break
                last = max(0, len(here) - 1)
                stored = decode(await ask(self._store.nodes, *known.caller, last))
                if known.tree is not tree:
                    continue
                if here and (not stored or stored[0].call_id != here[last].call_id):
                    # Redis was killed and lost turns. Who has prompts of the old tree goes on with that.
                    known.tree = Tree()
                    continue
                # Meanwhile others may have been added by the calls that they answer.
                for node in stored[len(here) - last :]:
                    tree.add(node)
                if len(here) < length:
                    raise InfrastructureError(f"{length} turns were written and are not there any more")

    def _request(self, begun: Begun, codec: Codec, prompt: list[int], place: Attachment) -> SampleRequest:
        """What to sample; Refusal where the context has no room for a turn."""
        known, call = begun.known, begun.call
        most = known.first.max_model_len
        room = most - len(prompt)
        if room < min(LEAST_ROOM, most // 8, call.max_tokens or LEAST_ROOM):
            raise Refusal(
                "context",
                f"the prompt has {len(prompt)} tokens of {most}",
                tokens=len(prompt),
                most_tokens=most,
            )
        budget = known.session.most_sampled
        left = None if budget is None else budget - begun.answer["sampled"]
        bounds = (room, call.max_tokens, known.sampling.max_tokens, left)
        return SampleRequest(
            begun.turn.call_id,
            prompt,
            max(1, min(bound for bound in bounds if bound is not None)),
            known.sampling,
            _seed(known, place),
            frozenset(codec.stop_token_ids),
            known.first.cache_salt,
            codec.end_ids,
            codec.vocab_size,
        )

    # -- its answer --------------------------------------------------------------------------

    async def _sample(self, begun: Begun, request: SampleRequest, shown: Shown | None) -> Completion:
        """Ask the engine, under the fence of whichever worker holds the rollout now."""
        known, fence, ends = begun.known, begun.answer["fence"], time.monotonic() + TAKEOVER_S
        session = known.session
        while True:
            router = BackendRouter(
                known.caller.rollout_id,
                self._placements,
                self._http,
                fence=fence,
                policy_version=session.policy_version,
                wait_s=session.backend_wait_s,
                policy=known.first.policy,
            )
            router.backend = known.backend
            router.accepts = partial(asyncio.to_thread, takeover_obstacle, known.first)
            try:
                completion = await router.generate(request, session.call_timeout_s, shown and shown.watch)
            except RolloutLost:
                if time.monotonic() > ends or (shown and shown.ids):
                    raise
                await asyncio.sleep(LOOK_S)
                fence = (await self._look(known.caller))["fence"]
            else:
                known.backend = router.backend or known.backend
                return completion

    async def _write(self, known: Known, tree: Tree, node: Node) -> Node:
        """Enter a turn whose prompt is of this tree; the first answer to a call is its turn. Refusal where
        the attempt has ended."""
        place, node = await self._enter(known.caller, tree, node)
        if place == len(tree.nodes):
            tree.add(node)
        elif place < len(tree.nodes) and tree.nodes[place].call_id != node.call_id:
            # Redis lost turns, and another process wrote on: what is there is the truth.
            known.tree = Tree()
        return node

    async def _enter(self, caller: Caller, tree: Tree, node: Node) -> tuple[int, Node]:
        """Write a turn, and those of its tree that Redis has lost: its place there, and what is there."""
        places: dict[int, int] = {}
        """Of the nodes that were written again."""

        async def add(node: Node) -> dict[str, Any]:
            ends, more, parent = time.monotonic() + EARLY_S, {}, node.parent
            if parent != ROOT:
                more["parent_call"] = tree.nodes[parent].call_id
                node = msgspec.structs.replace(node, parent=places.get(parent, parent))
            entry = (node.call_id, encode(node), node.parent, len(node.sampled) // 4)
            while (answer := await self._send(self._store.add, caller, *entry, **more))["word"] == "early":
                # RUN opens a session again whose opening was lost.
                if time.monotonic() > ends:
                    break
                await asyncio.sleep(LOOK_S)
            if answer["word"] not in ("ok", "behind"):
                raise not_open(answer["word"])
            return answer

        while (answer := await add(node))["word"] == "behind":
            at = min(answer["at"], node.parent)
            while at < len(tree.nodes):
                again = await add(tree.nodes[at])
                if again["word"] == "ok":
                    places[at] = again["node"]
                    at += 1
                else:
                    at = tree.nodes[at].parent
        if answer["other"]:
            (stored, *_) = await ask(self._store.nodes, *caller, answer["node"])
            (node,) = decode([stored])
        return answer["node"], node


def _bytes(known: Known) -> int:
    """What a session takes, at most what all may: one that is larger is kept alone."""
    return min(SESSION_BYTES + known.tree.bytes, MOST_BYTES)


def _answer(node: Node, turn: Turn) -> Answer:
    message = Message.model_validate_json(node.message)
    finish = "length" if node.finish_reason == "length" else "tool_calls" if message.tool_calls else "stop"
    sampled = len(node.sampled) // 4
    return Answer(
        node.call_id, message, finish, turn.prompt_tokens, sampled, node.cached_tokens or 0, turn.created
    )


def not_open(word: str) -> Refusal:
    """What a program is told where Redis answers that its session may not be called; see `CaptureStore`."""
    match word:
        case "unknown":
            return Refusal("unauthorized", "this key is of no rollout that is known here")
        case "early":
            return Refusal("unavailable", "this rollout is not in RUN yet", retry_after_s=5)
    return Refusal("ended", "this attempt of the rollout has ended, and its key with it")


def refusal_of(error: Exception) -> Refusal:
    """What a program is told of an error."""
    match error:
        case Refusal():
            return error
        case ModelError():
            return Refusal("internal", f"the model's server refuses the call: {error}")
        case InfrastructureError() | CodecError() | BrokenCall():
            return Refusal("unavailable", str(error), retry_after_s=2)
    return Refusal("internal", f"{type(error).__name__} in capture; its log has more")


def _check_size(known: Known, call: ModelCall) -> None:
    """Refuse a call of so many bytes that the context has no room for it, however it is rendered."""
    most = known.first.max_model_len
    if call.size > MOST_BYTES_OF_AN_ID * most:
        tokens = call.size // 4
        problem = f"a body of {call.size} bytes is more than {most} tokens"
        raise Refusal("context", problem, tokens=tokens, most_tokens=most)


def _seed(known: Known, place: Attachment) -> int | None:
    """Another seed for each rollout of a group and each turn; the same for the same, in whichever process."""
    seed = known.sampling.seed
    if seed is None:
        return None
    text = f"{seed}/{known.session.index}/{place.path.hex()}/{place.earlier}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1
