"""Sets of Harbor tasks: trees, and registries that are read from clones at their commits."""

from __future__ import annotations

import json
import subprocess

import pytest

from rollout.cli.tasks import Tasks
from rollout.datasets import DatasetError, read
from rollout.suites import SuiteError
from rollout.suites.bundles import Bundle, pack, unpack
from rollout.suites.harbor import requests, tasks
from sandbox.errors import ImageError
from tests.unit.test_harbor_directory import PLAIN, make
from workers.handlers.harbor.needs import images_of

DOCKERFILE = {"environment/Dockerfile": "FROM base\n"}
NAMED = '[task]\nname = "acme/{}"\n' + PLAIN


def git(path, *words):
    who = ("-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "protocol.file.allow=always")
    done = subprocess.run(["git", "-C", path, *who, *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def clone(tmp_path):
    """A clone with two commits of a task, and what it has checked out changed."""
    path = tmp_path / "clones" / "suite"
    make(path / "tasks" / "one", NAMED.format("one"), **{"instruction.md": "The first text.\n"})
    git(tmp_path, "init", "-q", str(path))
    git(path, "add", ".")
    git(path, "commit", "-qm", "one")
    (path / "tasks" / "one" / "instruction.md").write_text("The second text.\n")
    git(path, "commit", "-qam", "two")
    (path / "tasks" / "one" / "instruction.md").write_text("Nobody's text.\n")
    return path


def registry(path, *entries, **other_sets):
    sets = [
        {"name": name, "version": "1", "tasks": found}
        for name, found in {"suite": entries, **other_sets}.items()
    ]
    path.mkdir(exist_ok=True)
    (path / "registry.json").write_text(json.dumps(sets))
    return path / "registry.json"


def entry(clone, commit="HEAD", path="tasks/one", **more):
    url = "https://example.com/acme/suite.git"
    return {
        "name": "one",
        "git_url": url,
        "git_commit_id": git(clone, "rev-parse", commit),
        "path": path,
        **more,
    }


def test_the_tasks_of_a_tree_come_in_order_and_none_from_inside_of_another(tmp_path):
    for name in ("b", "a", "deep/er/c", ".hidden/d"):
        make(tmp_path / "set" / name, NAMED.format(name[-1]))
    make(tmp_path / "set" / "a" / "environment" / "fixture", NAMED.format("fixture"))
    found = list(tasks(tmp_path / "set"))
    assert [task.name for task in found] == ["acme/a", "acme/b", "acme/c"]
    assert [task.digest for task in found] == [
        pack(tmp_path / "set" / n).digest for n in ("a", "b", "deep/er/c")
    ]
    (alone,) = tasks(tmp_path / "set" / "b")
    assert alone.digest == found[1].digest
    with pytest.raises(SuiteError, match=r"b/tests: no task\.toml is there, nor in a directory below it"):
        list(tasks(tmp_path / "set" / "b" / "tests"))


def test_a_registry_is_read_from_clones_at_the_commits_that_it_names(tmp_path, clone):
    local = make(tmp_path / "registry" / "near", NAMED.format("near"))
    path = registry(
        tmp_path / "registry", entry(clone, "HEAD~1"), entry(clone), {"name": "near", "path": "near"}
    )
    first, second, near = tasks(path, clones=tmp_path / "clones")
    for task, text in ((first, "The first text.\n"), (second, "The second text.\n")):
        into = tmp_path / task.digest
        unpack(task.bundle().content, task.digest, into)
        assert (into / "instruction.md").read_text() == text
    assert (clone / "tasks/one/instruction.md").read_text() == "Nobody's text.\n"
    assert near.digest == pack(local).digest
    assert git(clone, "status", "--short") == "M tasks/one/instruction.md"


def test_a_clone_is_read_as_carefully_as_a_bundle(tmp_path, clone):
    (clone / "tasks/one/tests" / ("long " * 40)).write_text("")
    (clone / "tasks/one/tests" / "é").write_text("")
    (clone / "tasks/one/tests/test.sh").chmod(0o755)
    git(clone, "add", ".")
    git(clone, "commit", "-qm", "names")
    path = registry(tmp_path / "registry", entry(clone))
    (task,) = tasks(path, clones=tmp_path / "clones")
    assert task.digest == pack(clone / "tasks" / "one").digest
    (clone / "tasks/one/tests/link").symlink_to("/etc/passwd")
    git(clone, "add", ".")
    git(clone, "commit", "-qm", "link")
    path = registry(tmp_path / "registry", entry(clone))
    with pytest.raises(
        SuiteError, match=r"suite@.*tests/link', a link to '/etc/passwd', which is no relative"
    ):
        list(tasks(path, clones=tmp_path / "clones"))


def test_one_of_several_sets_is_named(tmp_path, clone):
    path = registry(tmp_path / "registry", entry(clone), other=[entry(clone, "HEAD~1")])
    with pytest.raises(SuiteError, match="has the sets suite@1, other@1: name one as --split NAME@VERSION"):
        list(tasks(path, clones=tmp_path / "clones"))
    for split in ("other", "other@1"):
        assert len(list(tasks(path, split, tmp_path / "clones"))) == 1


def test_what_is_not_in_the_clones_is_named_and_nothing_is_fetched(tmp_path, clone):
    def refused(*entries, clones="clones"):
        path = registry(tmp_path / "registry", *entries)
        with pytest.raises(SuiteError) as error:
            list(tasks(path, clones=clones and tmp_path / clones))
        return str(error.value).removeprefix(f"{path}, ")

    url, absent = "https://example.com/acme/suite.git", "0123456789" * 4
    assert refused(entry(clone), clones=None).startswith(
        f"task 0: is in {url}: clone it, and give the directory"
    )
    assert refused(entry(clone), clones="registry") == (
        f"task 0: {tmp_path}/registry/suite is missing: git clone {url} {tmp_path}/registry/suite"
    )
    found = refused(entry(clone), entry(clone, git_commit_id=absent))
    assert found.startswith(f"task 1: commit {absent} is not in {clone}: git -C {clone} fetch (")
    assert refused(entry(clone, path="../../etc")) == "task 0: path '../../etc' leads elsewhere"
    assert "name no commit" in refused(entry(clone, git_commit_id="--upload-pack=x"))
    assert refused({"name": "x"}) == "task 0: has no path"
    assert "tasks/none" in refused(entry(clone, path="tasks/none"))
    (tmp_path / "registry" / "registry.json").write_text("[1]")
    with pytest.raises(SuiteError, match="is no registry, a list of name, version and tasks"):
        list(tasks(tmp_path / "registry" / "registry.json"))


def test_a_clone_that_lacks_objects_does_not_ask_for_them(tmp_path, clone):
    asked = tmp_path / "asked"
    git(clone, "config", "uploadpack.allowFilter", "true")
    git(
        tmp_path,
        "clone",
        "-q",
        "--filter=blob:none",
        "--no-checkout",
        f"file://{clone}",
        f"{tmp_path}/partial/suite",
    )
    git(
        tmp_path / "partial" / "suite",
        "config",
        "remote.origin.uploadpack",
        f"touch {asked}; git-upload-pack",
    )
    path = registry(tmp_path / "registry", entry(clone, "HEAD~1"))
    with pytest.raises(SuiteError):
        list(tasks(path, clones=tmp_path / "partial"))
    assert not asked.exists()


def test_a_fault_in_a_clone_is_told_by_its_place_there(tmp_path, clone):
    (clone / "tasks/one/task.toml").write_text("[agent]\ntimeout_sec = 0\n")
    git(clone, "commit", "-qam", "three")
    path = registry(tmp_path / "registry", entry(clone))
    with pytest.raises(SuiteError) as refused:
        list(tasks(path, clones=tmp_path / "clones"))
    commit = git(clone, "rev-parse", "HEAD")
    assert str(refused.value).startswith(f"{clone}@{commit}:tasks/one/task.toml: agent.timeout_sec: ")


def test_a_suite_is_a_dataset_of_rows_whose_bundles_are_put_first(tmp_path):
    for name in "abc":
        make(tmp_path / "set" / name, NAMED.format(name) + "colour = 1\n")
    rows = list(read(tmp_path / "set", skip=1, first=1))
    assert [(row.where, row.data["name"]) for row in rows] == [(str(tmp_path / "set" / "b"), "acme/b")]
    source, put = Tasks(str(tmp_path / "set"), n=4, skip=1), []
    source.put_bundles(lambda task: put.append(task.bundle()))
    made = list(source)
    assert {bundle.digest for bundle in put} == {request.task["bundle"] for request in made}
    assert [(request.handler, request.n, request.task["name"]) for request in made] == [
        ("harbor", 4, "acme/b"),
        ("harbor", 4, "acme/c"),
    ]
    (tmp_path / "set" / "c" / "instruction.md").write_text("Another text.")
    with pytest.raises(SuiteError, match="set/c: has changed since it was read"):
        source.put_bundles(lambda task: task.bundle())


def test_each_image_of_a_suite_is_needed_once(tmp_path):
    separate = '[verifier]\nenvironment_mode = "separate"\n'
    make(tmp_path / "a", PLAIN)
    make(tmp_path / "b", PLAIN + separate, **{"tests/Dockerfile": "FROM base\nRUN true\n"})
    make(tmp_path / "c", separate + '[verifier.environment]\ndocker_image = "acme/v:1"\n', **DOCKERFILE)
    make(tmp_path / "d", "", **DOCKERFILE)
    found = dict(images_of(tmp_path))
    assert (found.pop("base"), found.pop("acme-v-1")) == ("docker://base", "docker://acme/v:1")
    assert sorted(found.values()) == [str(tmp_path / "b/tests"), str(tmp_path / "c/environment")]
    make(tmp_path / "e", "", **{"environment/Dockerfile": "FROM base\nONBUILD RUN x\n"})
    with pytest.raises(ImageError, match="ONBUILD"):
        list(images_of(tmp_path))


def test_requests_put_each_bundle_before_its_request(tmp_path):
    class Service:
        def __init__(self):
            self.put = []

        def put_bundle(self, task):
            self.put.append(task.bundle())

    for name in "ab":
        make(tmp_path / name, NAMED.format(name))
    service = Service()
    for count, request in enumerate(requests(tmp_path, service, n=8, tags=["t"]), 1):
        assert len(service.put) == count and request.task["bundle"] == service.put[-1].digest
        assert (request.handler, request.n, request.tags) == ("harbor", 8, ["t"])
    assert all(isinstance(bundle, Bundle) for bundle in service.put) and len(service.put) == 2


def test_a_suite_with_a_fault_is_no_dataset(tmp_path):
    make(tmp_path / "set" / "a", "[agent]\ntimeout_sec = 0\n")
    with pytest.raises(DatasetError, match=r"set/a/task\.toml: agent\.timeout_sec"):
        list(read(tmp_path / "set"))
