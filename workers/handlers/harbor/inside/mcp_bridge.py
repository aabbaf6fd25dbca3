"""Speaks MCP with a task's servers, inside of its sandbox; the worker asks by files.

Started, it goes on in the background, and prints the servers' tools as one line of JSON. From then on a file
`in/ID` with a request is answered by a file `out/ID`. Standard library only: it runs by the interpreter of
the sandbox's server, whatever the image has.
"""

import contextlib
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


class Failed(Exception):
    """The server cannot be asked, or refuses; the message is for the model."""


class Session:
    """One server: the handshake, requests and their answers; how messages travel is the subclasses'."""

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
        found, cursor = [], None
        for _ in range(MOST_PAGES):
            page = self.request("tools/list", {"cursor": cursor} if cursor else {}, START_S)
            found += page.get("tools") or []
            cursor = page.get("nextCursor")
            if not cursor:
                break
        return found[:MOST_TOOLS]

    def request(self, method, params, timeout):
        number = next(self._numbers)
        answers = self._waiting[number] = queue.Queue()
        ends = time.monotonic() + timeout
        try:
            self.send({"jsonrpc": "2.0", "id": number, "method": method, "params": params}, timeout)
            answer = answers.get(timeout=max(0.0, ends - time.monotonic()))
        except queue.Empty:
            raise Failed("no answer within %g s" % timeout) from None
        except (OSError, ValueError) as error:
            raise Failed(str(error) or type(error).__name__) from error
        finally:
            self._waiting.pop(number, None)
        if answer is None:
            raise Failed("the server has ended")
        if "error" in answer:
            error = answer["error"]
            raise Failed(str(error.get("message", error) if isinstance(error, dict) else error))
        result = answer.get("result")
        return result if isinstance(result, dict) else {}

    def receive(self, line):
        """A message of the server's: an answer, or something that it wants itself."""
        try:
            messages = json.loads(line)
        except (ValueError, RecursionError):
            return  # what is no JSON is a server's chatter
        for message in messages if isinstance(messages, list) else [messages]:
            if not isinstance(message, dict):
                continue
            if "method" not in message:
                waiting = self._waiting.get(message.get("id"))
                if waiting is not None:
                    waiting.put(message)
            elif "id" in message:
                answer = {"jsonrpc": "2.0", "id": message["id"]}
                if message["method"] == "ping":
                    answer["result"] = {}
                else:
                    answer["error"] = {"code": -32601, "message": "this client does not do that"}
                with contextlib.suppress(OSError, Failed):
                    self.send(answer, 10.0)

    def end(self):
        for waiting in list(self._waiting.values()):
            waiting.put(None)


class Stdio(Session):
    """A program; a message is a line."""

    def connect(self):
        pipe, argv = subprocess.PIPE, [self.told["command"], *self.told["args"]]
        with (HERE / "servers.log").open("ab") as log:
            self._program = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=log)
        threading.Thread(target=self._read, daemon=True).start()
        super().connect()

    def _read(self):
        while line := self._program.stdout.readline(MOST_BYTES):
            self.receive(line)
        self.end()

    def send(self, message, timeout):
        self._program.stdin.write(json.dumps(message).encode() + b"\n")
        self._program.stdin.flush()

    @property
    def alive(self):
        return self._program.poll() is None


class Http(Session):
    """An address; each message is a POST, and what it is answered with has the server's messages."""

    alive = True

    def __init__(self, told):
        super().__init__(told)
        self._headers = {"Accept": "application/json, text/event-stream", **told["headers"]}
        self._headers["MCP-Protocol-Version"] = PROTOCOL
        self._to = told["url"]

    def send(self, message, timeout):
        headers = {"Content-Type": "application/json", **self._headers}
        request = urllib.request.Request(self._to, json.dumps(message).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                if session := answer.headers.get("Mcp-Session-Id"):
                    self._headers["Mcp-Session-Id"] = session
                self._take(answer, message, time.monotonic() + timeout)
        except urllib.error.HTTPError as error:
            raise Failed("%s answers %d" % (self._to, error.code)) from error

    def _take(self, answer, message, ends):
        if answer.headers.get_content_type() != "text/event-stream":
            self.receive(answer.read(MOST_BYTES))
            return
        for _, data in events(answer):
            self.receive(data)
            answered = "id" in message and not self._waiting[message["id"]].empty()
            if answered or time.monotonic() > ends:
                break


class Sse(Http):
    """The older way over HTTP: answers come as events of a stream that was opened first."""

    def connect(self):
        request = urllib.request.Request(self._to, headers={**self._headers, "Accept": "text/event-stream"})
        stream, begun = urllib.request.urlopen(request, timeout=START_S), queue.Queue()
        threading.Thread(target=self._read, args=(stream, begun), daemon=True).start()
        try:
            path = begun.get(timeout=START_S)
        except queue.Empty:
            raise Failed("the server does not say where messages go") from None
        self._to = urllib.parse.urljoin(self._to, path)
        super().connect()

    def _read(self, stream, begun):
        with contextlib.suppress(OSError):
            stream.fp.raw._sock.settimeout(None)  # silence is no end of it
        with contextlib.suppress(OSError, ValueError):
            for name, data in events(stream):
                if name == "endpoint":
                    begun.put(data)
                else:
                    self.receive(data)
        self.alive = False
        self.end()

    def _take(self, answer, message, ends):
        answer.read(MOST_BYTES)  # "Accepted"


def events(stream):
    """Name and data of each event of a stream."""
    name, data = "message", []
    while line := stream.readline(MOST_BYTES):
        line = line.decode(errors="replace").rstrip("\r\n")
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if not line and data:
            yield name, "\n".join(data)
        if not line:
            name, data = "message", []
        elif field == "event":
            name = value
        elif field == "data" and sum(map(len, data)) < MOST_BYTES:
            data.append(value)


KINDS = {"stdio": Stdio, "streamable-http": Http, "sse": Sse}


class Bridge:
    """All servers of the task; one that has ended is started again by the next request."""

    def __init__(self):
        self._told = {told["name"]: told for told in json.loads((HERE / "servers.json").read_text())}
        self._sessions = {}
        self._locks = {name: threading.Lock() for name in self._told}

    def _session(self, name):
        with self._locks[name]:
            session = self._sessions.get(name)
            if session is None or not session.alive:
                session = KINDS[self._told[name]["transport"]](self._told[name])
                try:
                    session.connect()
                except (OSError, ValueError) as error:
                    raise Failed("it does not start: %s" % error) from error
                self._sessions[name] = session
            return session

    def list_tools(self):
        found = {}

        def ask(name):
            try:
                found[name] = {"tools": self._session(name).tools()}
            except Failed as error:
                found[name] = {"error": str(error)}
            except Exception as error:  # the server is hostile, or odd
                found[name] = {"error": repr(error)}

        threads = [threading.Thread(target=ask, args=(name,), daemon=True) for name in self._told]
        for thread in threads:
            thread.start()
        ends = time.monotonic() + START_S
        for thread in threads:
            thread.join(max(0.0, ends - time.monotonic()))
        silent = {name: {"error": "it does not answer"} for name in self._told}
        write(HERE / "tools.json", {**silent, **found})

    def answer(self, place):
        for _ in range(100):
            try:
                asked = json.loads(place.read_text())
                break
            except ValueError:
                time.sleep(0.02)  # it is still being written
        else:
            return
        place.unlink()
        try:
            session = self._session(asked["server"])
            answer = {"result": session.request(asked["method"], asked["params"], asked["timeout"])}
        except Failed as error:
            answer = {"error": str(error)}
        except Exception as error:
            answer = {"error": repr(error)}
        write(HERE / "out" / place.name, answer)

    def serve(self):
        last = time.monotonic()
        while True:
            for place in (HERE / "in").iterdir():
                last = time.monotonic()
                claimed = HERE / "taken" / place.name
                with contextlib.suppress(OSError):
                    place.rename(claimed)
                    threading.Thread(target=self.answer, args=(claimed,), daemon=True).start()
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
    with contextlib.suppress(OSError):
        (HERE / "tools.json").unlink()
    if os.fork() == 0:
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
    while not (HERE / "tools.json").exists() and time.monotonic() < ends:
        time.sleep(0.01)
    sys.stdout.write((HERE / "tools.json").read_text() + "\n")


if __name__ == "__main__":
    start()
