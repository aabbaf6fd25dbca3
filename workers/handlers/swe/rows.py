"""A dataset row as the task of a `swe` rollout: four published layouts, told apart by their fields.

* SWE-bench, Lite, Verified (`SWE-bench/SWE-bench_*`): base_commit, test_patch, FAIL_TO_PASS, PASS_TO_PASS,
  version, environment_setup_commit. Since release 5 of the `swebench` package rows also carry what running
  them takes: image, eval_script, log_parser, eval_type (`swebench.harness.utils.make_test_spec`).
* SWE-Gym (`SWE-Gym/SWE-Gym`): the same without environment_setup_commit.
* SWE-smith (`SWE-bench/SWE-smith*`): image_name, and a `patch` that puts the bug *in*; no commit, no tests.
* R2E-Gym (`R2E-Gym/R2E-Gym-*`): repo_name, docker_image, commit_hash, hidden tests in
  execution_result_content, the status of every test in expected_output_json.

Whatever names a fix or a test stays here: the agent sees `problem_statement` and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from workers.handlers.fields import JsonObject, parsed

T = TypeVar("T")
Source = Literal["swe-bench", "swe-gym", "swe-smith", "r2e-gym"]

Id = Annotated[
    str,
    BeforeValidator(lambda value: str(value) if isinstance(value, int) else value),
    WithJsonSchema({"type": ["string", "integer"]}),
]
"""A text, or a number, which is read as one."""
TestNames = Annotated[
    list[str],
    BeforeValidator(parsed),
    WithJsonSchema({"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "string"}]}),
]
"""A list of names, or one that JSON made a text of, as Parquet files of SWE-bench have it."""


class SpecFields(BaseModel):
    """How an instance is run, where the row itself says so. What is left out comes from its data set."""

    model_config = ConfigDict(extra="forbid")

    repo_dir: str | None = Field(default=None, pattern=r"^/")
    """Where the repository lies in the image; `/testbed` by default."""
    setup: list[str] | None = None
    """Shell lines that make the environment usable: in the agent's shell, and before the tests."""
    pre_install: list[str] = Field(default_factory=list)
    install: list[str] = Field(default_factory=list)
    """Shell lines after the patch was applied, before the tests. They run the patch's code."""
    eval_commands: list[str] = Field(default_factory=list)
    """Shell lines right before the tests."""
    test_cmd: str | None = None
    """Runs the specified tests; `{files}` stands for the test files, which are appended without it."""
    log_parser: str | None = None
    """A name in `swebench.harness.log_parsers.PARSER_REGISTRY`."""
    eval_type: Literal["pass_and_fail", "fail_only"] | None = None
    test_timeout_s: float | None = Field(default=None, gt=0)
    """Seconds of the tests; None = what the rollout's `eval_timeout_s` leaves."""
    recorder: bool | None = None
    """Whether the tests tell their outcomes by a channel of their own; None = if the command is one run of
    pytest or `unittest`."""


class SweTask(BaseModel):
    """A row of SWE-bench, SWE-Gym, SWE-smith or R2E-Gym as it is published; other fields are kept."""

    model_config = ConfigDict(extra="allow")

    problem_statement: str = Field(min_length=1)
    """All that the agent is told."""
    instance_id: Id | None = None
    data_kind: str | None = None
    """One with `r2e` in it names R2E-Gym."""
    repo: str | None = None
    version: str | None = None
    base_commit: str | None = None
    environment_setup_commit: str | None = None
    patch: str | None = None
    """The fix; in SWE-smith the bug."""
    test_patch: str | None = None
    FAIL_TO_PASS: TestNames | None = None
    PASS_TO_PASS: TestNames | None = None
    image: str | None = None
    """Image of the sandbox: a name, a path, or a docker reference that `rollout images build` has fetched."""
    eval_script: str | None = None
    log_parser: str | None = None
    eval_type: str | None = None
    image_name: str | None = None
    docker_image: str | None = None
    """Image of R2E-Gym's; in rows of other sets the same as `image`."""
    repo_name: str | None = None
    commit_hash: str | None = None
    expected_output_json: JsonObject | None = None
    execution_result_content: JsonObject | None = None
    modified_files: list[str] | None = None
    spec: SpecFields | None = None

    @model_validator(mode="after")
    def _recognised(self) -> SweTask:
        self.instance()
        return self

    def instance(self) -> Instance:
        """The row in one form, whatever its layout.

        Raises:
            ValueError: It is of no known layout, or a field is missing or malformed; the message names it.
        """
        if self.expected_output_json is not None or "r2e" in (self.data_kind or "").lower():
            return _from_r2e_gym(self)
        if self.image_name is not None and self.base_commit is None:
            return _from_swe_smith(self)
        if self.base_commit is not None or self.test_patch is not None:
            return _from_swe_bench(self)
        if self.docker_image is not None:
            return _from_r2e_gym(self)
        raise ValueError(
            "the row is of no known data set: SWE-bench and SWE-Gym have `base_commit` and `test_patch`, "
            "SWE-smith has `image_name`, R2E-Gym has `docker_image` and `expected_output_json`"
        )


@dataclass(frozen=True)
class Instance:
    """What the stages work with."""

    source: Source
    instance_id: str
    repo: str
    image: str
    """Name, path or docker reference."""
    problem_statement: str
    gold_files: list[str]
    """Paths that the fix touches."""
    base_commit: str | None = None
    """Commit the agent starts from; None = where the image's repository stands."""
    test_patch: str = ""
    bug_patch: str = ""
    """Applied before the agent comes (SWE-smith)."""
    fail_to_pass: list[str] = field(default_factory=list)
    pass_to_pass: list[str] = field(default_factory=list)
    expected: dict[str, str] | None = None
    """R2E-Gym: the status that each test must have."""
    hidden_tests: dict[str, str] = field(default_factory=dict)
    """R2E-Gym: file name → text, put below `r2e_tests/` for EVAL."""
    fix_commit: str | None = None
    """The commit of the fix, which the agent's repository must not hold."""
    version: str = ""
    eval_script: str | None = None
    log_parser: str | None = None
    eval_type: str | None = None
    spec: SpecFields = field(default_factory=SpecFields)

    @property
    def must_pass(self) -> list[str]:
        """Names of the tests that must pass, those that the fix is for first."""
        if self.expected is not None:
            return [name for name, status in self.expected.items() if status == "PASSED"]
        return [*self.fail_to_pass, *self.pass_to_pass]


def _from_swe_bench(row: SweTask) -> Instance:
    official = row.environment_setup_commit is not None or row.eval_script is not None or row.spec is not None
    source: Source = "swe-bench" if official else "swe-gym"
    _require(row, source, "instance_id", "repo", "base_commit", "test_patch", "FAIL_TO_PASS", "PASS_TO_PASS")
    prefix, joint = ("swebench", "_1776_") if official else ("xingyaoww", "_s_")
    key = f"{prefix}/sweb.eval.x86_64.{str(row.instance_id).replace('__', joint)}:latest".lower()
    return _instance(
        row,
        source,
        image=row.docker_image or row.image_name or key,
        base_commit=row.base_commit,
        test_patch=row.test_patch or "",
        fail_to_pass=_some(row.FAIL_TO_PASS, "FAIL_TO_PASS"),
        pass_to_pass=row.PASS_TO_PASS or [],
        version=row.version or "",
        eval_script=row.eval_script,
        log_parser=row.log_parser,
        eval_type=row.eval_type,
    )


def _from_swe_smith(row: SweTask) -> Instance:
    _require(row, "swe-smith", "instance_id", "repo", "patch", "FAIL_TO_PASS", "PASS_TO_PASS")
    return _instance(
        row,
        "swe-smith",
        image=row.docker_image or str(row.image_name),
        bug_patch=row.patch or "",
        fail_to_pass=_some(row.FAIL_TO_PASS, "FAIL_TO_PASS"),
        pass_to_pass=row.PASS_TO_PASS or [],
    )


def _from_r2e_gym(row: SweTask) -> Instance:
    required = ("docker_image", "commit_hash", "expected_output_json", "execution_result_content")
    _require(row, "r2e-gym", *required)
    expected = _some(row.expected_output_json, "expected_output_json")
    runs = row.execution_result_content or {}
    names, codes = runs.get("test_file_names"), runs.get("test_file_codes")
    if not (isinstance(names, list) and isinstance(codes, list) and names and len(names) == len(codes)):
        raise ValueError(
            "execution_result_content: needs `test_file_names` and `test_file_codes`, lists of one length"
        )
    for name in names:
        if not isinstance(name, str) or name.startswith("/") or ".." in name.split("/"):
            raise ValueError(
                f"execution_result_content: {name!r} in test_file_names is no path below the tests"
            )
    repo = row.repo_name or str(row.docker_image).split("/")[-1].split("_final")[0]
    return _instance(
        row,
        "r2e-gym",
        image=str(row.docker_image),
        instance_id=row.instance_id or f"{repo}__{row.commit_hash}",
        repo=repo,
        gold_files=list(row.modified_files or []),
        expected={name: str(status) for name, status in expected.items()},
        hidden_tests=dict(zip(names, map(str, codes), strict=True)),
        fix_commit=row.commit_hash,
    )


def _instance(row: SweTask, source: Source, image: str, **fields: Any) -> Instance:
    """The instance of a row, whose own `image` goes before the one of its data set."""
    shared = {
        "instance_id": str(row.instance_id),
        "repo": str(row.repo),
        "problem_statement": row.problem_statement,
        "gold_files": files_of(row.patch or ""),
        "spec": row.spec or SpecFields(),
    }
    return Instance(source=source, image=row.image or image, **shared | fields)


def files_of(patch: str) -> list[str]:
    """Paths that a diff touches, both sides, sorted."""
    paths: set[str] = set()
    lines = patch.split("\n")
    by_git = any(line.startswith("diff --git ") for line in lines)
    in_header = False
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if line.startswith("diff --git "):
            paths.update(_header_paths(line))
            in_header = True
        elif line.startswith(("@@", "GIT binary patch")):
            in_header = False
        elif line.startswith("--- ") and (in_header or (not by_git and following.startswith("+++ "))):
            names = (name[4:].split("\t")[0].rstrip("\r") for name in (line, following))
            paths.update(name[2:] for name in names if name.startswith(("a/", "b/")))
        elif in_header and line.startswith(("rename from ", "rename to ", "copy from ", "copy to ")):
            paths.add(line.split(" ", 2)[2])
    return sorted(paths)


def _header_paths(line: str) -> list[str]:
    names = line[len("diff --git ") :]
    # Unless a file is renamed both names are the same, so that the middle is known even with spaces in them.
    half = (len(names) - 1) // 2
    first, second = names[:half], names[half + 1 :]
    if first[2:] == second[2:] and names[half : half + 1] == " ":
        return [first[2:]]
    parts = names.split(" b/", 1)
    return [parts[0].removeprefix("a/"), parts[1]] if len(parts) == 2 else []


def _require(row: SweTask, kind: str, *names: str) -> None:
    for name in names:
        if getattr(row, name) is None:
            raise ValueError(f"{name}: missing for a row of {kind}")


def _some(value: T | None, name: str) -> T:
    if not value:
        raise ValueError(f"{name}: is empty; without a test that must pass, no patch can be judged")
    return value
