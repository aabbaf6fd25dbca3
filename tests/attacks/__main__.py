"""`python -m tests.attacks`: every attack on every runtime, as a table; the last line is one JSON object.

Options go to pytest (`-k keyring`, `-n 4`).
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from tests.helpers.long_forms import ATTACKS

RUNTIMES = ("apptainer", "bubblewrap")


class Record:
    """Collects how each attack and each control ended."""

    def __init__(self):
        self.rows: list[dict] = []

    def pytest_runtest_logreport(self, report):
        """A test counts by its call, or by what kept it from being called."""
        attack = getattr(report, "attack", None)
        if attack and (report.when == "call" or report.outcome != "passed"):
            self.rows.append(attack | {"outcome": report.outcome})


def table(rows: list[dict]) -> Table:
    """One line an attack and place; controls are counted and not shown unless they failed."""
    shown = Table("attack", "runtime", "stopped by", "held", title="attacks")
    for row in sorted(rows, key=lambda row: (row["subject"], row["attack"], row["place"])):
        if row["control"] and row["outcome"] == "passed":
            continue
        held = {"passed": "held", "skipped": "skipped"}.get(row["outcome"], "NOT HELD")
        if row["control"]:
            held = f"control {row['outcome']}"
        shown.add_row(f"{row['subject']}: {row['attack']}", row["place"], row["stopped_by"], held)
    return shown


def results(rows: list[dict]) -> dict:
    """The counts. An attack is counted once; successes and skips once for each place."""
    attacks = [row for row in rows if not row["control"]]
    places = sorted({row["place"] for row in attacks})
    return {
        "attacks": len({(row["subject"], row["attack"]) for row in attacks}),
        "runtimes": [place for place in places if place in RUNTIMES],
        "succeeded": sum(row["outcome"] == "failed" for row in attacks),
        "controls_failed": sum(row["control"] and row["outcome"] != "passed" for row in rows),
        "skipped": sum(row["outcome"] == "skipped" for row in attacks),
        "tried": {
            place: dict(Counter(row["outcome"] for row in attacks if row["place"] == place))
            for place in places
        },
    }


def main() -> int:
    """Run them; 0 when every attack failed and every control succeeded."""
    os.environ[ATTACKS.variable] = "1"
    record = Record()
    here = str(Path(__file__).parent)
    status = pytest.main([here, "-q", "--no-header", *sys.argv[1:]], plugins=[record])
    Console(width=180).print(table(record.rows))
    counts = results(record.rows)
    print(json.dumps({"results": counts}))
    held = counts["attacks"] and not (counts["succeeded"] or counts["controls_failed"])
    return int(status) or int(not held)


if __name__ == "__main__":
    sys.exit(main())
