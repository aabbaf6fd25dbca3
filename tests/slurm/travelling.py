"""A tree of files that is made step by step, the same one each time, and how two of them are compared.

It runs in sandboxes, where `build.py SEED STEP CROWD DIRECTORY` makes what a step makes, and
`build.py compare ONE OTHER` prints what differs.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import stat
import sys
from pathlib import Path

SPARSE = 2**20
PLAIN = {"plain": 0o644, "run": 0o755, "secret": 0o400, "odd \n\udcff'": 0o640}
"""Files and their modes; of one the name is no text."""


def make(seed: int, step: int, crowd: int, top: Path) -> None:
    """One directory; as a whole or not at all, and again without harm."""
    done, draft = top / str(step), top / f"{step}.draft"
    if done.exists():
        return
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    draw = random.Random(seed * 1000 + step)
    for name, mode in PLAIN.items():
        path = draft / name
        path.write_bytes(draw.randbytes(draw.randrange(60_000)))
        path.chmod(mode)
        os.utime(path, (step, 1_500_000_000 + step))
    (draft / "twin").hardlink_to(draft / "plain")
    (draft / "link").symlink_to("run")
    (draft / "dangling").symlink_to("/nowhere/at all")
    (draft / "shut").mkdir(0o700)
    (draft / "sticky").mkdir()
    (draft / "sticky").chmod(0o1777)
    with (draft / "sparse").open("wb") as file:
        file.seek(SPARSE)
        file.write(draw.randbytes(4096))
    (draft / "crowd").mkdir()
    for number in range(crowd):
        (draft / "crowd" / str(number)).write_bytes(draw.randbytes(draw.randrange(64)))
    draft.rename(done)


def listing(top: Path) -> dict[str, str]:
    """All that is below a directory: name → what it is."""
    found: dict[str, str] = {}
    for path in top.rglob("*"):
        status = path.lstat()
        text = f"{stat.filemode(status.st_mode)} {status.st_uid}"
        if path.is_symlink():
            text += f" → {path.readlink()}"
        elif path.is_file():
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            sparse = status.st_blocks * 512 < status.st_size // 2
            text += f" {status.st_nlink} links, {status.st_size} bytes, sparse {sparse}: {content}"
            if path.name in PLAIN:
                text += f" of {status.st_mtime_ns}"
        found[str(path.relative_to(top))] = text
    return found


def differences(one: Path, other: Path) -> list[str]:
    """What is in one of them alone, or otherwise in the other."""
    first, second = listing(one), listing(other)
    return [
        f"{name!r}: {first.get(name)} / {second.get(name)}"
        for name in sorted(first.keys() | second.keys())
        if first.get(name) != second.get(name)
    ]


if __name__ == "__main__":
    if sys.argv[1] == "compare":
        told = differences(Path(sys.argv[2]), Path(sys.argv[3]))
        print("\n".join([*told[:5], f"{len(told)} differences"]))
    else:
        make(*map(int, sys.argv[1:4]), Path(sys.argv[4]))
