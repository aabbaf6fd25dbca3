"""The base image and the script that makes it."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest

from sandbox.images import ImageStore
from sandbox.runtimes.apptainer import Apptainer

REPOSITORY = Path(__file__).resolve().parents[2]
PATIENCE_S = 120  # a busy machine needs a part of it


@pytest.mark.apptainer
def test_the_base_image_has_what_agents_and_their_tools_need():
    check = (
        "python3 -c 'import ipykernel, jupyter_client, pytest' && rg --version >/dev/null && git --version"
    )
    rootfs = ImageStore().rootfs("base")
    with ImageStore().hold(rootfs):
        argv = [
            Apptainer().program(),
            "-q",
            "exec",
            "--userns",
            "--containall",
            rootfs,
            "/bin/sh",
            "-c",
            check,
        ]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S, cwd="/")
    assert done.returncode == 0, done.stderr
    compiled = rootfs.glob("usr/lib/python3/dist-packages/ipykernel/__pycache__/kernelapp.*.pyc")
    assert list(compiled), "IPython starts three times slower without bytecode"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A ROLLOUT_HOME of one's own."""
    monkeypatch.setenv("ROLLOUT_HOME", str(tmp_path / "home"))
    return tmp_path


@pytest.fixture
def no_apt(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that cannot make a Debian image: all programs but apt-get."""
    farm = home / "programs"
    farm.mkdir()
    for directory in ("/usr/bin", "/bin"):
        for program in Path(directory).iterdir():
            if program.name != "apt-get" and not (farm / program.name).is_symlink():
                (farm / program.name).symlink_to(program)
    monkeypatch.setenv("PATH", str(farm))


def set_up_base(*arguments: str) -> subprocess.CompletedProcess[str]:
    """deploy/setup/image.sh."""
    script = REPOSITORY / "deploy/setup/image.sh"
    return subprocess.run(
        [script, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=PATIENCE_S
    )


def test_a_base_image_of_an_older_recipe_is_made_anew_and_kept_where_that_fails(home: Path, no_apt: None):
    image = home / "home/images/base.sif"
    image.parent.mkdir(parents=True)
    image.write_text("old")
    (image.parent / "base.recipe").write_text("older\n")
    done = set_up_base()
    assert done.returncode == 0, done.stdout
    assert "missing: the new base image (no apt-get here" in done.stdout and "stays in use" in done.stdout
    assert image.read_text() == "old"
    image.unlink()
    assert set_up_base().returncode == 1  # nothing to fall back on


def test_a_base_image_of_this_recipe_is_left_alone(home: Path, no_apt: None):
    image = home / "home/images/base.sif"
    image.parent.mkdir(parents=True)
    image.write_text("mine")
    recipe = [REPOSITORY / "sandbox/recipes" / name for name in ("base.def", "base.packages")]
    content = b"".join(path.read_bytes() for path in [*recipe, REPOSITORY / "deploy/setup/image.sh"])
    (image.parent / "base.recipe").write_text(hashlib.sha256(content).hexdigest() + "\n")
    done = set_up_base()
    assert (done.returncode, "the base image is there" in done.stdout) == (0, True)
    assert "missing" in set_up_base("--force").stdout
