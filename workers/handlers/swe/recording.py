"""What pytest said itself, apart from what was printed: the host's side of `rollout_recorder`.

The log parsers believe every line that looks like a result, and code under test can print. So pytest's
outcomes are also taken from a plug-in that authenticates them with a key which it alone has read, before any
code of the repository ran. A line that claims a pass the plug-in knows nothing of is put into lower case, so
that no parser takes it for a result; a run that ended without the plug-in's word, by `os._exit(0)` say, has
none. At the end the plug-in runs a test that fails, to see whether pytest still says so.

Code under test shares a process with pytest and could, with effort, deceive the plug-in: see docs/swe.md.
"""

from __future__ import annotations

import hmac
import json
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import resources

from sandbox.client import SandboxClient
from sandbox.errors import SandboxRequestError

PLUGIN = "rollout_recorder"
MARK = ">>>>>"
"""What the official harness's marks begin with; only the service writes it into a log."""
MAX_OUTCOMES_BYTES = 32 << 20
MAX_SUSPICIONS, MAX_SUSPICION = 20, 200
"""How many are kept, and how many characters of each."""
MAX_DASHES = 50
"""Of a test's name."""

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f]|\[\d+m")
_CLAIMS = re.compile(r"PASSED|XFAIL|SKIPPED")
_COUNTED = re.compile(r"SKIPPED \[\d+\] ")
_BEFORE = re.compile(r"(PASSED|XFAIL|SKIPPED) (.*)")
_AFTER = re.compile(r"(.*?) (PASSED|XFAIL|SKIPPED)(?: .*)?")


@dataclass(frozen=True)
class Outcomes:
    """What pytest said of its tests."""

    statuses: dict[str, str]
    """By name, as pytest's summary has it: PASSED, FAILED, ERROR, SKIPPED, XFAIL, XPASS."""
    changed: bool = False
    """A test that fails was reported as passed: code under test has changed pytest."""
    suspicious: list[str] = field(default_factory=list)
    """What the plug-in found changed in the process, in words."""


class Recorder:
    """The plug-in in one sandbox, for one run."""

    def __init__(self, directory: str) -> None:
        """`directory`: to be made in the sandbox."""
        self._directory = directory
        self._key = secrets.token_bytes(32)

    async def install(self, sandbox: SandboxClient) -> list[str]:
        """Put it there; answers shell lines that have pytest load it."""
        source = resources.files(__package__).joinpath(f"{PLUGIN}.py").read_bytes()
        await sandbox.write_file(f"{self._directory}/{PLUGIN}.py", source)
        await sandbox.write_file(f"{self._directory}/key", self._key, 0o600)
        return [
            f"export PYTHONPATH={self._directory}${{PYTHONPATH:+:$PYTHONPATH}}",
            f'export PYTEST_ADDOPTS="-p {PLUGIN} ${{PYTEST_ADDOPTS-}}"',
        ]

    async def outcomes(self, sandbox: SandboxClient) -> Outcomes | None:
        """What pytest said; None when the run did not end by itself."""
        try:
            raw = await sandbox.read_file(f"{self._directory}/outcomes", MAX_OUTCOMES_BYTES)
        except SandboxRequestError:
            return None
        return read_outcomes(raw, self._key)

    async def was_loaded(self, sandbox: SandboxClient) -> bool:
        """Whether pytest has loaded it at all: it takes the key away first."""
        return (await sandbox.stat(f"{self._directory}/key")).kind is None


def read_outcomes(raw: bytes, key: bytes) -> Outcomes | None:
    """What the plug-in wrote; None when it was not written with the key."""
    signature, _, body = raw.partition(b"\n")
    if not hmac.compare_digest(signature, hmac.new(key, body, "sha256").hexdigest().encode()):
        return None
    told = json.loads(body)
    suspicious = [str(item)[:MAX_SUSPICION] for item in told.get("suspicious", [])[:MAX_SUSPICIONS]]
    return Outcomes(told["statuses"], told["probe"] == "passed", suspicious)


def without_marks(output: str) -> str:
    """The output of tests without what only the service may say."""
    return output.replace(MARK, "> > >")


def without_forgeries(output: str, outcomes: dict[str, str]) -> str:
    """The output with every pass, skip and expected failure in lower case that pytest did not report."""
    return "\n".join(_kept(line, outcomes) for line in output.split("\n"))


def without_unmarked_failures(output: str, expected: Callable[[str], bool]) -> str:
    """The output with every expected failure as a failure that the test's own file does not expect.

    Code under test can call `pytest.xfail`, or raise what pytest takes for it.

    Args:
        expected: Whether the file of the test of that name marks it.
    """
    return "\n".join(_judged(line, expected) for line in output.split("\n"))


def _judged(line: str, expected: Callable[[str], bool]) -> str:
    seen = _CONTROL.sub("", line)
    for form in (_BEFORE, _AFTER):
        if (claim := form.fullmatch(seen)) and "XFAIL" in claim.groups():
            name = claim[2] if form is _BEFORE else claim[1]
            words = name.split()
            if not words or not expected(words[0]):
                return seen.replace("XFAIL", "FAILED")
            return line
    return seen.replace("XFAIL", "xfail") if "XFAIL" in seen else line


def _kept(line: str, outcomes: dict[str, str]) -> str:
    # As the parsers see it, some of which take colours and control characters away.
    seen = _CONTROL.sub("", line)
    if not _CLAIMS.search(seen) or _COUNTED.match(seen):
        return line
    if (claim := _BEFORE.fullmatch(seen)) and _reported(claim[1], claim[2], outcomes):
        return line
    if (claim := _AFTER.fullmatch(seen)) and outcomes.get(claim[1].strip()) == claim[2]:
        return line
    return _CLAIMS.sub(lambda found: found[0].lower(), seen)


def _reported(status: str, text: str, outcomes: dict[str, str]) -> bool:
    """Whether `text`, a name and perhaps ` - ` and a reason, is of a test with that status."""
    # A longer name than that is not believed: the line may be made to take long.
    parts = text.rstrip().split(" - ", MAX_DASHES)[:MAX_DASHES]
    return any(outcomes.get(" - ".join(parts[:count])) == status for count in range(1, len(parts) + 1))
