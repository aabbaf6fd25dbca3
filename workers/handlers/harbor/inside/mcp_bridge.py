"""Speaks MCP with a task's servers, inside of its sandbox; the worker asks by files.

Started, it goes on in the background, and prints the servers' tools as one line of JSON. From then on a file
`in/ID` with a request is answered by a file `out/ID`. Standard library only: it runs by the interpreter of
the sandbox's server, whatever the image has.
"""

import contextlib
import fcntl
import itertools
import json
import os
import queue
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

HERE = Path(__file__).parent
PROTOCOL = "2025-06-18"
START_S = 60.0  # for all servers to start and to tell their tools
MOST_BYTES = 4 << 20  # of a message
MOST_TOOLS, MOST_PAGES = 128, 20  # of a server
ANSWER_BYTES = 1 << 20  # of an answer to the worker
BUSY_S, LOOKS_S = 5.0, (0.01, 0.1)  # after a request it looks for the next one more often
WRITTEN_S = 2.0  # for a request to be written whole


class Failed(Exception):
    """The server cannot be asked, or refuses; the message is for the model."""


class Session:
    """One server: requests and their answers. How messages travel is the subclasses'."""

    alive = True

    def __init__(self, told):
        self.told = told
        self._numbers = itertools.count(1)
        self._waiting = {}  # id of a request -> queue of its answer

    def connect(self):
        about = {"protocolVersion": PROTOCOL, "capabilities": {}}
        about["clientInfo"] = {"name": "rollout-service", "version": "1"}
        self.request("initialize", about, START_S)
        self.send({"jsonrpc": "2.0", "method": "notifications/initialized"}, START_S)

    def tools(self):
        found, params = [], {}
        for _ in range(MOST_PAGES):
            page = self.request("tools/list", params, START_S)
            found += page.get("tools") or []
            params = {"cursor": page.get("nextCursor")}
            if not params["cursor"]:
                break
        return found[:MOST_TOOLS]

    def request(self, method, params, timeout):
        number, answers = next(self._numbers), queue.Queue()
        self._waiting[number] = answers
        ends = time.monotonic() + timeout
        try:
            self.send({"jsonrpc": "2.0", "id": number, "method": method, "params": params}, timeout)
            answer = answers.get(timeout=max(0.0, ends - time.monotonic()))
        except queue.Empty:
            raise Failed("no answer within %g s" % timeout) from None
        except (OSError, ValueError) as error:
            self.alive = False
            raise Failed(str(error) or type(error).__name__) from error
        finally:
            del self._waiting[number]
        if answer is None:
            raise Failed("the server has ended")
        if "error" in answer:
            error = answer["error"]
            raise Failed(str(error.get("message", error) if isinstance(error, dict) else error))
        return answer["result"] if isinstance(answer.get("result"), dict) else {}

    def receive(self, text):
        """What the server says: answers, and requests of its own. What is no JSON is chatter."""
        with contextlib.suppress(ValueError, RecursionError):
            messages = json.loads(text)
            for message in messages if isinstance(messages, list) else [messages]:
                if "method" not in message:
                    self._waiting[message["id"]].put(message)
                elif "id" in message:
                    answer = {"jsonrpc": "2.0", "id": message["id"], "result": {}}
                    if message["method"] != "ping":
                        del answer["result"]
                        answer["error"] = {"code": -32601, "message": "this client does not do that"}
                    self.send(answer, 10.0)

    def read(self, messages):
        """Receive until the server ends."""
        for message in messages:
            with contextlib.suppress(Exception):  # of a message that is none
                self.receive(message)
        self.alive = False
        for waiting in list(self._waiting.values()):
            waiting.put(None)


class Stdio(Session):
    """A program; a message is a line."""

    def connect(self):
        pipe, argv = subprocess.PIPE, [self.told["command"], *self.told["args"]]
        with (HERE / "servers.log").open("ab") as log:
            program = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=log)
        self._said, self._lock = program.stdin, threading.Lock()
        lines = iter(lambda: program.stdout.readline(MOST_BYTES), b"")
        threading.Thread(target=self.read, args=(lines,), daemon=True).start()
        super().connect()

    def send(self, message, timeout):
        with self._lock:
            self._said.write(json.dumps(message).encode() + b"\n")
            self._said.flush()


class Http(Session):
    """An address; each message is a POST, and what it is answered with has the server's messages."""

    def __init__(self, told):
        super().__init__(told)
        self._headers = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}
        self._headers.update(told["headers"], **{"MCP-Protocol-Version": PROTOCOL})
        self._to = told["url"]

    def send(self, message, timeout):
        request = urllib.request.Request(self._to, json.dumps(message).encode(), self._headers)
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            if session := answer.headers.get("Mcp-Session-Id"):
                self._headers["Mcp-Session-Id"] = session
            self.take(answer, self._waiting.get(message.get("id")), time.monotonic() + timeout)

    def take(self, answer, waiting, ends):
        if answer.headers.get_content_type() != "text/event-stream":
            self.receive(answer.read(MOST_BYTES))
            return
        for _, data in events(answer):
            self.receive(data)
            if time.monotonic() > ends or (waiting is not None and not waiting.empty()):
                break


class Sse(Http):
    """The older way over HTTP: answers come as events of a stream that was opened first."""

    def connect(self):
        headers = {**self._headers, "Accept": "text/event-stream"}
        stream = urllib.request.urlopen(urllib.request.Request(self._to, headers=headers), timeout=START_S)
        told = events(stream)
        self._to = urllib.parse.urljoin(self._to, next(data for name, data in told if name == "endpoint"))
        with contextlib.suppress(AttributeError):
            stream.fp.raw._sock.settimeout(None)  # silence is no end of it
        threading.Thread(target=self.read, args=((data for _, data in told),), daemon=True).start()
        super().connect()

    def take(self, answer, waiting, ends):
        answer.read(MOST_BYTES)  # "Accepted"


def events(stream):
    """Name and data of each event of a stream."""
    name, data = "message", []
    with contextlib.suppress(OSError, ValueError):
        while line := stream.readline(MOST_BYTES):
            field, _, value = line.decode(errors="replace").rstrip("\r\n").partition(":")
            if not (field or value):
                if data:
                    yield name, "\n".join(data)
                name, data = "message", []
            elif field == "event":
                name = value.removeprefix(" ")
            elif field == "data" and sum(map(len, data)) < MOST_BYTES:
                data.append(value.removeprefix(" "))


KINDS = {"stdio": Stdio, "streamable-http": Http, "sse": Sse}


class Bridge:
    """All servers of the task; one that has ended is started again by the next request."""

    def __init__(self):
        self._told = {told["name"]: told for told in json.loads((HERE / "servers.json").read_text())}
        self._sessions, self._locks = {}, {name: threading.Lock() for name in self._told}

    def ask(self, name, do):
        """What `do` gives of a server's session, as an answer to the worker."""
        try:
            with self._locks[name]:
                session = self._sessions.get(name)
                if session is None or not session.alive:
                    session = KINDS[self._told[name]["transport"]](self._told[name])
                    session.connect()
                    self._sessions[name] = session
            return {"result": do(session)}
        except Exception as error:  # the server is gone, odd or hostile
            return {"error": str(error) or repr(error)}

    def list_tools(self):
        found = {name: {"error": "it does not answer"} for name in self._told}
        lists = [
            threading.Thread(target=lambda name=name: found.update({name: self.ask(name, Session.tools)}))
            for name in self._told
        ]
        ends = time.monotonic() + START_S
        for thread in lists:
            thread.daemon = True
            thread.start()
        for thread in lists:
            thread.join(max(0.0, ends - time.monotonic()))
        write(HERE / "tools.json", found)

    def answer(self, place):
        ends, asked = time.monotonic() + WRITTEN_S, None
        while asked is None and time.monotonic() < ends:
            try:
                asked = json.loads(place.read_text())
            except ValueError:
                time.sleep(0.02)  # it is still being written
        place.unlink()
        if asked is not None:
            wanted = asked["method"], asked["params"], asked["timeout"]
            write(
                HERE / "out" / place.name, self.ask(asked["server"], lambda session: session.request(*wanted))
            )

    def serve(self):
        last = time.monotonic()
        while True:
            for place in (HERE / "in").iterdir():
                last = time.monotonic()
                taken = place.rename(HERE / "taken" / place.name)
                threading.Thread(target=self.answer, args=(taken,), daemon=True).start()
            time.sleep(LOOKS_S[time.monotonic() - last > BUSY_S])


def write(place, answer):
    """A file that is there whole or not at all."""
    text = json.dumps(answer)
    if len(text) > ANSWER_BYTES:
        text = json.dumps({"error": "an answer of %d characters is too long" % len(text)})
    part = place.with_name(place.name + ".part")
    part.write_text(text)
    part.rename(place)


def start():
    for name in ("in", "out", "taken"):
        (HERE / name).mkdir(exist_ok=True)
    told, alone = HERE / "tools.json", os.open(HERE / "lock", os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(alone, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return  # there is one, and it is slow
    told.unlink(missing_ok=True)
    if os.fork() == 0:  # and it holds the lock as long as it lives
        os.setsid()
        if os.fork():
            os._exit(0)
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
        bridge = Bridge()
        bridge.list_tools()
        bridge.serve()
    os.wait()
    ends = time.monotonic() + START_S + 10
    while not told.exists() and time.monotonic() < ends:
        time.sleep(0.01)
    sys.stdout.write(told.read_text() + "\n")


if __name__ == "__main__":
    start()
