"""Twenty tasks made from real packages: the solution of each earns 1, and doing nothing earns 0."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.long_forms import TASKS
from tests.helpers.package_tasks import BROKEN, write_all

CHECKED = TASKS("packages that are checked, of those that are written", short=6, long=len(BROKEN))


def test_real_packages_are_mended_by_their_solutions_and_not_by_doing_nothing(checked, tmp_path: Path):
    write_all(tmp_path / "packages")
    handler = ("--handler", "workers.handlers.harbor:Harbor")
    options = ("--repeat", "1", "--all", "--sample", str(CHECKED))
    result, report = checked(tmp_path / "packages", *handler, *options)
    assert len(BROKEN) == 20 and report["verdicts"] == {"ok": CHECKED}, result.output
    assert {tuple(task["oracle"]) for task in report["tasks"]} == {(1.0,)}
    assert {reward for task in report["tasks"] for reward in task["nop"]} == {0.0}
    assert all(task["searched"]["files"] for task in report["tasks"]) and result.exit_code == 0
