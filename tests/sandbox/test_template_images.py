"""What a clone of the template makes of an image, and of the links in it."""

from __future__ import annotations

import os
import subprocess

import pytest

from sandbox import trees
from sandbox.errors import SandboxStartError
from sandbox.runtimes import Runtime
from sandbox.runtimes.apptainer import MOST_FAILURES
from tests.helpers.templates import CONFIG, ends, fresh_node, places_of, template_of

pytestmark = pytest.mark.apptainer
node = pytest.fixture(fresh_node, name="node")


def test_an_image_that_cannot_be_mounted_leaves_nothing(node):
    broken = node.image()
    launch = node.launch(broken)
    trees.remove(broken)
    broken.write_text("")
    with pytest.raises(SandboxStartError, match="overlay"):
        node.clone(launch)
    broken.unlink()
    node.images.remove(broken)
    process, stdin = node.clone()
    stdin.close()
    assert ends(process)


def test_what_an_image_lacks_is_made_once_for_all(node):
    launch = node.launch(node.image())
    process, stdin = node.clone(launch)
    assert {"/workspace", "/run/sbx", "/sbx"} <= set(places_of(process))
    assert not (launch.scratch / "overlay/upper/workspace").exists()
    stdin.close()
    assert ends(process)


@pytest.mark.parametrize("leads_to", ["/proc/self/fd/9/bin", "/sbx-python/bin", "/run"])
def test_no_link_of_an_image_leads_to_what_the_server_is_made_of(node, leads_to):
    """Through descriptors of the process that mounts, too: the image has directories of these names."""
    image = node.image()
    (image / leads_to[1:]).mkdir(parents=True)
    (image / "var").mkdir()
    (image / "var/tmp").symlink_to(leads_to)
    with pytest.raises(SandboxStartError, match="a link of the image leads from /var/tmp"):
        node.clone(node.launch(node.own(image)))


def test_no_link_in_what_is_mounted_is_followed(node):
    """The image leads to a directory of its own; there an earlier agent's files are mounted, with a link."""
    image = node.image()
    (image / "tmp/step").mkdir(parents=True)
    (image / "var").mkdir()
    (image / "var/tmp").symlink_to("/tmp/step")
    launch = node.launch(node.own(image))
    (launch.scratch / "tmp/step").symlink_to("/proc/self/fd/9")
    with pytest.raises(SandboxStartError, match="no place to mount on at /tmp/step"):
        node.clone(launch)
    (launch.scratch / "tmp/step").unlink()
    (launch.scratch / "tmp/step").mkdir()
    process, stdin = node.clone(launch)
    mounts = places_of(process)
    assert "/tmp/step" in mounts and len(mounts) == len(set(mounts))
    assert not [place for place in mounts if place.startswith(("/sbx/", "/sbx-python/", "/run/sbx/"))]
    stdin.close()
    assert ends(process)


@pytest.mark.parametrize(
    "before", [None, "root:x:0:0:root:/root:/bin/sh\n", "root:x:0:0:root:/root:/bin/sh", "x" * (2 << 20)]
)
def test_the_sandboxes_user_has_a_name_where_the_image_knows_none(node, before):
    image = node.image()
    (image / "etc").mkdir()
    if before is not None:
        (image / "etc/passwd").write_text(before)
    launch = node.launch(node.own(image))
    process, stdin = node.clone(launch)
    written = launch.scratch / "overlay/upper/etc/passwd"
    number = os.getuid() if node.runtime.run_as is None else node.runtime.run_as
    if before and len(before) > 1000:
        assert not written.exists()
    else:
        line = f"sandbox:x:{number}:{number}::/home/sandbox:/bin/sh"
        assert written.read_text().splitlines() == [*(before or "").splitlines(), line]
    stdin.close()
    assert ends(process)


@pytest.mark.parametrize(
    ("link", "leads_to"),
    [("home", "sbx"), ("home/sandbox", "../sys/devices"), ("var/tmp", "/workspace")],
)
def test_no_link_leads_to_what_lies_beneath_an_image(node, link, leads_to):
    """Where it leads is not there, in the image: so a directory takes its place."""
    image = node.image()
    (image / link).parent.mkdir(exist_ok=True)
    (image / link).symlink_to(leads_to)
    process, stdin = node.clone(node.launch(node.own(image)))
    mounts = places_of(process)
    assert {"/home/sandbox", "/var/tmp", "/run/sbx"} <= set(mounts) and len(mounts) == len(set(mounts))
    stdin.close()
    assert ends(process)


def test_no_link_of_an_earlier_agent_leads_to_what_lies_beneath_its_image(node):
    launch = node.launch()
    upper = launch.scratch / "overlay/upper"
    upper.mkdir()
    (upper / "home").symlink_to("sbx")
    node.own(upper)
    process, stdin = node.clone(launch)
    assert "/home/sandbox" in places_of(process)
    stdin.close()
    assert ends(process)


def test_what_a_clone_says_of_its_image_costs_no_other_one_the_template(node, caplog):
    """It starts without one, with nothing in its overlay of what the clone had begun."""
    end = '    if "/0000000" in request["overlay"]:\n        raise SystemExit("no such image")\n'
    node.change("    os.chroot(root)\n", f"{end}    os.chroot(root)\n")
    for _ in range(MOST_FAILURES + 1):
        launch = node.launch(node.image())
        left = launch.scratch / "overlay/upper/home"
        process, stdin = node.runtime.start(launch, ["/bin/sh", "-c", "exit 7"], CONFIG)
        with process, stdin:
            assert isinstance(process, subprocess.Popen) and process.wait(60) == 7
        assert left.is_dir()  # made by the way that knows of nothing beneath
    assert caplog.text.count("without a template: no such image") == MOST_FAILURES + 1


@pytest.mark.parametrize("is_snapshots", [False, True])
def test_what_a_clone_has_begun_is_removed_but_not_what_a_snapshot_holds(node, monkeypatch, is_snapshots):
    node.change("    os.chroot(root)\n", '    raise SystemExit("no such image")\n')
    launch, seen = node.launch(), []
    if is_snapshots:
        (launch.scratch / "overlay/upper/kept").mkdir(parents=True)
        node.own(launch.scratch / "overlay/upper")
    monkeypatch.setattr(
        Runtime, "start", lambda *_: seen.append(sorted((launch.scratch / "overlay").rglob("*")))
    )
    node.runtime.start(launch, ["true"], CONFIG)
    names = [path.name for path in seen[0]]
    assert ("kept" in names) == is_snapshots and (names == ["merged"]) != is_snapshots


def test_one_that_has_lost_what_lies_beneath_images_does_without(node):
    node.clone()[1].close()
    template = template_of(node.state)
    trees.remove(node.state / "template/beneath")
    process, stdin = node.clone(node.launch(node.image()))
    assert {"/workspace", "/run/sbx", "/sbx"} <= set(places_of(process))
    assert template_of(node.state) == template
    stdin.close()
    assert ends(process)
