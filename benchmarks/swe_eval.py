"""What EVAL of a SWE instance costs over its tests, and whether its grading agrees with the official one.

ours      EVAL of the gold patch: a fresh sandbox from a pool that is full, patch, tests, recorder, grading,
          and another sandbox for the run whose tests must fail
by hand   the same tests on the same patched tree, typed into a sandbox of the same image: from the call to
          their output

They take turns, instance by instance; the overhead is the median of the differences of a turn. Then other
patches, that are empty, change nothing that matters, or do not apply: the share of all on which `resolved` is
what `swebench.harness.grading` says of the same log.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import structlog

from benchmarks._harness import report, summary
from benchmarks._latency import end_in_order_on_sigterm, private_directory, say
from sandbox.client import SandboxClient
from sandbox.host_client import HostClient
from sandbox.spec import SandboxSpec
from tests.helpers.swe_agents import LIMITS, Result, judge_many, official_report
from tests.helpers.swe_instances import instances
from workers.handlers.swe.rows import files_of

WARM = 2
POOL_S = 120.0


async def pool_is_full(host: HostClient) -> None:
    """Wait until as many sandboxes are ready as the host keeps."""
    async with asyncio.timeout(POOL_S):
        while (await host.stats()).get("warm", 0) < WARM:
            await asyncio.sleep(0.05)


class ByHand:
    """A sandbox with the patched tree of one instance, to type its tests into."""

    def __init__(self, host: HostClient, row: dict[str, Any]) -> None:
        self._host, self._row = host, row

    async def __aenter__(self) -> ByHand:
        row, spec = self._row, self._row["spec"]
        self._info = await self._host.start(SandboxSpec(image=row["image"], owner="by hand"))
        self._client = SandboxClient(self._info.socket)
        await self._client.write_file("/tmp/fix.diff", row["patch"])
        await self._client.write_file("/tmp/tests.diff", row["test_patch"])
        done = await self._client.bash(
            f"cd {spec['repo_dir']} && git checkout -q {row['base_commit']} && {spec['setup'][0]} &&"
            " git apply /tmp/fix.diff && git apply /tmp/tests.diff",
            timeout=120,
        )
        assert done.exit_code == 0, done.output
        return self

    async def seconds(self) -> float:
        """Of one run of the tests."""
        files = " ".join(name for name in files_of(self._row["test_patch"]) if name.endswith(".py"))
        began = time.monotonic()
        done = await self._client.bash(
            f"{self._row['spec']['test_cmd']} {files} </dev/null | cat", timeout=300
        )
        took = time.monotonic() - began
        assert " passed" in done.output and " failed" not in done.output, done.output[-1000:]
        return took

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()
        await self._host.release(self._info.id)


async def overheads(row: dict[str, Any], rounds: int, host: HostClient) -> list[dict[str, float]]:
    """Seconds of each turn: `ours`, `tests` (of ours, as the handler measured them) and `by_hand`."""
    turns = []
    async with ByHand(host, row) as hand:
        await hand.seconds()  # once without being counted: files come into memory
        for _ in range(rounds):
            await pool_is_full(host)
            (result,) = await judge_many([(row, row["patch"])])
            assert result.reward == 1.0, result.report
            by_hand = await hand.seconds()
            seconds = result.report["seconds"]
            turns.append({"ours": seconds["total"], "tests": seconds["tests"], "by_hand": by_hand})
    return turns


def others(row: dict[str, Any]) -> list[str]:
    """Patches that do not fix the instance."""
    new = "diff --git a/{0} b/{0}\nnew file mode 100644\n--- /dev/null\n+++ b/{0}\n@@ -0,0 +1 @@\n+{1}\n"
    sources = [name for name in files_of(row["patch"]) if name.endswith(".py")]
    gone = "--- a/{0}\n+++ b/{0}\n@@ -1 +1 @@\n-no such line\n+none\n"
    return ["", new.format("unrelated.txt", "text"), gone.format(sources[0])]


def agrees(row: dict[str, Any], result: Result) -> bool:
    """Whether the official grading of the same log comes to the same result."""
    with tempfile.TemporaryDirectory() as directory:
        official = official_report(row, result.patch, result.log, Path(directory) / "log")
    same_tests = (
        not result.report["tests_status"] or result.report["tests_status"] == official["tests_status"]
    )
    return same_tests and official["resolved"] is result.report["resolved"]


async def measure(rows: list[dict[str, Any]], rounds: int) -> tuple[list[dict[str, float]], list[bool]]:
    """Turns of all instances, and whether the grading of each patch agrees."""
    host = HostClient()
    turns, agreeing = [], []
    try:
        # What a worker does once: start a process that grades.
        await judge_many([(rows[0], rows[0]["patch"])])
        for row in rows:
            say(f"{row['instance_id']}: {rounds} turns")
            turns += await overheads(row, rounds, host)
            patches = [row["patch"], *others(row)]
            results = await judge_many([(row, patch) for patch in patches], LIMITS)
            assert [result.reward for result in results] == [1.0, 0.0, 0.0, 0.0]
            agreeing += [agrees(row, result) for result in results]
    finally:
        await host.stop()
    return turns, agreeing


def main() -> None:
    """Run, and print the result line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7, help="turns of each instance")
    parser.add_argument("--count", type=int, default=0, help="not used here; all benchmarks take it")
    rounds = parser.parse_args().rounds
    end_in_order_on_sigterm()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    with private_directory() as directory:
        directory.chmod(0o711)
        os.environ["ROLLOUT_SANDBOX_DIR"] = str(directory / "state")
        os.environ["ROLLOUT_SANDBOX_WARM"] = str(WARM)
        turns, agreeing = asyncio.run(measure(instances(), rounds))
    differences = [turn["ours"] - turn["by_hand"] for turn in turns]
    spread = summary(differences)
    report(
        "swe_eval",
        {"eval_overhead_s": spread["median"], "resolved_agreement": sum(agreeing) / len(agreeing)},
        overhead_s=spread,
        ours_s=summary([turn["ours"] for turn in turns]),
        tests_of_ours_s=summary([turn["tests"] for turn in turns]),
        by_hand_s=summary([turn["by_hand"] for turn in turns]),
        instances=len(instances()),
        patches=len(agreeing),
        rounds=rounds,
    )


if __name__ == "__main__":
    main()
