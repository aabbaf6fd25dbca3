"""Sessions of captured model calls: which there were, which are under way, and their answers."""

from __future__ import annotations

import json
import secrets
from typing import Any

import msgspec
import redis
from msgspec import Struct
from redis.client import NEVER_DECODE

from services.state import keys
from services.state.capture.session import Session
from services.state.scripts import Call, Operations, request


class Summary(Struct):
    """How far a session has come. Times are ms by Redis' clock."""

    now_ms: int
    calls: int
    """Begun; neither repetitions nor what was refused are among them."""
    sampled: int
    nodes: int
    session: str
    """The `Session` (JSON)."""
    in_flight: int
    """Calls that living processes are to answer."""
    lost: int
    """Calls whose processes have ended, and that did not come again."""
    refused: dict[str, int]
    """By kind; see `fail`."""
    fault: str | None = None
    """Why the last call was refused, where none was answered since; a kind."""
    retries: int = 0
    stopped: str | None = None
    """The first limit that was reached, a `FinishReason`; `limited` calls were answered so."""
    limited: int = 0
    reward: float | None = None
    components: dict[str, float] = {}
    finished: bool = False
    """The program has said that it is done, or has posted its reward."""
    closed: bool = False

    @property
    def unsampled(self) -> dict[str, int]:
        """Calls that have no node, as a receipt counts them."""
        return {"retries": self.retries, "refused": sum(self.refused.values()) + self.limited}


class CaptureStore:
    """The sessions. A call to one that is not open is answered `unknown` (no such attempt yet), `early` (RUN
    has not opened it yet) or `ended`. What returns a `Call` is for `send_many`."""

    def __init__(self, client: redis.Redis) -> None:
        self._redis = client
        self._do = Operations(client, "capture/capture")

    def secret(self) -> str:
        """What keys are made of, the same for all processes."""
        self._redis.set(keys.CAPTURE_SECRET, secrets.token_hex(32), nx=True)
        return self._redis.get(keys.CAPTURE_SECRET)

    def open(self, rollout_id: str, attempt: int, fence: int, session: Session) -> Any:
        """Let an attempt be called: `ok`, or `lost`. A session that is there stays as it is."""
        ask = {"rollout": rollout_id, "attempt": attempt, "fence": fence}
        return self._do("open", msgspec.json.encode(session), **ask, ends_in=int(session.ends_in_s * 1000))

    def close(self, rollout_id: str, attempt: int, fence: int) -> Any:
        """Let it be called no more: `ok`, or `lost`."""
        return self._do("close", rollout=rollout_id, attempt=attempt, fence=fence)

    def nodes(self, rollout_id: str, attempt: int, start: int = 0) -> list[bytes]:
        """The nodes from a place on. A Redis that was killed may have lost the last ones and have others in
        their places: who keeps nodes asks from their last one on, which must still be the same."""
        stored = keys.capture_nodes(rollout_id, attempt)
        return self._redis.execute_command("LRANGE", stored, start, -1, **{NEVER_DECODE: True})

    def summary(self, rollout_id: str, attempt: int) -> Summary | None:
        """None: it was never opened, or RUN has ended."""
        its = self._do("summary", rollout=rollout_id, attempt=attempt)
        its["components"] = json.loads(its.get("components", "{}"))
        return msgspec.convert(its, Summary, strict=False) if "session" in its else None

    def begin(
        self, rollout_id: str, attempt: int, *, call_id: str, body: str, retry: bool | None, process: str
    ) -> Call:
        """A program calls the model.

        Args:
            body: Digest of what it sent (hexadecimal).
            retry: Whether its SDK says that this is one; None: it waits since it was answered `joined`.
            process: A name that no other process has or had; see `alive`.

        The answers: `ok` with the `call` to answer, perhaps an earlier one whose process is lost, `fence`,
        `nodes` (their number), `session`, `calls`, `sampled`; `again` with `call` and `node`, the place of
        its answer; `joined` with the `call` under way and its `process`, which by `fail` gives up one that it
        does not know; `limit` with `why`, `answered` (times). The same `Call` sent again is answered alike.
        """
        ask = {"call": call_id, "body": body, "retry": retry, "process": process}
        return self._call("begin", rollout_id, attempt, **ask, token=secrets.token_hex(8))

    def look(self, rollout_id: str, attempt: int) -> Call:
        """What `begin` would say of `fence`, `nodes` and `session`, of a call that is none."""
        return self._call("look", rollout_id, attempt)

    def add(
        self, rollout_id: str, attempt: int, call_id: str, node: bytes, parent: int, sampled: int, **more: str
    ) -> Call:
        """Write the answer to a call, of which the first counts.

        Args:
            more: `parent_call`, the id of the call that the node at `parent` must answer.

        The answers: `ok` with `node` (its place), `at` (ms) and `other`, whether that is another answer;
        `behind` with `at`: Redis has lost the nodes from there on. The caller may add them again, each below
        the place that its parent has now.
        """
        ask = {"call": call_id, "parent": parent, "sampled": sampled, **more}
        return self._call("add", rollout_id, attempt, node, **ask)

    def told(self, rollout_id: str, attempt: int, call_id: str) -> Call:
        """The program has got the whole answer."""
        return self._call("note", rollout_id, attempt, call=call_id, word="told")

    def orphan(self, rollout_id: str, attempt: int, call_id: str) -> Call:
        """Its connection went away before that."""
        return self._call("note", rollout_id, attempt, call=call_id, word="orphan")

    def fail(self, rollout_id: str, attempt: int, call_id: str, kind: str) -> Call:
        """A call that was begun is refused, and does not count; it may come again."""
        return self._call("note", rollout_id, attempt, call=call_id, kind=kind)

    def reward(self, rollout_id: str, attempt: int, value: float, components: dict[str, float]) -> Call:
        """The program is done and says what it was worth: `ok`, `forbidden` by the session, or `again`."""
        texts = {"reward": repr(float(value)), "components": json.dumps(components)}
        return self._call("finish", rollout_id, attempt, **texts)

    def finish(self, rollout_id: str, attempt: int) -> Call:
        """The program is done."""
        return self._call("finish", rollout_id, attempt)

    def alive(self, process: str) -> Call:
        """A process lives; it says so again within 6 s, or its calls are taken over."""
        return self._do, request("alive", process=process)

    def _call(self, operation: str, rollout_id: str, attempt: int, *blobs: bytes, **ask: Any) -> Call:
        return self._do, request(operation, *blobs, rollout=rollout_id, attempt=attempt, **ask)
