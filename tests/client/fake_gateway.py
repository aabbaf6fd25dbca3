"""The gateway's HTTP API in memory, for the client's tests: rollouts end when the test says so.

Not the pipeline: the true gateway has its own tests, and `tests/local` runs the client against it.
"""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from pydantic import ValidationError

from rollout.schema import (
    Backend,
    BackendRequest,
    Batch,
    BatchState,
    DrainRequest,
    GroupPage,
    Rollout,
    RolloutRequest,
    State,
    SubmitRequest,
)
from tests.helpers.http_server import Server
from tests.helpers.rollouts import ended

EMPTY_PAGE = GroupPage(
    groups=[],
    cursor="0",
    batch=Batch(id="b", state=BatchState.DONE, wanted=1, n=1, in_flight=0, created_at=0.0),
    last=True,
)


class FakeGateway:
    """Serves on a free loopback port between `__enter__` and `__exit__`."""

    def __init__(self) -> None:
        self.rollouts: dict[str, Rollout] = {}
        self.ended: list[str] = []
        self.calls: list[tuple[str, str]] = []
        self.submissions: list[SubmitRequest] = []
        self.backends: dict[str, Backend] = {}
        self.bundles: dict[str, bytes] = {}
        self.pages: dict[str, bytes] = {}
        """HTML files by their path."""
        self.faults: list[Any] = []
        """Taken one a request: an (status, headers, body) answer, "drop" before, or "drop-after" work; or a
        function that answers, given the handler."""
        self.connections = 0
        self.finish_at_once = True
        self.lock = threading.Condition()

    def __enter__(self) -> FakeGateway:
        gateway = self

        class Handler(_Handler):
            fake = gateway

        self.server = Server(Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def finish(self, rollout_id: str, state: State = State.COMPLETED, reward: float | None = 1.0) -> None:
        deadline = time.monotonic() + 120
        while rollout_id not in self.rollouts and time.monotonic() < deadline:
            time.sleep(0.01)  # a timer of a test is quicker than the client, on a busy machine
        with self.lock:
            rollout = self.rollouts[rollout_id]
            rollout.state, rollout.reward, rollout.finished_at = state, reward, time.time()
            self.ended.append(rollout_id)
            self.lock.notify_all()

    def create(self, request: RolloutRequest) -> list[dict]:
        group, ids = request.rollout_ids()
        out = []
        for index, rollout_id in enumerate(ids):
            created = rollout_id not in self.rollouts
            if created:
                names = {"id": rollout_id, "group_id": group, "index": index, "handler": request.handler}
                self.rollouts[rollout_id] = ended(**names, state=State.QUEUED, request=request)
                if self.finish_at_once:
                    self.finish(rollout_id)
            state = self.rollouts[rollout_id].state
            out.append({"id": rollout_id, "group_id": group, "state": state, "created": created})
        return out


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fake: FakeGateway

    def setup(self) -> None:
        super().setup()
        self.fake.connections += 1

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        kind = "application/problem+json" if status >= 400 else "application/json"
        for key, value in {"content-type": kind, "content-length": str(len(data)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(data)

    def problem(self, status: int, title: str, **fields: Any) -> None:
        self.answer(status, {"title": title, "status": status, **fields})

    def handle_any(self) -> None:
        parts = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        fault = self.fake.faults.pop(0) if self.fake.faults else None
        self.fake.calls.append((self.command, parts.path))  # by then it has met its fault
        if fault == "drop":
            self.close_connection = True
            return
        if isinstance(fault, tuple):
            self.answer(fault[0], fault[2], fault[1])
            return
        if callable(fault):
            fault(self)
            return
        if fault == "drop-after":
            self.answer = lambda *_: setattr(self, "close_connection", True)  # type: ignore[method-assign]
        if parts.path.startswith("/v1/bundles/"):
            self.bundle(parts.path.rpartition("/")[2], body)
            return
        self.route(parts.path, query, json.loads(body) if body else None)

    do_GET = do_POST = do_DELETE = do_HEAD = do_PUT = handle_any

    def bundle(self, digest: str, body: bytes) -> None:
        if self.command == "PUT":
            assert self.headers["content-type"] == "application/gzip"
            self.fake.bundles[digest] = body
            self.answer(201, {"digest": digest, "bytes": len(body), "created": True})
            return
        self.answer(200 if digest in self.fake.bundles else 404, None)

    def route(self, path: str, query: dict[str, str], body: Any) -> None:
        fake = self.fake
        if (self.command, path) == ("POST", "/v1/rollouts"):
            return self.submit(body)
        if (self.command, path) == ("POST", "/v1/rollouts/cancel"):
            return self.cancel_many(body)
        if path == "/v1/results":
            return self.completions(query)
        if path == "/v1/rollouts/ack":
            counts = dict.fromkeys(("already_acknowledged", "not_ended", "unknown"), 0)
            return self.answer(200, {"acknowledged": len(body["ids"]), **counts})
        if path == "/v1/batches/b/prompts":
            return self.answer(200, {"waiting": len(body["prompts"])})
        if path == "/v1/batches/b/groups":
            return self.answer(200, EMPTY_PAGE.model_dump(mode="json"))
        if path == "/v1/rollouts":
            chosen = [
                r.model_dump(mode="json")
                for r in fake.rollouts.values()
                if query.get("state") in (None, r.state)
                and query.get("handler") in (None, r.handler)
                and query.get("group_id") in (None, r.group_id)
            ]
            return self.answer(200, {"rollouts": chosen[: int(query.get("limit", 100))], "cursor": None})
        if page := fake.pages.get(unquote(path)):
            return self.answer(200, page, {"content-type": "text/html"})
        if path.startswith("/v1/rollouts/"):
            return self.of_rollout(path.removeprefix("/v1/rollouts/"), query)
        if path == "/v1/handlers":
            return self.answer(200, {"handlers": [{"name": "calculator", "tools": ["execute_bash"]}]})
        if path.startswith("/v1/backends"):
            return self.of_backends(path.removeprefix("/v1/backends").removeprefix("/"), query, body)
        if path == "/v1/status":
            return self.answer(
                200, {"states": {"completed": 2}, "queues": {"init": 1}, "backends": [], "version": "x"}
            )
        if path == "/ready":
            return self.answer(503, {"missing": ["a worker of the stage run"]})
        return self.problem(404, "not found", detail=path)

    def submit(self, body: Any) -> None:
        try:
            request = SubmitRequest.model_validate(body)
        except ValidationError as error:
            errors = [{"field": ".".join(map(str, e["loc"])), "message": e["msg"]} for e in error.errors()]
            return self.problem(400, "invalid request", errors=errors)
        self.fake.submissions.append(request)
        created = [item for each in request.requests for item in self.fake.create(each)]
        return self.answer(202, {"rollouts": created})

    def of_rollout(self, rest: str, query: dict[str, str]) -> None:
        rollout_id, _, verb = unquote(rest).partition("/")
        rollout = self.fake.rollouts.get(rollout_id)
        if rollout is None:
            return self.problem(404, "no such rollout", detail=f"there is no rollout {rollout_id!r}")
        if verb == "cancel":
            if not rollout.state.terminal:
                self.fake.finish(rollout_id, State.CANCELLED, None)
            return self.answer(200, {"id": rollout_id, "state": rollout.state, "cancelling": False})
        with self.fake.lock:
            self.fake.lock.wait_for(lambda: rollout.state.terminal, float(query.get("wait", 0)))
        return self.answer(200, rollout.model_dump(mode="json"))

    def of_backends(self, rest: str, query: dict[str, str], body: Any) -> None:
        backends = self.fake.backends
        name, _, verb = unquote(rest).partition("/")
        if not name and self.command == "GET":
            return self.answer(200, {"backends": [b.model_dump(mode="json") for b in backends.values()]})
        if not name:
            asked = BackendRequest.model_validate(body)
            fields = asked.model_dump(exclude_none=True) | {"id": asked.id or "b1"}
            made = Backend(**{"model": "m", "tokenizer": "t", "max_model_len": 512} | fields)
            backends[made.id] = made
            return self.answer(201, made.model_dump(mode="json"))
        if name not in backends:
            return self.problem(404, "No such backend", detail=f"there is no backend {name!r}")
        if self.command == "DELETE":
            if query.get("force") == "false" and backends[name].live_rollouts:
                return self.problem(409, "Backend in use", detail="it has live rollouts")
            del backends[name]
            return self.answer(204, None)
        if verb == "drain":
            backends[name].draining = DrainRequest.model_validate(body).drain
        return self.answer(200, backends[name].model_dump(mode="json"))

    def cancel_many(self, body: dict[str, Any]) -> None:
        live = [r.id for r in self.fake.rollouts.values() if not r.state.terminal]
        if "ids" in body:
            live = [i for i in live if i in body["ids"]]
        for rollout_id in live:
            self.fake.finish(rollout_id, State.CANCELLED, None)
        asked = body.get("ids", live)
        known = len(self.fake.rollouts.keys() & asked)
        # As a gateway of before, which does not name what is unknown.
        counts = {"already_ended": known - len(live), "unknown": len(asked) - known}
        self.answer(200, {"cancelled": len(live), **counts})

    def completions(self, query: dict[str, str]) -> None:
        fake, cursor = self.fake, query.get("cursor", "0")
        with fake.lock:
            start = len(fake.ended) if cursor == "$" else int(cursor)
            fake.lock.wait_for(lambda: len(fake.ended) > start, float(query.get("wait", 0)))
            ids = fake.ended[start : start + int(query.get("limit", 100))]
        page = [fake.rollouts[i].model_dump(mode="json") for i in ids]
        self.answer(200, {"rollouts": page, "cursor": str(start + len(ids))})
