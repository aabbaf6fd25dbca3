"""`rollout images build --dataset`: the images that rows need, from recipes where there is no registry."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from rollout import cli
from sandbox.errors import ImageError
from sandbox.images import ImageStore
from tests.helpers.sandboxes import require_apptainer
from tests.unit.test_swe_rows import BENCH, R2E

pytestmark = pytest.mark.apptainer
NAME = "swebench-sweb.eval.x86_64.psf_1776_requests-1142"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installation of one's own, with our Apptainer."""
    require_apptainer()
    real = ImageStore().find("base").parent.parent
    monkeypatch.setenv("ROLLOUT_HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    if (real / "apptainer").exists():
        (tmp_path / "home/apptainer").symlink_to(real / "apptainer")
    return tmp_path / "home"


def build(*arguments: Any) -> Result:
    return CliRunner().invoke(cli.main, ["images", "build", *map(str, arguments)])


def rows(directory: Path, *some: dict[str, Any]) -> Path:
    path = directory / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in some))
    return path


def tiny(directory: Path, name: str) -> Path:
    """Sources of images: an archive as `docker save` makes them would do as well."""
    tree = directory / "tree"
    (tree / "usr").mkdir(parents=True)
    (tree / "usr/hello").write_text("hello")
    sources = directory / "sources"
    sources.mkdir()
    (sources / f"{name}.def").write_text(f"Bootstrap: localimage\nFrom: {tree}\n")
    return sources


def test_each_image_is_built_once_from_its_recipe_and_then_there(home: Path, tmp_path: Path) -> None:
    dataset, sources = rows(tmp_path, BENCH, BENCH), tiny(tmp_path, NAME)
    first = build("--dataset", dataset, "--sources", sources, "-q")
    assert first.exit_code == 0, first.output
    assert (home / f"images/{NAME}.sif").exists()
    assert "1 built, 0 there already, 0 failed" in first.output
    assert "0 built, 1 there already, 0 failed" in build("--dataset", dataset, "--sources", sources).output
    assert "1 built" in build("--dataset", dataset, "--sources", sources, "-q", "--force").output


def test_an_image_that_cannot_be_built_is_named_and_the_others_are_built(home: Path, tmp_path: Path) -> None:
    sources = tiny(tmp_path, NAME)
    (sources / "namanjain12-aiohttp_final-f0d74880deec8fcd982bce639c93c5e130d41198.tar").write_text(
        "no archive"
    )
    done = build("--dataset", rows(tmp_path, R2E, BENCH), "--sources", sources, "-q")
    assert done.exit_code == 1
    assert "namanjain12-aiohttp_final-f0d74880deec8fcd982bce639c93c5e130d41198: " in done.output
    assert "1 built, 0 there already, 1 failed" in done.output
    assert (home / f"images/{NAME}.sif").exists()


def test_a_row_of_no_known_layout_is_named(home: Path, tmp_path: Path) -> None:
    done = build("--dataset", rows(tmp_path, {"problem_statement": "x"}))
    assert done.exit_code == 1
    assert "line 1" in done.output and "base_commit" in done.output


def test_an_unknown_reader_is_refused_with_the_known_ones(home: Path, tmp_path: Path) -> None:
    done = build("--dataset", rows(tmp_path), "--reader", "nothing")
    assert done.exit_code == 2
    assert "'nothing'" in done.output and "swe" in done.output


def test_name_and_dataset_exclude_each_other_and_one_is_needed(home: Path, tmp_path: Path) -> None:
    assert "not both" in build("name", "source", "--dataset", rows(tmp_path)).output
    assert "give NAME and SOURCE" in build("name").output
    with pytest.raises(ImageError):
        ImageStore().find("name")
