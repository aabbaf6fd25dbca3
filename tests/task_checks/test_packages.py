"""Twenty tasks made from real packages: the solution of each earns 1, and doing nothing earns 0."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.package_tasks import BROKEN, write_all


def test_real_packages_are_mended_by_their_solutions_and_not_by_doing_nothing(checked, tmp_path: Path):
    write_all(tmp_path / "packages")
    handler = ("--handler", "workers.handlers.harbor:Harbor")
    result, report = checked(tmp_path / "packages", *handler, "--repeat", "1", "--all")
    assert len(BROKEN) == 20 and report["verdicts"] == {"ok": 20}, result.output
    assert {tuple(task["oracle"]) for task in report["tasks"]} == {(1.0,)}
    assert {reward for task in report["tasks"] for reward in task["nop"]} == {0.0}
    assert all(task["searched"]["files"] for task in report["tasks"]) and result.exit_code == 0
