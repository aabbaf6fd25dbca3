"""What EVAL of a SWE instance costs over its tests, and whether `resolved` is what pytest by hand comes to.

ours      EVAL of the gold patch: a fresh sandbox from a pool that is full, patch, tests, recorder, grading,
          and another sandbox for the run whose tests must fail
by hand   nothing of the service: `apptainer exec` of the instance's image directory, `git apply` of both
          patches, pytest with `--junitxml`; the seconds are those of pytest alone

They take turns, instance by instance; overhead and ratio are medians of a turn's. By hand an instance is
resolved where that XML has passed all of FAIL_TO_PASS and PASS_TO_PASS. The short form takes one instance,
and of its patches the right one, none, and one that does not apply.
`patch_20k_files_s` is how long RUN takes for the patch of an agent that changed one file of 20,000, with a
warm sandbox to compare in; of 2,000 in the short form.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import structlog

from benchmarks import harness
from sandbox.host_client import HostClient
from tests.helpers import swe_toy
from tests.helpers.swe_agents import LIMITS, judge_many, roll_many
from tests.helpers.swe_instances import instances
from workers.handlers.swe.rows import files_of

Turn = dict[str, float]

WARM = 2
SHORT_INSTANCES = 1
FILES, SHORT_FILES = 20_000, 2_000
FIX = "sed -i 's/ + x + 1/ + x/' calc.py"

UNRELATED = "--- /dev/null\n+++ b/new.txt\n@@ -0,0 +1 @@\n+x\n"
NOT_APPLYING = "--- a/{0}\n+++ b/{0}\n@@ -1 +1 @@\n-no such line\n+none\n"

SCRIPT = """
cd {repo_dir} && git checkout -q {base_commit} && {setup} || exit 1
{apply_fix}
git apply --whitespace=nowarn <<'END_OF_DIFF' || exit 1
{test_patch}
END_OF_DIFF
began=$EPOCHREALTIME
{test_cmd} --junitxml=/tmp/junit.xml -o junit_family=xunit1 {files} </dev/null >/tmp/log 2>&1
echo $began $EPOCHREALTIME
cat /tmp/junit.xml
"""
APPLY = """
git apply 2>/dev/null <<'END_OF_DIFF' || {{ echo 0 0; exit 0; }}
{patch}
END_OF_DIFF
"""


class ByHand:
    """Plain Apptainer on the image of one instance."""

    def __init__(self, row: dict[str, Any], directory: Path):
        """`directory`: new, becomes Apptainer's home."""
        self._row = row
        self._apptainer = harness.PlainApptainer(directory, Path(row["image"]))

    def judge(self, patch: str) -> tuple[bool, float]:
        """(whether the patch resolves the instance, seconds of pytest). Raises RuntimeError."""
        row = self._row
        script = SCRIPT.format(
            repo_dir=row["spec"]["repo_dir"],
            base_commit=row["base_commit"],
            setup=row["spec"]["setup"][0],
            apply_fix=APPLY.format(patch=patch.rstrip("\n")) if patch else "",
            test_patch=row["test_patch"].rstrip("\n"),
            test_cmd=row["spec"]["test_cmd"],
            files=" ".join(name for name in files_of(row["test_patch"]) if name.endswith(".py")),
        )
        times, _, xml = self._apptainer.run("exec bash", script).partition("\n")
        began, ended = map(float, times.split())
        specified = {*json.loads(row["FAIL_TO_PASS"]), *json.loads(row["PASS_TO_PASS"])}
        return bool(xml) and specified <= passed_tests(xml), ended - began


def passed_tests(xml: str) -> set[str]:
    """Names, up to a space as data sets have them, of tests that passed in all their cases."""
    outcomes: dict[str, bool] = {}
    for case in ElementTree.fromstring(xml).iter("testcase"):
        module = case.get("file", "").removesuffix(".py").replace("/", ".")
        classes = case.get("classname", "").removeprefix(module).strip(".")
        name = "::".join(filter(None, [case.get("file"), *classes.split("."), case.get("name")])).split()[0]
        passed = not any(child.tag in ("failure", "error", "skipped") for child in case)
        outcomes[name] = outcomes.get(name, True) and passed
    return {name for name, passed in outcomes.items() if passed}


def patches_of(row: dict[str, Any]) -> list[str]:
    """The gold patch first; whether its first hunk alone resolves the instance both sides find out."""
    gold = row["patch"]
    starts = [match.start() for match in re.finditer(r"^(?:@@ |diff --git )", gold, re.MULTILINE)]
    source = next(name for name in files_of(gold) if name.endswith(".py"))
    return [gold, gold[: [*starts, None, None][2]], "", UNRELATED, NOT_APPLYING.format(source)]


async def time_turns(row: dict[str, Any], hand: ByHand, rounds: int, host: HostClient) -> list[Turn]:
    """Seconds of each turn: `ours`, `tests` (of ours, as the handler measured them) and `by_hand`."""
    turns = []
    hand.judge(row["patch"])  # once without being counted: files come into memory
    for _ in range(rounds):
        await harness.pool_is_full(host, WARM)
        (result,) = await judge_many([(row, row["patch"])])
        await harness.pool_is_full(host, WARM)
        resolved, by_hand = hand.judge(row["patch"])
        assert result.reward == 1.0 and resolved, result.report
        seconds = result.report["seconds"]
        turns.append({"ours": seconds["total"], "tests": seconds["tests"], "by_hand": by_hand})
    return turns


async def measure(
    rows: list[Any], rounds: int, directory: Path, host: HostClient
) -> tuple[list[Turn], list[tuple]]:
    """(turns of all instances, whether each patch resolves: by the service, by hand)."""
    turns, verdicts = [], []
    await judge_many([(rows[0], rows[0]["patch"])])  # as a worker does once: start a process that grades
    step = 2 if rounds == 1 else 1
    for number, row in enumerate(rows):
        harness.say(f"{row['instance_id']}: {rounds} turns")
        hand = ByHand(row, directory / f"home-{number}")
        turns += await time_turns(row, hand, rounds, host)
        patches = patches_of(row)[::step]
        results = await judge_many([(row, patch) for patch in patches], limits=LIMITS)
        for patch, result in zip(patches, results, strict=True):
            verdicts.append((result.report["resolved"], hand.judge(patch)[0]))
        harness.say(f"resolved by ours, by hand: {verdicts[-len(patches) :]}")
    return turns, verdicts


async def time_patches(row: dict[str, Any], rounds: int, host: HostClient) -> list[float]:
    """Seconds of each patch; the first, which brings files into memory, is not counted."""
    seconds = []
    for _ in range(rounds + 1):
        (result,) = await roll_many([(row, [FIX])])
        assert result.reward == 1.0, (result.report, result.rollout.error)
        seconds.append(result.rollout.metrics["patch_s"])
        await harness.pool_is_full(host, WARM)
    return seconds[1:]


def main(options: harness.Options) -> harness.Report:
    """Run, and print the result line."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    rows = instances()[: SHORT_INSTANCES if options.rounds == 1 else None]
    large = swe_toy.large_instance(SHORT_FILES if options.rounds == 1 else FILES)
    roots = os.environ["ROLLOUT_SANDBOX_IMAGE_ROOTS"], str(Path(large["image"]).parent)
    os.environ["ROLLOUT_SANDBOX_IMAGE_ROOTS"] = os.pathsep.join(roots)
    with harness.private_directory() as directory, harness.private_host(directory / "state", WARM) as host:
        os.environ["ROLLOUT_SANDBOX_DIR"] = str(host.state)
        turns, verdicts = asyncio.run(measure(rows, options.rounds, directory, host))
        harness.say("patches of a large repository")
        patch = harness.summary(asyncio.run(time_patches(large, options.rounds, host)))
    overhead = harness.summary(turn["ours"] - turn["by_hand"] for turn in turns)
    ratio = harness.summary(turn["ours"] / turn["by_hand"] for turn in turns)
    return {
        "results": {
            "resolved_agreement": sum(ours is by_hand for ours, by_hand in verdicts) / len(verdicts),
            "eval_ratio_to_tests_by_hand": ratio["median"],
            "eval_overhead_s": overhead["median"],
            "patch_20k_files_s": patch["median"],
        },
        "patch_s": patch,
        "overhead_s": overhead,
        "ratio": ratio,
        "seconds": harness.summaries(turns),
        "verdicts": {"both": verdicts.count((True, True)), "neither": verdicts.count((False, False))},
        "instances": len(rows),
        "patches": len(verdicts),
    }


if __name__ == "__main__":
    harness.run(main, count=0, rounds=7)
