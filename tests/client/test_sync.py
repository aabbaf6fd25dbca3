"""The synchronous client where loops, forks, threads and signals meet; and that it is the other's twin."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import get_type_hints

import httpx
import pytest

from rollout.async_batches import AsyncBatches
from rollout.client import AsyncClient, Client, Unavailable
from rollout.http import LONG_POLL_S, Gateway
from rollout.schema import RolloutRequest
from rollout.sync import Batches
from tests.helpers.stack import wait_until


def request(**fields) -> RolloutRequest:
    return RolloutRequest(handler="calculator", **fields)


def loops() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "rollout-client"]


def once_asked(gateway, call: tuple[str, str], what) -> None:
    """Do something, from another thread, as soon as the gateway has been asked for that."""

    def do() -> None:
        wait_until(lambda: call in gateway.calls, 30, f"{call}")
        what()

    threading.Thread(target=do, daemon=True).start()


def in_python(code: str, url: str, **options) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", f"from rollout import Client\nclient = Client({url!r})\n{code}"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


# ---------------------------------------------------------------------------------- derivation


@pytest.mark.parametrize(("derived", "original"), [(Client, AsyncClient), (Batches, AsyncBatches)])
def test_it_has_the_methods_of_the_asynchronous_one_with_their_signatures(derived, original):
    def methods(cls):
        return {
            name: method for name, method in inspect.getmembers(cls) if name[0] != "_" and callable(method)
        }

    twins, originals = methods(derived), methods(original)
    assert twins.keys() == originals.keys() - (vars(Gateway).keys() - {"close"})
    for name in twins.keys() - {"close"}:
        twin, signature = inspect.signature(twins[name]), inspect.signature(originals[name])
        assert twin.parameters == signature.parameters
        assert str(signature.return_annotation).removeprefix("Async") == twin.return_annotation
        assert inspect.getdoc(twins[name]) == inspect.getdoc(originals[name])
        assert not inspect.iscoroutinefunction(twins[name])


def test_help_and_editors_see_names_types_and_texts():
    names = (Client.get.__qualname__, Client.fleet.__qualname__, Batches.get.__qualname__)
    assert names == ("Client.get", "Client.fleet", "Batches.get") and Client.get.__module__ == "rollout.sync"
    assert "-> 'Iterator[Rollout]'" in str(inspect.signature(Client.stream))
    assert get_type_hints(Client.get, vars(sys.modules["rollout.async_client"]))["include"]


# ---------------------------------------------------------------------------------- loops and threads


def test_it_works_where_a_loop_runs_already_as_in_a_notebook(gateway, client):
    async def cell():
        results = client.run([request(id=name) for name in "ab"])
        streamed = [rollout.id for rollout in client.stream(["a", "b"])]
        return [rollout.id for rollout in results], streamed

    assert asyncio.run(cell()) == (["a", "b"], ["a", "b"])


def test_calls_of_several_threads_go_on_at_once(gateway, client):
    gateway.finish_at_once = False
    names = [f"r{k}" for k in range(8)]
    client.submit([request(id=name) for name in names])
    with ThreadPoolExecutor(len(names)) as threads:
        waits = [threads.submit(client.wait, name, timeout=240) for name in names]
        assert client.status()["version"] == "x", "who waits keeps nobody up"
        for name in names:
            gateway.finish(name)
        assert [wait.result().id for wait in waits] == names


def test_iterators_of_several_threads_do_not_mix(gateway, client):
    names = [[f"{prefix}{k:02}" for k in range(20)] for prefix in "xyz"]

    def read(ids: list[str]) -> list[str]:
        requests = iter([request(id=name) for name in ids])
        return sorted(rollout.id for rollout in client.rollouts(requests, in_flight=3))

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(read, names, timeout=240)) == names


GIVEN = {
    "submit": lambda client, asked: client.submit(Counted(asked)),
    "run": lambda client, asked: client.run(request(id=name) for name in asked()),
    "rollouts": lambda client, asked: [*client.rollouts((request(id=name) for name in asked()), in_flight=1)],
    "announce": lambda client, asked: [*client.rollouts(request(id="a"), announce=lambda _: [*asked()])],
    "expected": lambda client, asked: client.run(Counted(asked), progress=True),
    "stream": lambda client, asked: [*client.stream(asked())],
    "ack": lambda client, asked: client.ack(asked()),
    "cancel_many": lambda client, asked: client.cancel_many(asked()),
    "extend": lambda client, asked: client.batches.extend("b", (request(id=name) for name in asked())),
    "watch": lambda client, asked: [*client.batches.watch("b", lambda _: [*asked()])],
}


class Counted(list):
    """Requests with a length, so that a bar counts them first."""

    def __init__(self, asked) -> None:
        super().__init__([request(id="a")])
        self.asked = asked

    def __iter__(self):
        return (request(id=name) for name in self.asked())


@pytest.mark.parametrize("call", GIVEN)
def test_what_the_caller_gives_runs_in_its_own_thread_and_may_use_the_client(gateway, client, call):
    gateway.create(request(id="a"))
    threads = []

    def asked():
        threads.append(threading.current_thread())
        assert client.status()["version"] == "x"
        yield "a"

    GIVEN[call](client, asked)
    assert set(threads) == {threading.current_thread()}


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), StopIteration()])
@pytest.mark.parametrize("call", ["submit", "announce", "ack"])
def test_what_the_caller_s_code_raises_leaves_the_call_and_the_client_goes_on(gateway, client, call, error):
    class Asked:
        def __iter__(self):
            raise error

    # `announce` is called within a generator, which lets no StopIteration out: it becomes a RuntimeError.
    swapped = isinstance(error, StopIteration) and call == "announce"
    with pytest.raises(RuntimeError if swapped else type(error)):
        GIVEN[call](client, Asked)
    assert client.status()["version"] == "x"


def test_an_error_of_the_requests_reaches_the_caller(client):
    def source():
        yield request(id="a")
        raise KeyError("question")

    with pytest.raises(KeyError, match="question"):
        list(client.rollouts(source(), in_flight=1))


def test_its_thread_begins_with_the_first_call_and_ends_with_the_client(gateway):
    before = len(loops())
    with Client(gateway.url) as client:
        assert len(loops()) == before
        client.status()
        assert len(loops()) == before + 1
    with pytest.raises(RuntimeError, match="the client was closed; make another one"):
        client.status()
    dropped = Client(gateway.url)
    dropped.status()
    del dropped
    wait_until(lambda: len(loops()) == before, 10, "its thread to end")


def test_closing_ends_what_other_threads_wait_for(gateway):
    gateway.finish_at_once = False
    client = Client(gateway.url)
    client.submit(request(id="a"))
    stream = client.stream(timeout=240)
    with ThreadPoolExecutor(2) as threads:
        waits = threads.submit(client.wait, "a"), threads.submit(next, stream)
        asked = {("GET", "/v1/rollouts/a"), ("GET", "/v1/results")}
        wait_until(lambda: asked <= set(gateway.calls), 10, "both to wait")
        client.close()
        for wait in waits:
            with pytest.raises(RuntimeError, match="the client was closed during the call"):
                wait.result(10)


AT_EXIT = "import atexit\natexit.register(lambda: print(client.status()['version']))\n"


@pytest.mark.parametrize(
    "code",
    [
        "client.status()\nstream = client.stream(timeout=240)\nprint('x')",
        f"{AT_EXIT}client.status()",
        f"{AT_EXIT}pass",
    ],
)
def test_a_program_that_closes_nothing_ends_and_may_use_its_client_to_the_end(gateway, code):
    gateway.finish_at_once = False
    child = in_python(code, gateway.url)
    output, errors = child.communicate(timeout=240)
    assert (output, errors, child.returncode) == ("x\n", "", 0)


def test_a_call_that_meets_the_end_of_the_client_is_answered(gateway):
    """Either it was in time, or it says that the client was closed; none waits for ever."""
    for _ in range(20):
        client = Client(gateway.url)
        client.status()

        def ask(client=client) -> None:
            while True:
                client.status()

        with ThreadPoolExecutor(4) as threads:
            calls = [threads.submit(ask) for _ in range(4)]
            client.close()
            for call in calls:
                with pytest.raises(RuntimeError, match="the client was closed"):
                    call.result(10)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_loop_that_ended_by_itself_leaves_nobody_waiting_and_begins_anew(gateway, client):
    gateway.finish_at_once = False
    client.submit(request(id="a"))
    once_asked(gateway, ("GET", "/v1/rollouts/a"), lambda: client._loop.call_soon_threadsafe(sys.exit))
    with pytest.raises(RuntimeError, match="during the call"):
        client.wait("a", timeout=240)
    assert client.status()["version"] == "x"


@pytest.mark.parametrize("call", ["status", "close"])
def test_its_own_loop_cannot_wait_for_itself(gateway, client, call):
    client.status()

    async def use():
        getattr(client, call)()

    with pytest.raises(RuntimeError, match="its own event loop"):
        asyncio.run_coroutine_threadsafe(use(), client._loop).result(10)


def test_settings_of_the_client_can_be_changed(gateway, client):
    client.timeout, client.retry_for, client.base_url = 1.5, 0.1, "http://127.0.0.1:9"
    assert (client.timeout, client.retry_for, client.base_url) == (1.5, 0.1, "http://127.0.0.1:9")
    with pytest.raises(Unavailable, match=r"failed for 0\.1 s"):
        client.status()
    client.base_url = gateway.url
    assert client.status()["version"] == "x"


def test_an_answer_is_freed_without_the_garbage_collector(gateway, client):
    client.submit(request(id="a"))
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            client.get("a")
        assert not [thing for thing in gc.get_objects() if type(thing) is httpx.Response]
    finally:
        gc.enable()


# ---------------------------------------------------------------------------------- forks


def test_it_works_after_a_fork_in_parent_and_child(gateway, client):
    """With connections of their own: an answer must not go to the other's call."""
    client.submit([request(id=name) for name in "abc"])
    stream = client.stream(["a", "b", "c"])
    first = next(stream).id
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        outcome = b"?"
        try:
            outcome = ",".join(rollout.id for rollout in client.stream(["a", "b"])).encode()
            try:
                next(stream)
            except RuntimeError as error:
                outcome += f";{error}".encode()
            client.close()
        finally:
            os.write(writer, outcome)
            os._exit(0)
    assert [client.get(name).id for name in "abc" * 20] == [*"abc"] * 20
    assert [first, *(rollout.id for rollout in stream)] == ["a", "b", "c"]
    os.waitpid(child, 0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        assert pipe.read() == "a,b;the iterator belongs to a client that was closed, or to a parent process"


# ---------------------------------------------------------------------------------- Ctrl-C

WAITING = {
    "wait": "client.wait('a')",
    "stream": "list(client.stream(['a']))",
    "rollouts": "list(client.rollouts(client_requests()))",
    "run": "client.run(client_requests())",
}


@pytest.mark.parametrize("call", WAITING)
def test_ctrl_c_ends_a_call_and_the_client_goes_on(gateway, call):
    gateway.finish_at_once = False
    gateway.create(request(id="a"))
    code = (
        "from rollout import RolloutRequest\n"
        "def client_requests():\n"
        "    return [RolloutRequest(handler='calculator', id='b')]\n"
        f"try:\n    {WAITING[call]}\n"
        "except KeyboardInterrupt:\n    print(client.status()['version'])\n"
    )
    child = in_python(code, gateway.url)
    path = "/v1/rollouts/a" if call == "wait" else "/v1/results"
    # `rollouts` asks for the cursor first, and is not waiting yet.
    times = 1 if call == "wait" else 2
    wait_until(lambda: gateway.calls.count(("GET", path)) >= times, 120, "the call")
    child.send_signal(signal.SIGINT)
    began = time.monotonic()
    output, errors = child.communicate(timeout=240)
    assert (output, errors, child.returncode) == ("x\n", "", 0)
    assert time.monotonic() - began < LONG_POLL_S / 2, "it ends now, not when the long-poll does"


def test_what_ctrl_c_ended_is_not_under_way_any_more(gateway, client):
    gateway.finish_at_once = False
    client.submit(request(id="a"))
    gc.disable()  # an exception in a callback of its own is lost, and Hypothesis has put one there
    # A run that a shell put into the background was begun with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    once_asked(gateway, ("GET", "/v1/rollouts/a"), lambda: os.kill(os.getpid(), signal.SIGINT))
    try:
        with pytest.raises(KeyboardInterrupt):
            client.wait("a")
    finally:
        gc.enable()
        signal.signal(signal.SIGINT, before)
    wait_until(lambda: not asyncio.all_tasks(client._loop), 5, "the call to end")


# ---------------------------------------------------------------------------------- iterators


def test_an_iterator_that_is_left_lets_go_of_its_connection(gateway, client):
    """The service gives only so many streams."""
    client.submit([request(id=name) for name in "abc"])
    for rollout in client.stream(timeout=240):
        assert rollout.id == "a"
        break
    wait_until(lambda: not asyncio.all_tasks(client._loop), 5, "the call to end")
    assert client.status()["version"] == "x"
