"""A certificate for the head's Redis, by which clients tell it from whoever took its port while it was away.

It signs itself, is made anew at each start of the head, and lies in the run directory, which every client
reads and nobody else: a stranger has no key for it, so nobody tells a stranger the password.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import structlog

log = structlog.get_logger("slurm")

VARIABLE = "ROLLOUT_SLURM_TLS"
"""`0`: Redis without TLS, as where its traffic must cost nothing and all users of the cluster are trusted."""
LIMIT_S = 60.0


def make(directory: Path, address: str, server: Path) -> tuple[Path, Path] | None:
    """Certificate and key for a Redis at this address; None (said in the log) where there can be none.

    Args:
        server: The binary, which may have been built without TLS.
    """
    openssl = shutil.which("openssl")
    if os.environ.get(VARIABLE) == "0":
        why = f"{VARIABLE} is 0"
    elif openssl is None:
        why = "openssl is not installed"
    elif not _has_tls(server):
        why = f"{server} was built without TLS"
    else:
        return _make(openssl, directory, address)
    log.warning("Redis is without TLS: who takes its port while it is away is told its password", reason=why)
    return None


def _has_tls(server: Path) -> bool:
    """Whether the server knows its settings: without a port it says no more and ends."""
    answer = subprocess.run(
        [str(server), "-"],
        input="port 0\ntls-port 0\nsave ''\n",
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd="/",
    )
    return "not listen anywhere" in answer.stdout + answer.stderr


def _make(openssl: str, directory: Path, address: str) -> tuple[Path, Path]:
    key, certificate = directory / "tls.key", directory / "tls.crt"
    drafts = [path.with_suffix(path.suffix + ".new") for path in (key, certificate)]
    for draft in drafts:
        draft.unlink(missing_ok=True)
        draft.touch(mode=0o600)
    command = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "3650", "-subj", "/CN=rollout", "-addext", f"subjectAltName=IP:{address}"]
    command += ["-keyout", str(drafts[0]), "-out", str(drafts[1])]
    subprocess.run(command, check=True, capture_output=True, timeout=LIMIT_S)
    for draft, path in zip(drafts, (key, certificate), strict=True):
        draft.replace(path)
    return certificate, key
