"""Tasks from files as datasets come: JSON lines, Parquet, Hugging Face datasets; named by row and field."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from rollout.datasets import DatasetError, FieldMap, Row, load_map, problem, published_maps, read, write_verl
from rollout.schema import RolloutRequest
from tests.helpers.lazy import Lazy

datasets, pyarrow, parquet = Lazy("datasets"), Lazy("pyarrow"), Lazy("pyarrow.parquet")

ROWS = [{"q": f"{i} plus 1", "meta": {"answer": str(i + 1)}, "chat": [{"content": "hi"}]} for i in range(5)]


def write(tmp_path, kind):
    path = tmp_path / kind
    if kind == "a.jsonl":
        path.write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")
    elif kind == "a.jsonl.gz":
        path.write_bytes(gzip.compress("\n".join(map(json.dumps, ROWS)).encode()))
    elif kind == "a.json":
        path.write_text(json.dumps(ROWS, indent=1))
    elif kind == "lines.json":
        path.write_text("\n".join(map(json.dumps, ROWS)))
    elif kind == "a.parquet":
        parquet.write_table(pyarrow.Table.from_pylist(ROWS), path, row_group_size=2)
    elif kind == "hub":
        (path / "data").mkdir(parents=True)
        for number, rows in enumerate((ROWS[:3], ROWS[3:])):
            file = path / "data" / f"train-0000{number}-of-00002.parquet"
            parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    elif kind == "saved":
        datasets.Dataset.from_list(ROWS).save_to_disk(path)
    elif kind == "dict":
        datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(path)
    return path


@pytest.mark.parametrize(
    "kind", ["a.jsonl", "a.jsonl.gz", "a.json", "lines.json", "a.parquet", "hub", "saved", "dict"]
)
def test_the_same_rows_come_from_every_kind_of_file(tmp_path, kind):
    path = write(tmp_path, kind)
    assert [(row.number, row.data) for row in read(path)] == list(enumerate(ROWS, 1))
    assert [row.data for row in read(path, skip=1, first=2)] == ROWS[1:3]


def test_parquet_is_read_row_by_row(tmp_path, monkeypatch):
    """The first rows of a large file come without the rest: the reader is asked for one batch."""
    rows = [{"q": "x" * 1000, "n": i} for i in range(5000)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=500)
    asked = []
    batches = parquet.ParquetFile.iter_batches

    def counted(self, size):
        for batch in batches(self, size):
            asked.append(batch.num_rows)
            yield batch

    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", counted)
    assert [row.data["n"] for row in read(tmp_path / "a.parquet", first=3)] == [0, 1, 2]
    assert len(asked) == 1 and asked[0] < 1000


def test_a_split_is_named_where_there_are_several(tmp_path):
    splits = {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:1])}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "d")
    assert len(list(read(tmp_path / "d", split="test"))) == 1
    with pytest.raises(DatasetError, match="has the splits train, test"):
        list(read(tmp_path / "d"))
    with pytest.raises(DatasetError, match="no split 'dev', only train, test"):
        list(read(tmp_path / "d", split="dev"))
    hub = write(tmp_path, "hub")
    assert len(list(read(hub, split="train"))) == 5
    with pytest.raises(DatasetError, match="no Parquet files of split 'test'"):
        list(read(hub, split="test"))


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.jsonl", b'{"q": 1}\n\n{"q": \n', "a.jsonl, line 3: Expecting value"),
        ("a.jsonl", b"[1]\n", "a.jsonl, line 1: expected a JSON object, got list"),
        ("a.jsonl", b'{"q": "\xe9"}\n', r"a\.jsonl: is not UTF-8 text"),
        ("a.json", b'[{"q": 1}, 5]', "a.json, row 2: expected a JSON object, got int"),
        ("a.parquet", b"PAR", "a.parquet"),
        ("empty", None, "holds no Parquet files and no dataset"),
        ("gone.jsonl", ..., "there is no such file or directory"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, name, text, words):
    path = tmp_path / name
    if text is None:
        path.mkdir()
    elif text is not ...:
        path.write_bytes(text)
    with pytest.raises(DatasetError, match=words):
        list(read(path))


# -- field maps ------------------------------------------------------------------------------


def test_a_map_renames_reaches_into_rows_and_adds_constants():
    row = Row(1, "a, row 1", ROWS[0])
    fields = {"question": "q", "answer": "meta.answer", "first": "chat.0.content"}
    task = FieldMap(fields=fields, constants={"tolerance": 0.1}).apply(row)
    assert task == {"question": "0 plus 1", "answer": "1", "first": "hi", "tolerance": 0.1}
    kept = FieldMap(fields={"question": "q"}, keep=True).apply(row)
    assert kept == {**ROWS[0], "question": "0 plus 1"}
    assert FieldMap().apply(row) == ROWS[0]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("x", "a, row 7: no field 'x' .*there: q, meta, chat"),
        ("meta.x", "at 'x'; there: answer"),
        ("chat.3", "at '3'; there: list"),
        ("q.x", "at 'x'; there: str"),
    ],
)
def test_a_row_without_the_field_is_named(path, words):
    with pytest.raises(DatasetError, match=words):
        FieldMap(fields={"answer": path}).apply(Row(7, "a, row 7", ROWS[0]))


def test_a_map_may_choose_among_rows():
    chooses = FieldMap(where={"kind": "math"})
    assert chooses.wants(Row(1, "r", {"kind": "math"})) and not chooses.wants(Row(1, "r", {"kind": "code"}))


def test_a_map_is_read_from_yaml_and_json(tmp_path):
    (tmp_path / "m.yaml").write_text(
        "handler: math\nfields:\n  problem: q\nwhere: {kind: math}\nkeep: true\n"
    )
    (tmp_path / "m.json").write_text(
        '{"handler": "math", "fields": {"problem": "q"}, "where": {"kind": "math"}, "keep": true}'
    )
    expected = FieldMap(handler="math", fields={"problem": "q"}, where={"kind": "math"}, keep=True)
    assert load_map(tmp_path / "m.yaml") == load_map(tmp_path / "m.json") == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fields: [a]", "fields: .* valid dictionary; a field map has handler, fields"),
        ("field: {a: b}", "field: Extra inputs are not permitted; a field map has handler, fields"),
        ("fields:\nkeep: 7", "keep: "),
        ("- a", "not a mapping"),
        ("a: [", "no YAML"),
    ],
)
def test_a_map_that_is_none_is_refused(tmp_path, text, words):
    (tmp_path / "m.yaml").write_text(text)
    with pytest.raises(DatasetError, match=words):
        load_map(tmp_path / "m.yaml")


def test_an_unknown_map_names_those_there_are():
    with pytest.raises(DatasetError, match=r"no field map 'no-such': give a file, or one of .*deepscaler"):
        load_map("no-such")


TESTS = '{"inputs": ["1"], "outputs": ["2"]}'
PUBLISHED = {
    "deepscaler": {"problem": "p", "answer": "1", "solution": "s"},
    "dapo-math": {"prompt": [{"role": "user", "content": "p"}], "reward_model": {"ground_truth": "1"}},
    "eurus-2-math": {
        "ability": "math",
        "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "p"}],
        "reward_model": {"ground_truth": "1"},
    },
    "eurus-2-code": {
        "ability": "code",
        "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "p"}],
        "reward_model": {"ground_truth": TESTS},
    },
    **{key: {"question": "p", "input_output": TESTS, "starter_code": ""} for key in ("apps", "taco")},
    "code-contests": {
        "description": "p",
        "public_tests": {"input": ["1"], "output": ["2"]},
        "private_tests": {"input": [], "output": []},
        "generated_tests": {"input": ["3"], "output": ["4"]},
    },
    "scp-116k": {"problem": "p", "matched_solution": "5 m"},
}
"""A row of each set, cut to the fields that matter."""


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_each_published_map_makes_tasks_that_its_handler_takes(name):
    from services.settings import Settings
    from workers.handlers.registry import Registry

    fields, row = load_map(name), Row(1, name, PUBLISHED[name])
    assert fields.wants(row)
    Registry(Settings()).get(fields.handler).check_task(fields.apply(row))
    assert published_maps() == sorted(PUBLISHED)


def test_a_task_that_does_not_fit_is_named_with_its_row_and_field():
    schema = {
        "type": "object",
        "required": ["answer"],
        "properties": {"answer": {"type": "string"}, "tests": {"items": {"type": "integer"}}},
    }
    row = Row(17, "a.parquet, row 17", {})
    assert problem({"answer": "1"}, schema, row) is None
    assert problem({}, schema, row) == "a.parquet, row 17: task: 'answer' is a required property"
    assert problem({"answer": 3}, schema, row).startswith("a.parquet, row 17: answer: 3 is not of type")
    assert problem({"answer": "", "tests": [1, "x"]}, schema, row).startswith("a.parquet, row 17: tests.1: ")


def test_rows_for_verl_hold_each_task_as_it_is_and_a_failure_leaves_no_file(tmp_path):
    tasks = [{"problem_statement": "a"}, *({"question": "b", "tests": {"x": [n, "1"]}} for n in range(300))]
    path = tmp_path / "train.parquet"
    write_verl(path, "swe", iter(tasks))
    rows = [row.data for row in read(path)]
    assert [json.loads(row["extra_info"]["task"]) for row in rows] == tasks
    assert [row["extra_info"]["index"] for row in rows] == list(range(301))
    assert [row["prompt"] for row in rows[:2]] == [[{"role": "user", "content": text}] for text in "ab"]
    assert {(row["agent_name"], row["data_source"]) for row in rows} == {("rollout_service", "swe")}
    with pytest.raises(ZeroDivisionError):
        write_verl(tmp_path / "broken.parquet", "swe", ({"n": 1 // n} for n in (1, 0)))
    with pytest.raises(DatasetError, match="no/dir"):
        write_verl(tmp_path / "no/dir/a.parquet", "swe", tasks)
    with pytest.raises(DatasetError, match="task 1 is no Unicode text"):
        write_verl(path, "swe", [{"question": "\ud800"}])
    assert [row.data for row in read(path)] == rows
    with pytest.raises(DatasetError, match="/dev/full is no regular file"):
        write_verl(Path("/dev/full"), "swe", tasks)
    assert Path("/dev/full").is_char_device()
    assert [file.name for file in tmp_path.iterdir()] == ["train.parquet"]


def test_a_command_makes_rows_for_verl_of_a_file_of_tasks(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"question": "1 plus 2", "answer": "3"}\n')
    argv = [sys.executable, "-m", "rollout.cli", "tasks", "convert", str(tmp_path / "in.jsonl"), "--no-check"]
    argv += ["--verl", str(tmp_path / "out.parquet")]
    refused = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert refused.returncode == 2 and "--verl needs --handler or a --map" in refused.stderr
    argv += ["--handler", "calculator", "--limits"]
    refused = subprocess.run([*argv, '{"max_turn": 3}'], capture_output=True, text=True, check=False)
    assert refused.returncode == 2 and "--limits: max_turn: Extra inputs" in refused.stderr
    limits = {"max_turns": 50, "eval_timeout_s": 1200}
    done = subprocess.run([*argv, json.dumps(limits)], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "1 tasks read, 0 do not" in done.stderr
    ((row,),) = [list(read(tmp_path / "out.parquet"))]
    assert row.data["extra_info"]["handler"] == "calculator"
    assert json.loads(row.data["extra_info"]["task"]) == {"question": "1 plus 2", "answer": "3"}
    assert row.data["extra_info"]["limits"] == limits
    assert (
        RolloutRequest(handler="calculator", **{"limits": row.data["extra_info"]["limits"]}).limits.max_turns
        == 50
    )
