"""Programs that ask most of the kernel run behind the filter of system calls, in the image that
`deploy/setup/programs.sh` makes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from sandbox.errors import ImageError
from sandbox.images import ImageStore
from sandbox.spec import Limits
from tests.helpers.blocking import SyncHostClient, SyncSandboxClient, sandbox_of
from tests.sandbox.conftest import why_not

PATIENCE_S = 120.0


@pytest.fixture(scope="module", params=["apptainer", "bubblewrap"])
def client(request, shared_state) -> Iterator[SyncSandboxClient]:
    """A sandbox with the programs."""
    if reason := why_not(request.param):
        pytest.skip(reason)
    try:
        ImageStore().find("programs")
    except ImageError as error:
        pytest.skip(f"{error} (run deploy/setup/programs.sh)")
    host, limits = SyncHostClient(shared_state), Limits(memory_mb=6000, processes=1000)
    with sandbox_of(host, image="programs", runtime=request.param, limits=limits) as (_, client):
        yield client


def run(client: SyncSandboxClient, command: str) -> str:
    """Its output; it has to succeed."""
    result = client.bash(command, PATIENCE_S)
    assert result.exit_code == 0, result.output
    return result.output


PROGRAM = r"""
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
static int answer;
void *work(void *given) { answer += *(int *)given; return NULL; }
int main(int count, char **words) {
    pthread_t thread;
    int *number = malloc(sizeof *number);
    *number = 42;
    pthread_create(&thread, NULL, work, number);
    pthread_join(thread, NULL);
    printf("answer %d\n", answer);
    if (count > 1) number = NULL; else free(number);
    return 0;
}
"""


@pytest.fixture(scope="module")
def program(client) -> str:
    """A C program with a thread, and with a leak if it gets an argument."""
    client.write_file("/workspace/program.c", PROGRAM)
    run(client, "cd /workspace && gcc -g -O0 -pthread program.c -o program")
    return "/workspace/program"


def test_gdb_stops_a_program_and_looks_into_it(client, program):
    steps = " ".join(
        f"-ex '{step}'" for step in ("break work", "run", "bt", "print *(int *)given", "continue")
    )
    output = run(client, f"gdb -batch {steps} {program} </dev/null")
    assert "Breakpoint 1, work" in output
    assert "$1 = 42" in output
    assert "answer 42" in output
    assert "Error disabling address space randomization" not in output


def test_gdb_attaches_to_a_process_of_the_agents(client):
    output = run(client, "sleep 100 & gdb -batch -p $! -ex 'info inferiors' </dev/null; kill $!")
    assert "process" in output and "Operation not permitted" not in output


def test_strace_shows_the_calls_of_a_program(client):
    assert "execve(" in run(client, "strace -f -o /dev/stdout -e trace=execve sh -c true")


def test_the_leak_sanitizer_finds_a_leak(client, program):
    run(client, f"cd /workspace && gcc -g -O0 -pthread -fsanitize=leak {program}.c -o leaky && ./leaky")
    result = client.bash("cd /workspace && ./leaky leak", PATIENCE_S)
    assert result.exit_code == 23, result.output
    assert "detected memory leaks" in result.output


JAVA = """
import java.util.stream.*;
public class Main {
    public static void main(String[] words) throws Exception {
        long sum = LongStream.rangeClosed(1, 2_000_000).parallel().boxed().mapToLong(x -> x).sum();
        Process child = new ProcessBuilder("echo", "child").inheritIO().start();
        System.out.println(child.waitFor() + " " + sum + " " + Runtime.getRuntime().availableProcessors());
    }
}
"""


@pytest.mark.parametrize("collector", ["SerialGC", "ParallelGC", "G1GC"])
def test_a_jvm_compiles_runs_threads_and_children(client, collector):
    client.write_file("/workspace/Main.java", JAVA)
    java = "$(ls /usr/lib/jvm/java-*/bin/java | head -1)"
    output = run(client, f"cd /workspace && {java} -XX:+Use{collector} -Xmx512m Main.java")
    assert output == f"child\n0 2000001000000 {len(os.sched_getaffinity(0))}\n"


NODE = """
const { Worker, isMainThread, parentPort } = require("worker_threads");
if (!isMainThread) { parentPort.postMessage(6 * 7); } else {
  const { execFileSync } = require("child_process");
  const fs = require("fs/promises"), http = require("http");
  const worker = new Worker(__filename);
  worker.on("message", async (answer) => {
    await fs.writeFile("file", String(answer));
    const server = http.createServer((request, reply) => reply.end("served"));
    server.listen(0, "localhost", () => {
      const address = { port: server.address().port, host: "localhost" };
      http.get(address, (reply) => reply.on("data", async (data) => {
        const child = String(execFileSync("echo", ["child"])).trim();
        console.log(await fs.readFile("file", "utf8"), String(data), child);
        process.exit(0);
      }));
    });
  });
}
"""


def test_node_runs_workers_files_a_server_and_children(client):
    client.write_file("/workspace/main.js", NODE)
    assert run(client, "cd /workspace && node main.js") == "42 served child\n"


GO = """
package main
import ("fmt"; "net"; "os/exec"; "runtime"; "sync")
func main() {
    var group sync.WaitGroup
    sums := make(chan int, 100)
    for n := 0; n < 100; n++ { group.Add(1); go func(n int) { defer group.Done(); sums <- n }(n) }
    group.Wait(); close(sums)
    total := 0
    for n := range sums { total += n }
    listener, err := net.Listen("tcp", "localhost:0")
    if err != nil { panic(err) }
    go func() { peer, _ := listener.Accept(); peer.Write([]byte("served")); peer.Close() }()
    peer, err := net.Dial("tcp", listener.Addr().String())
    if err != nil { panic(err) }
    text := make([]byte, 6)
    peer.Read(text)
    out, _ := exec.Command("echo", "child").Output()
    fmt.Println(total, string(text), string(out[:5]), runtime.NumCPU())
}
"""


def test_go_compiles_and_runs_routines_sockets_and_children(client):
    client.write_file("/workspace/main.go", GO)
    output = run(client, "cd /workspace && CGO_ENABLED=0 go run main.go")
    assert output == f"4950 served child {len(os.sched_getaffinity(0))}\n"


def test_pytest_runs_tests_in_several_processes(client):
    client.write_file(
        "/workspace/suite/test_it.py", "def test_a(): pass\ndef test_b(): pass\ndef test_c(): pass"
    )
    output = run(client, "cd /workspace/suite && python3 -m pytest -n 3 -q -p no:cacheprovider")
    assert "3 passed" in output


def test_what_asks_for_the_machines_processors_is_told(client):
    count = len(os.sched_getaffinity(0))
    assert run(client, "nproc") == f"{count}\n"
    assert "On-line CPU(s) list" in run(client, "lscpu")
    assert run(client, "python3 -c 'import os; print(os.cpu_count())'") == f"{os.cpu_count()}\n"


def test_localhost_has_its_name_and_address(client):
    assert "127.0.0.1" in run(client, "getent ahosts localhost")
