"""`rollout tasks`: the datasets that are known, and imported ones, whose names stand for their files."""

from __future__ import annotations

import json
import shutil
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from rollout.cli import main
from rollout.cli.tasks import Tasks
from rollout.datasets import Row, load_map
from rollout.suites import SuiteError
from rollout.suites.catalogue import catalogue
from rollout.suites.imported import Imported, home, imported, named, place, writing
from services.settings import Settings
from tests.helpers.harbor_tasks import write_task
from workers.handlers.registry import Registry

ROWS = [{"q": "1 plus 2", "a": "3"}, {"q": "2 plus 2", "a": "4"}]
MAP = {"handler": "calculator", "fields": {"question": "q", "answer": "a", "hint": "h?"}}


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUT_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("ROLLOUT_IMAGES", raising=False)


def call(*arguments: object) -> Result:
    result = CliRunner().invoke(main, ["tasks", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.fixture
def rows(tmp_path: Path) -> tuple[Path, Path]:
    """A file of rows, and a map of them."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "map.json").write_text(json.dumps(MAP))
    return tmp_path / "rows.jsonl", tmp_path / "map.json"


def test_rows_are_imported_through_their_map_and_read_by_name(rows):
    file, field_map = rows
    done = call("import", file, "--name", "sums", "--map", field_map, "--no-check")
    assert done.exit_code == 0 and "sums: 2 tasks of calculator" in done.stderr, done.output
    file.unlink()
    tasks = [request.task for request in Tasks("sums")]
    assert tasks == [{"question": "1 plus 2", "answer": "3"}, {"question": "2 plus 2", "answer": "4"}]
    assert Tasks("sums").handler == "calculator" and Tasks("sums", "math").handler == "math"
    read = call("convert", "sums", "--no-check")
    assert read.exit_code == 0 and "2 tasks read, 0 do not" in read.stderr
    dataset = named("sums")
    assert dataset is not None and dataset.sample == tasks[0] and dataset.source == str(file)


def test_a_name_is_taken_once_and_a_path_goes_before_it(rows, tmp_path, monkeypatch):
    file, field_map = rows
    options = ("--name", "sums", "--map", field_map, "--no-check")
    call("import", file, *options)
    refused = call("import", file, *options, "--first", "1")
    assert refused.exit_code == 1 and "sums is imported already: --replace" in refused.stderr
    assert call("import", file, *options, "--first", "1", "--replace").exit_code == 0
    assert [dataset.tasks for dataset in imported()] == [1]
    wrong = call("import", file, "--name", "../sums", "--map", field_map, "--no-check")
    assert wrong.exit_code == 1 and "is no name" in wrong.stderr
    monkeypatch.chdir(tmp_path)
    Path("sums").write_text('{"handler": "noop", "task": {}}\n')
    assert [request.handler for request in Tasks("sums")] == ["noop"]


def test_nothing_is_imported_of_a_set_that_cannot_be_read_to_its_end(rows):
    file, field_map = rows
    file.write_text(file.read_text() + "{\n")
    done = call("import", file, "--name", "sums", "--map", field_map, "--no-check")
    assert done.exit_code == 1 and "rows.jsonl, line 3" in done.stderr
    assert not imported() and not list(home().iterdir())
    file.write_text("")
    empty = call("import", file, "--name", "sums", "--handler", "calculator", "--no-check")
    assert empty.exit_code == 1 and "0 tasks read, 0 do not: nothing is imported" in empty.stderr
    none = call("import", file, "--name", "sums", "--no-check")
    assert none.exit_code == 2 and "give --handler" in none.stderr


def test_directories_are_imported_as_their_bundles_have_them(tmp_path):
    first = write_task(tmp_path / "set" / "a", 'version = "1.0"\n[task]\nname = "org/a"\n')
    write_task(tmp_path / "set" / "deep" / "b", '[environment]\ndocker_image = "ubuntu:24.04"\n')
    before = [row.data for row, _ in Tasks(str(tmp_path / "set")).rows()]
    done = call("import", tmp_path / "set", "--name", "mine", "--no-check")
    assert done.exit_code == 0 and "mine: 2 tasks of harbor" in done.stderr, done.output
    assert "of 2 images are not in" in done.stderr and "ubuntu" in done.stderr
    assert f"rollout images build --dataset {place(named('mine'))} --reader harbor" in done.stderr
    shutil.rmtree(tmp_path / "set")
    assert not first.exists()
    assert [row.data["bundle"] for row, _ in Tasks("mine").rows()] == [data["bundle"] for data in before]


def test_the_images_that_are_missing_are_made_where_that_is_asked_for(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("ROLLOUT_IMAGES", str(tmp_path / "images"))
    dockerfile = {
        "environment/Dockerfile": "FROM scratch\nCOPY hello /hello\n",
        "environment/hello": "hello\n",
    }
    write_task(tmp_path / "set" / "a", files=dockerfile)
    done = call("import", tmp_path / "set", "--name", "mine", "--no-check", "--images")
    assert done.exit_code == 0 and "1 of 1 images are not in" in done.stderr
    assert "1 built, 0 there already, 0 failed" in capfd.readouterr().out
    again = call("import", tmp_path / "set", "--name", "mine", "--no-check", "--images", "--replace")
    assert again.exit_code == 0 and "images are not in" not in again.stderr


def test_known_and_imported_sets_are_listed_and_shown(rows):
    file, field_map = rows
    call("import", file, "--name", "sums", "--map", field_map, "--no-check")
    listed = call("list")
    assert listed.exit_code == 0
    lines = listed.stdout.splitlines()
    assert lines[1].split()[:4] == ["sums", "calculator", "imported", "2"]
    assert len(lines) == 2 + len(catalogue())
    value = json.loads(call("list", "--json").stdout)
    assert [entry["name"] for entry in value["imported"]] == ["sums"]
    shown = call("show", "deepscaler").stdout
    assert "--map deepscaler" in shown and "licence: MIT" in shown and "rollout tasks import DIR" in shown
    assert '{"question": "1 plus 2", "answer": "3"}' in call("show", "sums").stdout
    assert json.loads(call("show", "sums", "--json").stdout)["known"] is None
    unknown = call("show", "nonsense")
    assert unknown.exit_code == 1 and "apps" in unknown.stderr and "sums" in unknown.stderr


@pytest.mark.parametrize("known", catalogue(), ids=lambda known: known.name)
def test_the_row_of_each_known_set_makes_a_task_of_its_handler(known):
    handler = Registry(Settings()).get(known.handler)
    row = Row(1, known.name, known.sample)
    task: dict[str, Any] = load_map(known.map).apply(row) if known.map else dict(known.sample)
    handler.check_task(task)
    assert known.get and known.licence and known.checked


def test_a_light_install_lists_the_check_and_says_what_it_needs(monkeypatch):
    absent = EntryPoint("check", "rollout_absent.commands:check", "rollout.commands.tasks")
    points = {"rollout.commands.tasks": [absent]}
    monkeypatch.setattr("rollout.cli.points.entry_points", lambda group: points.get(group, []))
    shown = call("--help").stdout
    assert "convert" in shown and "import" in shown and "Check that tasks can be solved" in shown
    refused = call("check", "rows.jsonl")
    assert refused.exit_code == 1
    assert "`rollout tasks check` needs the Python package 'rollout_absent': pip install" in refused.stderr


def test_what_is_half_written_is_no_dataset(tmp_path):
    with pytest.raises(ValueError, match="stop"), writing(Imported(name="x", handler="h", source="s")):
        raise ValueError("stop")
    assert not imported()
    (home() / "y").mkdir()
    (home() / "y" / "dataset.json").write_text("{")
    assert not imported()
    with (
        pytest.raises(SuiteError, match="is no name"),
        writing(Imported(name="a/b", handler="h", source="s")),
    ):
        pass
