"""Runs a solution on the inputs of hidden tests, inside a sandbox. Standard library, Python 3.7 or newer.

    python3 runner.py JOB RESULTS

JOB (JSON): `solution` (path), `fn_name` or null, `time_limit_s`, `memory_limit_mb`, `output_limit` (bytes),
`most_timeouts`, `inputs` (a text for standard input, or a list of arguments). RESULTS gets a JSON object a
line, one for each input: `status` (ok, error, timeout, output, skipped), `stdout` or `value`, `stderr`,
`seconds`. What is expected is not here: nothing that the solution does can make a wrong answer right.
"""

import contextlib
import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time

CALL = r"""
import json, os, sys
out = os.fdopen(int(sys.argv[3]), "w")
with open(sys.argv[4]) as given:
    args = json.load(given)
scope = {"__name__": "solution", "__file__": sys.argv[1]}
with open(sys.argv[1]) as source:
    exec(compile(source.read(), sys.argv[1], "exec"), scope)
name = sys.argv[2]
function = scope.get(name)
if function is None and "Solution" in scope:
    function = getattr(scope["Solution"](), name)
if function is None:
    sys.exit("the solution defines no %s" % name)
value = function(*args)
json.dump(value, out, default=lambda one: sorted(one) if isinstance(one, (set, frozenset)) else repr(one))
out.flush()
os._exit(0)
"""
PR_SET_CHILD_SUBREAPER = 36
STDERR_KEPT = 2000


def main():
    print("runner ready", flush=True)
    # What a solution leaves running becomes our child, and is ended before the next case.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with open(sys.argv[1]) as file:
        job = json.load(file)
    timeouts = 0
    with open(sys.argv[2], "w") as results:
        for given in job["inputs"]:
            if timeouts >= job["most_timeouts"]:
                result = {"status": "skipped", "seconds": 0.0}
            else:
                result = run(job, given)
            timeouts += result["status"] == "timeout"
            results.write(json.dumps(result) + "\n")
            results.flush()


def limits(job):
    memory = job["memory_limit_mb"] << 20
    seconds = int(job["time_limit_s"]) + 2
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    # Output goes to files, so that a flood of it ends at the limit by itself.
    resource.setrlimit(resource.RLIMIT_FSIZE, (job["output_limit"], job["output_limit"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def run(job, given):
    """One case: the solution, or a call of its function, in a process of its own."""
    call = job["fn_name"] is not None
    with contextlib.ExitStack() as files:
        stdin, stdout, stderr, value = [files.enter_context(tempfile.TemporaryFile()) for _ in range(4)]
        if call:
            arguments = files.enter_context(tempfile.NamedTemporaryFile("w", suffix=".json"))
            json.dump(given, arguments)
            arguments.flush()
            target = [job["solution"], job["fn_name"], str(value.fileno()), arguments.name]
            command = [sys.executable, "-c", CALL] + target
        else:
            stdin.write(given.encode("utf-8", "replace"))
            stdin.seek(0)
            command = [sys.executable, job["solution"]]
        began = time.monotonic()
        try:
            child = subprocess.Popen(
                command,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=[value.fileno()] if call else [],
                preexec_fn=lambda: limits(job),
                start_new_session=True,
            )
        except (OSError, subprocess.SubprocessError) as error:
            return {"status": "error", "stderr": "cannot start: %s" % error, "seconds": 0.0}
        try:
            child.wait(job["time_limit_s"])
            status = "ok" if child.returncode == 0 else "error"
        except subprocess.TimeoutExpired:
            status = "timeout"
        seconds = time.monotonic() - began
        end_all(child)
        result = {"status": status, "seconds": round(seconds, 3), "stderr": tail(stderr)}
        if os.fstat(stdout.fileno()).st_size >= job["output_limit"]:
            result["status"] = "output"
        if result["status"] == "ok":
            answer = value if call else stdout
            answer.seek(0)
            text = answer.read().decode("utf-8", "replace")
            try:
                result["value" if call else "stdout"] = json.loads(text) if call else text
            except ValueError:
                result.update(status="error", stderr="the function gave no result, or none that JSON carries")
        return result


def end_all(child):
    """End the solution and all it started: first its session, then what moved away and became our child."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    child.wait()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        left = children()
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.005)


def children():
    """Our own children, adopted ones included."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open("/proc/%s/stat" % name) as stat:
                    if int(stat.read().rpartition(")")[2].split()[1]) == os.getpid():
                        found.append(int(name))
            except (OSError, ValueError, IndexError):
                pass
    return found


def tail(file):
    size = os.fstat(file.fileno()).st_size
    file.seek(max(0, size - STDERR_KEPT))
    return file.read().decode("utf-8", "replace")


if __name__ == "__main__":
    main()
