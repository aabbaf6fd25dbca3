"""Building, listing, inspecting and pruning images: the real Apptainer through the real command line."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rollout import cli
from sandbox import paths
from sandbox.images import ImageConfig, ImageStore, image_config, squashfs
from sandbox.images.build import has_post, local_images
from sandbox.images.environment import docker_environment
from sandbox.runtimes.apptainer import Apptainer
from tests.helpers.sandboxes import add_programs

pytestmark = pytest.mark.apptainer

REPOSITORY = Path(__file__).resolve().parents[2]
PATIENCE_S = 120  # how long a test waits for another process; a busy machine needs a part of it
TOOLS = ("dash", "cat", "ls", "mkdir", "sleep")


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A ROLLOUT_HOME and cache of one's own with the installed Apptainer; in /tmp, for root's builds with
    %post run as another user, who may not enter pytest's directories.
    """
    program = Apptainer().program()
    assert program is not None
    directory = Path(tempfile.mkdtemp(prefix="imgt-", dir="/tmp"))
    directory.chmod(0o755)
    tools = paths.tool_path()
    monkeypatch.setenv("ROLLOUT_APPTAINER", program)
    monkeypatch.setenv("PATH", tools)
    monkeypatch.setenv("ROLLOUT_HOME", str(directory / "home"))
    monkeypatch.setenv("ROLLOUT_IMAGE_CACHE", str(directory / "cache"))
    monkeypatch.setenv("TMPDIR", str(directory / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    (directory / "tmp").mkdir(mode=0o1777)
    (directory / "tmp").chmod(0o1777)
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def tree(home: Path) -> Path:
    """A root file system: a shell and four tools of this machine with the libraries they need."""
    root = home / "tree"
    for name in (
        "usr/bin",
        "etc",
        "dev",
        "proc",
        "sys",
        "tmp",
        "opt/conda/lib/python3.12/site-packages/ipykernel",
    ):
        (root / name).mkdir(parents=True)
    (root / "opt/conda/lib/python3.12/site-packages/ipykernel/__init__.py").touch()
    (root / "bin").symlink_to("usr/bin")
    add_programs(root, TOOLS)
    return root


def images(*arguments: object) -> Result:
    """`rollout images …`."""
    return CliRunner().invoke(cli.main, ["images", *map(str, arguments)])


def built(*arguments: object) -> Path:
    """The file that `rollout images build NAME …` made."""
    result = images("build", "--quiet", *arguments)
    assert result.exit_code == 0, result.output
    return paths.rollout_home() / "images" / f"{arguments[0]}.sif"


def refused(*arguments: object) -> str:
    """What `rollout images build …` says when it fails; it must leave nothing."""
    before = files(paths.rollout_home().parent)
    result = images("build", "--quiet", *arguments)
    assert result.exit_code == 1, result.output
    assert files(paths.rollout_home().parent) == before
    return " ".join(result.output.split())


def files(home: Path) -> list[str]:
    """The files below the images and the temporary directory."""
    places = (home / "tmp", home / "home/images")
    return sorted(str(path) for place in places for path in place.rglob("*"))


def definition(home: Path, start: Path | str, rest: str = "") -> Path:
    """A definition file that starts from a directory."""
    file = home / "image.def"
    file.write_text(f"Bootstrap: localimage\nFrom: {start}\n{rest}")
    return file


DOCKER_ENV = [
    "COLOUR=blue",
    "PATH=/opt/conda/bin:/usr/bin:/bin",
    "EMPTY=",
    'AWKWARD=a "b" $HOME `date` \\ {x} =1',
]
DOCKER_CONFIG = {
    "Env": DOCKER_ENV,
    "WorkingDir": "/app",
    "User": "agent:users",
    "Shell": ["/bin/dash", "-c"],
    "Labels": {"kept": "yes"},
}


def docker_archive(home: Path, tree: Path) -> Path:
    """What `docker save` writes: a manifest, a configuration and one layer, with a file of another user."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as archive:
        archive.add(tree, arcname=".")
        entry = tarfile.TarInfo("etc/other")
        entry.uid, entry.gid, entry.size = 33, 33, 5
        archive.addfile(entry, io.BytesIO(b"other"))
    layer_name = hashlib.sha256(layer.getvalue()).hexdigest()
    rootfs = {"type": "layers", "diff_ids": [f"sha256:{layer_name}"]}
    config = json.dumps(
        {"architecture": "amd64", "os": "linux", "config": DOCKER_CONFIG, "rootfs": rootfs}
    ).encode()
    config_name = f"{hashlib.sha256(config).hexdigest()}.json"
    manifest = [{"Config": config_name, "RepoTags": ["t:1"], "Layers": [f"{layer_name}/layer.tar"]}]
    file = home / "image.tar"
    with tarfile.open(file, "w") as archive:
        for name, content in (
            ("manifest.json", json.dumps(manifest).encode()),
            (config_name, config),
            (f"{layer_name}/layer.tar", layer.getvalue()),
        ):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return file


def output_of(image: Path, command: str) -> str:
    """Of a shell command in a container of the image, unpacked as sandboxes have it."""
    rootfs = ImageStore().rootfs(str(image))
    argv = [Apptainer().program(), "-q", "exec", "--userns", "--containall", rootfs, "/bin/sh", "-c", command]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S, cwd="/")
    assert done.returncode == 0, done.stderr
    return done.stdout


# -- sources -----------------------------------------------------------------------------------


def test_a_definition_file_is_built_with_its_labels_arguments_and_post_section(home, tree):
    rest = """
%post
    cat /etc/hostname >/dev/null || true
    mkdir /made-by-post
%labels
    colour {{ COLOUR }}
%environment
    export SHAPE=round
"""
    file = definition(home, "{{ ROOT }}", rest)
    image = built("own", file, "--build-arg", f"ROOT={tree}", "--build-arg", "COLOUR=red")
    assert "made-by-post" in output_of(image, "ls /")
    facts = json.loads(images("inspect", "own", "--json").output)
    assert (facts["kind"], facts["labels"]["colour"], facts["note"]) == ("SIF", "red", None)
    assert "export SHAPE=round" in "".join(facts["environment"].values())
    assert facts["has"] == {"bash": False, "git": False, "python3": False, "ipykernel": True}
    assert facts["unpacked_bytes"] > facts["bytes"] > 0
    shown = images("inspect", str(image)).output
    assert "colour: red" in shown and "ipykernel: yes" in shown
    assert files(home) == [str(image)]


def test_a_directory_is_built(home, tree):
    (tree / "etc/mine").write_text("mine")
    assert output_of(built("own", tree), "cat /etc/mine") == "mine"


@pytest.mark.parametrize("post", ["", "%post\n    mkdir /made-by-post\n"])
def test_an_image_is_built_on_top_of_another(home, tree, post):
    (tree / "etc/mine").write_text("mine")
    image = built("second", definition(home, built("first", tree), post))
    assert output_of(image, "cat /etc/mine") == "mine"
    assert ("made-by-post" in output_of(image, "ls /")) is bool(post)


def test_a_docker_archive_is_built(home, tree):
    image = built("own", docker_archive(home, tree))
    assert output_of(image, "cat /etc/other") == "other"
    assert "COLOUR" in "".join(json.loads(images("inspect", "own", "--json").output)["environment"].values())
    unpacked = home / "unpacked"
    squashfs.unpack(image, unpacked)
    declared = dict(line.split("=", 1) for line in DOCKER_ENV)
    assert docker_environment(unpacked) == declared
    assert image_config(image) == ImageConfig(
        declared, "/app", "agent:users", ("/bin/dash", "-c"), {"kept": "yes"}
    )


def test_what_an_image_says_of_itself_is_read_as_text_and_through_no_link(tree):
    own = tree / ".singularity.d"
    own.mkdir()
    hostile = {
        "env": {"GOOD": "1", "B D": "2", "LIST": ["3"], "NUL": "\0"},
        "workdir": "relative",
        "user": "root\nBOOM=1",
        "shell": "sh",
        "labels": [],
    }
    (own / "rollout.json").write_text(json.dumps(hostile))
    assert image_config(tree) == ImageConfig(env={"GOOD": "1"})
    (own / "rollout.json").write_text("[" * 100_000)
    assert image_config(tree) == ImageConfig()
    (tree.parent / "outside").write_text('{"workdir": "/stolen"}')
    (own / "rollout.json").unlink()
    (own / "rollout.json").symlink_to(tree.parent / "outside")
    assert image_config(tree) == ImageConfig()


def test_a_truncated_archive_is_refused_in_words(home, tree):
    whole = docker_archive(home, tree)
    cut = home / "cut.tar"
    for content in (whole.read_bytes()[: 1 << 20], gzip.compress(whole.read_bytes())[: 1 << 20]):
        cut.write_bytes(content)
        assert "is cut off or damaged" in refused("own", cut)


def test_variables_are_read_as_text_and_through_no_link(tmp_path):
    place = tmp_path / "image" / ".singularity.d" / "env"
    place.mkdir(parents=True)
    file = place / "10-docker2singularity.sh"
    file.write_text('export A="${A:-"$(touch /tmp/x)"}"\nexport B="${C:-"1"}"\nrm -rf /\nexport PATH="/x"\n')
    assert docker_environment(tmp_path / "image") == {"A": "$(touch /tmp/x)", "PATH": "/x"}
    for part in (file, place):
        moved = tmp_path / f"moved-{part.name}"
        part.rename(moved)
        part.symlink_to(moved)
        assert docker_environment(tmp_path / "image") == {}
        part.unlink()
        moved.rename(part)


def test_an_image_file_is_copied_and_a_name_is_only_replaced_by_force(home, tree):
    first = built("first", tree)
    second = built("second", first)
    assert second.read_bytes() == first.read_bytes()
    (tree / "etc/mine").touch()
    message = refused("second", tree)
    assert "exists" in message and "--force" in message
    assert built("second", tree, "--force").read_bytes() != first.read_bytes()


@pytest.mark.parametrize("scheme", ["docker", "oras", "library"])
def test_a_registry_that_cannot_be_reached_is_an_error_that_says_what_to_do(home, scheme):
    message = refused("own", f"{scheme}://127.0.0.1:1/some/image:latest")
    assert f"cannot build image 'own' from {scheme}://127.0.0.1:1/some/image" in message
    assert "docker save" in message
    if scheme != "library":  # that one has no server configured at all
        assert "connection refused" in message


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("text.sif", b"no image", "neither a SIF nor a squashfs file"),
        ("plain.tar", None, "unpack it and give the directory"),
        ("empty", ..., "no root file system"),
        ("absent.sif", "", "no such file"),
    ],
)
def test_a_source_that_is_none_is_refused(home, name, content, message):
    path = home / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is None:
        with tarfile.open(path, "w") as archive:
            archive.addfile(tarfile.TarInfo("etc/passwd"))
    elif content is ...:
        path.mkdir()
    assert message in refused("own", path)


def test_an_unknown_scheme_names_the_known_ones(home):
    assert "docker://, oras://, library://" in refused("own", "shub://some/image")


@pytest.mark.parametrize("name", ["../up", ".hidden", "a b", "", "x" * 200, "own.sif"])
def test_a_name_that_no_image_can_have_is_refused(home, tree, name):
    assert "image name" in refused(name, tree)


def test_build_arguments_are_only_for_definition_files(home, tree):
    assert "definition files" in refused("own", tree, "--build-arg", "A=b")
    assert images("build", "own", tree, "--build-arg", "A").exit_code == 2


def test_sections_and_starting_points_of_a_definition_file_are_found(tmp_path):
    stages = definition(tmp_path, "{{ROOT}}", "Stage: two\nBootstrap: docker\nFrom: /\n%post\n  true\n")
    assert local_images(stages, {"ROOT": str(tmp_path)}) == {1: tmp_path}
    assert local_images(stages, {}) == {}
    assert has_post(stages)
    assert not has_post(definition(tmp_path, "/", "%environment\n  A=%post\n"))


# -- failure -----------------------------------------------------------------------------------


def test_a_failing_post_section_leaves_nothing_and_shows_its_last_lines(home, tree):
    file = definition(home, tree, "%post\n    ls /there/is/no/such/place\n")
    message = refused("own", file)
    assert "/there/is/no/such/place" in message
    assert "root builds as uid" not in message  # it has nothing to do with that


def test_a_build_beyond_its_time_is_ended_with_all_its_processes(home, tree):
    marker = f"3600.{os.getpid()}"
    file = definition(home, tree, f"%post\n    sleep {marker}\n")
    assert "longer than 3 s; allow more with --timeout" in refused("own", file, "--timeout", "3")
    assert not running(marker)


def test_an_interrupted_build_leaves_nothing(home, tree):
    marker = f"3601.{os.getpid()}"
    file = definition(home, tree, f"%post\n    sleep {marker}\n")
    code = "from rollout.cli import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "images", "build", "own", str(file)],
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )
    wait_until(lambda: running(marker))
    process.terminate()
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, errors
    assert "interrupted" in errors
    assert not running(marker)
    assert files(home) == []


def test_a_signal_during_the_clean_up_leaves_a_whole_image_and_nothing_else(home, tree):
    """One as the removal begins, and one as it begins anew: what `timeout` and a service manager send."""
    code = """
import os, shutil, signal
from rollout.cli import main
from sandbox import trees
remove = shutil.rmtree
def interrupted(path, **options):
    os.kill(os.getpid(), signal.SIGTERM)
    remove(path, **options)
trees.shutil.rmtree = interrupted
main()
"""
    command = [sys.executable, "-c", code, "images", "build", "own", str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, timeout=PATIENCE_S)
    assert done.returncode == 130, done.stderr
    assert "nothing unfinished was left" in done.stderr
    assert files(home) == [str(home / "home/images/own.sif")]
    assert images("inspect", "own").exit_code == 0


def test_pruning_removes_what_a_killed_build_left(home, tree):
    marker = f"3602.{os.getpid()}"
    file = definition(home, tree, f"%post\n    sleep {marker}\n")
    code = "from rollout.cli import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "images", "build", "own", str(file)],
        stderr=subprocess.DEVNULL,
        cwd=REPOSITORY,
    )
    wait_until(lambda: running(marker))
    assert "left by a killed build" not in images("prune").output  # it is being built
    process.kill()
    process.wait(PATIENCE_S)
    wait_until(lambda: not building(home) and not running(marker))
    (home / "home/images/.own.building").touch()
    assert images("prune", "--dry-run").output.count("would remove /") == 2
    assert images("prune").output.count("left by a killed build") == 2
    assert files(home) == []


def commands() -> Iterator[str]:
    """The command lines of all processes."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal():
                yield (entry / "cmdline").read_text(errors="replace")


def running(marker: str) -> bool:
    """Whether a process sleeps so long."""
    return any(command == f"sleep\0{marker}\0" for command in commands())


def building(home: Path) -> bool:
    """Whether a process of a build still runs."""
    return any(str(home / "tmp") in command for command in commands())


def wait_until(condition) -> None:
    """Raise AssertionError if that does not come true."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.02)


# -- list, prune -------------------------------------------------------------------------------


def test_list_shows_images_and_what_is_unpacked(home, tree):
    built("own", tree)
    shutil.copytree(tree, home / "home/images/plain", symlinks=True)
    shutil.copy(tree / "usr/bin/dash", home / "home/images/broken.sif")
    (listed,) = [i for i in json.loads(images("list", "--json").output)["images"] if i["name"] == "own"]
    assert (listed["kind"], listed["unpacked"]) == ("SIF", [])
    store = ImageStore()
    with store.hold(store.rootfs("own")):
        facts = json.loads(images("list", "--json").output)
        assert [(i["name"], i["kind"]) for i in facts["images"]] == [
            ("broken", "damaged"),
            ("own", "SIF"),
            ("plain", "directory"),
        ]
        (unpacked,) = facts["images"][1]["unpacked"]
        assert unpacked["in_use"] == "in use"
        assert unpacked["directory"] == str(home / "cache" / facts["images"][1]["hash"])
        assert 0 <= time.time() - unpacked["last_used"] < PATIENCE_S
        assert facts["cache"]["bytes"] == unpacked["bytes"] > 0
    shown = images("list").output
    assert "as it is" in shown and f"cache {home}" in shown
    (row,) = [line for line in shown.splitlines() if line.startswith("own")]
    assert facts["images"][1]["hash"] in row, "in a pipe a row is a line, whole"
    Path(listed["path"]).unlink()
    (nameless,) = json.loads(images("list", "--json").output)["cache"]["of_no_named_image"]
    assert nameless["source"] == listed["path"]


def test_prune_keeps_what_is_in_use_and_the_images_themselves(home, tree):
    image = built("own", tree)
    store = ImageStore()
    rootfs = store.rootfs("own")
    assert images("prune").exit_code == 0  # within the quota
    with store.hold(rootfs):
        assert f"kept {rootfs}: in use" in images("prune", "--all").output
    assert f"would remove {rootfs}" in images("prune", "--all", "--dry-run").output
    assert rootfs.is_dir()
    assert f"removed {rootfs}" in images("prune", "--all").output
    assert not rootfs.exists() and image.exists()
