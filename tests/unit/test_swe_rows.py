"""Rows of SWE data sets: told apart, read in one form, refused with the field's name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from workers.handlers.swe.images import images_of, local_name
from workers.handlers.swe.rows import SweTask, files_of
from workers.handlers.swe.specs import is_one_pytest_run, spec_of, unittest_runner
from workers.handlers.swe.testfiles import TestFiles

TEST_PATCH = "diff --git a/tests/test_a.py b/tests/test_a.py\n--- a/tests/test_a.py\n+++ b/tests/test_a.py\n"
BENCH = {
    "instance_id": "psf__requests-1142",
    "repo": "psf/requests",
    "version": "1.1",
    "base_commit": "22623bd",
    "environment_setup_commit": "22623bd",
    "problem_statement": "requests.get is ALWAYS sending content length",
    "hints_text": "",
    "created_at": "2013-01-25",
    "patch": "diff --git a/requests/models.py b/requests/models.py\n",
    "test_patch": TEST_PATCH,
    "FAIL_TO_PASS": '["tests/test_a.py::test_x"]',
    "PASS_TO_PASS": '["tests/test_b.py::test_y[a-b]"]',
}
GYM = {key: value for key, value in BENCH.items() if key != "environment_setup_commit"} | {
    "instance_id": "getmoto__moto-7365",
    "repo": "getmoto/moto",
    "version": "4.2",
    "FAIL_TO_PASS": ["tests/test_a.py::test_x"],
    "PASS_TO_PASS": [],
}
SMITH = {
    "instance_id": "oauthlib__oauthlib.1fd52536.combine_file__09vlzwgc",
    "repo": "swesmith/oauthlib__oauthlib.1fd52536",
    "image_name": "swebench/swesmith.x86_64.oauthlib_1776_oauthlib.1fd52536",
    "patch": "diff --git a/oauthlib/a.py b/oauthlib/a.py\n",
    "problem_statement": "It fails.",
    "FAIL_TO_PASS": ["tests/test_a.py::T::test_x"],
    "PASS_TO_PASS": ["tests/test_a.py::T::test_y"],
}
R2E = {
    "repo_name": "aiohttp",
    "docker_image": "namanjain12/aiohttp_final:f0d74880deec8fcd982bce639c93c5e130d41198",
    "commit_hash": "f0d74880deec8fcd982bce639c93c5e130d41198",
    "parsed_commit_content": "{}",
    "execution_result_content": json.dumps({"test_file_names": ["test_1.py"], "test_file_codes": ["x"]}),
    "modified_files": ["aiohttp/connector.py"],
    "relevant_files": [],
    "prompt": "",
    "problem_statement": "It fails.",
    "expected_output_json": '{"TestA.test_x": "PASSED"}',
}


def read(row: dict[str, Any]) -> Any:
    return SweTask.model_validate(row).instance()


@pytest.mark.parametrize(
    ("row", "source", "image", "command"),
    [
        (
            BENCH,
            "swe-bench",
            "swebench/sweb.eval.x86_64.psf_1776_requests-1142:latest",
            "pytest -rA tests/test_a.py",
        ),
        (
            GYM,
            "swe-gym",
            "xingyaoww/sweb.eval.x86_64.getmoto_s_moto-7365:latest",
            "pytest -n0 -rA tests/test_a.py",
        ),
        (
            SMITH,
            "swe-smith",
            "swebench/swesmith.x86_64.oauthlib_1776_oauthlib.1fd52536",
            "source /opt/miniconda3/bin/activate; conda activate testbed; "
            "pytest --disable-warnings --color=no --tb=no --verbose",
        ),
        (
            R2E,
            "r2e-gym",
            "namanjain12/aiohttp_final:f0d74880deec8fcd982bce639c93c5e130d41198",
            "PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning' "
            ".venv/bin/python -W ignore -m pytest -rA r2e_tests",
        ),
    ],
)
def test_a_row_is_told_by_its_fields(row: dict[str, Any], source: str, image: str, command: str) -> None:
    instance = read(row)
    assert (instance.source, instance.image) == (source, image)
    spec = spec_of(instance)
    assert (spec.test_script, spec.repo_dir, spec.recorder) == (command, "/testbed", True)


def test_lists_of_tests_may_be_json_text() -> None:
    instance = read(BENCH)
    assert instance.fail_to_pass == ["tests/test_a.py::test_x"]
    assert instance.pass_to_pass == ["tests/test_b.py::test_y[a-b]"]
    assert spec_of(instance).test_files == ["tests/test_a.py", "tests/test_b.py"]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        *(
            ({key: value for key, value in BENCH.items() if key != missing}, missing)
            for missing in ("repo", "base_commit", "test_patch", "FAIL_TO_PASS", "PASS_TO_PASS")
        ),
        (BENCH | {"FAIL_TO_PASS": "not json"}, "FAIL_TO_PASS"),
        (BENCH | {"PASS_TO_PASS": [1]}, "PASS_TO_PASS"),
        (BENCH | {"problem_statement": ""}, "problem_statement"),
        (BENCH | {"spec": {"test_comand": "x"}}, "test_comand"),
        ({"problem_statement": "x"}, r"`base_commit`.*`image_name`.*`docker_image`"),
        # Hidden tests of R2E-Gym cannot lie elsewhere.
        (
            R2E | {"execution_result_content": {"test_file_names": ["../evil.py"], "test_file_codes": ["x"]}},
            r"evil\.py",
        ),
    ],
)
def test_a_row_at_fault_is_refused_with_its_field(row: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        SweTask.model_validate(row)


def test_an_eval_script_is_run_as_it_is_with_its_tests_apart() -> None:
    begin = "#!/bin/bash\nset -uxo pipefail\ncd /testbed\n: '>>>>> Start Test Output'"
    script = f"{begin}\npytest -rA a\n: '>>>>> End Test Output'\n"
    spec = spec_of(read(BENCH | {"eval_script": script, "log_parser": "parse_log_requests"}))
    assert (spec.install, spec.test_script) == (["cd /testbed"], "pytest -rA a")
    assert (spec.log_parser, spec.one_script) == ("parse_log_requests", True)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (BENCH | {"eval_script": "pytest"}, "eval_script: needs one line"),
        (GYM | {"repo": "some/where"}, r"'some/where'.*SWE-Gym/SWE-Bench-Fork@\w+.*`spec\.test_cmd`"),
        (BENCH | {"version": "77.1"}, r"version '77\.1' of 'psf/requests'.*swebench 4\.1\.0.*`spec\."),
        (SMITH | {"repo": "swesmith/redis__redis.12345678"}, r"swesmith 0\.0\.9"),
        (R2E | {"repo_name": "mypy"}, r"R2E-Gym/R2E-Gym@"),
    ],
)
def test_a_row_that_nothing_can_be_run_of_is_refused(row: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        spec_of(read(row))


def test_django_is_given_modules_and_no_files() -> None:
    patch = TEST_PATCH.replace("test_a", "admin/test_a")
    row = BENCH | {"repo": "django/django", "version": "3.2", "test_patch": patch}
    spec = spec_of(read(row))
    assert spec.test_script.endswith("--parallel 1 admin.test_a")
    assert spec.recorder is True


@pytest.mark.parametrize(
    ("script", "once"),
    [
        ("pytest -rA a.py", True),
        ("PYTHONWARNINGS=x .venv/bin/python -W ignore -m pytest -rA a", True),
        ("cd x && py.test a", True),
        ("pytest a; pytest b", False),
        ("tox --current-env -epy39 -v -- a", True),
        ("tox -epy39 -v -- a", False),
        ("./tests/runtests.py a", False),
        ("PYTHONPATH=src pytest a", False),
        ("python3 -I -m pytest a", False),
        ("bin/test -C", False),
    ],
)
def test_outcomes_are_recorded_where_pytest_runs_once_and_can_load_a_plug_in(script: str, once: bool) -> None:
    assert is_one_pytest_run(script) is once


@pytest.mark.parametrize(
    ("script", "runner"),
    [
        ("./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1 admin.test_a", "runtests.py"),
        ("./tests/runtests.py --verbosity 2 admin.test_a", None),
        ("source a; conda activate testbed; python -m tornado.test --verbose", "tornado.test"),
        ("source a; conda activate testbed; python test.py --verbose", "test.py"),
        (".venv/bin/python -W ignore r2e_tests/unittest_custom_runner.py", "unittest_custom_runner.py"),
        ("python3 -m unittest -v a.b", "unittest"),
        ("python3 -E -m unittest -v a.b", None),
        ("python -m unittest a; python -m unittest b", None),
        ("pytest test.py", None),
        ("bin/test -C", None),
    ],
)
def test_outcomes_are_recorded_where_unittest_runs_once_in_one_process(
    script: str, runner: str | None
) -> None:
    assert unittest_runner(script) == runner


def test_tests_of_smith_that_unittest_names_have_files() -> None:
    names = ["test_x (tornado.test.web_test.T)", "test_y (__main__.T)", "test_z (a.b.T.test_z)", "odd name"]
    row = SMITH | {"FAIL_TO_PASS": names, "PASS_TO_PASS": ["tests/test_a.py::test_x"]}
    files = ["a/b.py", "test.py", "tests/test_a.py", "tornado/test/web_test.py"]
    assert spec_of(read(row)).test_files == files
    source = "class T:\n    def test_y(self): pass\n"
    assert [path for path, *_ in TestFiles({"test.py": source}).find("test_y (__main__.T)")] == ["test.py"]


def test_files_of_a_patch_are_those_of_its_headers() -> None:
    patch = (
        "diff --git a/a b.py b/a b.py\n--- a/a b.py\n+++ b/a b.py\n@@ -1,2 +1,1 @@\n"
        "--- a/no.py\n+++ b/no.py\n+diff --git a/no b/no\n"
        "diff --git a/old.py b/new.py\nsimilarity index 100%\nrename from old.py\nrename to new.py\n"
        "diff --git a/x.bin b/x.bin\nindex 1..2\nGIT binary patch\nliteral 1\n"
    )
    assert files_of(patch) == ["a b.py", "new.py", "old.py", "x.bin"]
    assert files_of("--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-a\n+b\n") == ["x.py"]


@pytest.mark.parametrize(
    ("image", "name"),
    [
        (
            "docker.io/swebench/sweb.eval.x86_64.psf_1776_requests-1142:latest",
            "swebench-sweb.eval.x86_64.psf_1776_requests-1142",
        ),
        ("docker://namanjain12/aiohttp_final:f0d7", "namanjain12-aiohttp_final-f0d7"),
        ("/scratch/images/a.sif", "/scratch/images/a.sif"),
        ("base", "base"),
    ],
)
def test_a_docker_reference_has_a_name_here(image: str, name: str) -> None:
    assert local_name(image) == name


def test_names_of_long_references_are_short_and_differ() -> None:
    names = {local_name(f"registry/{'x' * 200}:{tag}") for tag in "ab"}
    assert len(names) == 2 and max(map(len, names)) <= 128


def test_images_of_a_data_set_come_once_each(tmp_path: Any) -> None:
    path = tmp_path / "rows.jsonl"
    local = BENCH | {"image": "base"}
    path.write_text("".join(json.dumps(row) + "\n" for row in (BENCH, SMITH, SMITH, R2E, local)))
    assert [reference for _, reference in images_of(path)] == [
        "docker://swebench/sweb.eval.x86_64.psf_1776_requests-1142:latest",
        f"docker://{SMITH['image_name']}",
        f"docker://{R2E['docker_image']}",
    ]
