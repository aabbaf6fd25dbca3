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
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import resources

from sandbox.client import SandboxClient
from sandbox.errors import SandboxRequestError
from workers.handlers.swe.testfiles import NAME_OF_UNITTEST

PLUGIN = "rollout_recorder"
MARK = ">>>>>"
"""What the official harness's marks begin with; only the service writes it into a log."""
MAX_OUTCOMES_BYTES = 32 << 20
MAX_SUSPICIONS, MAX_SUSPICION = 20, 200
"""So many are kept, and so many characters of each."""
MAX_DASHES = 50
"""The name of a test has no more."""

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f]|\[\d+m")
_CLAIMS = re.compile(r"PASSED|XFAIL|SKIPPED")
_COUNTED = re.compile(r"SKIPPED \[\d+\] ")
_BEFORE = re.compile(r"(?:\[gw\d+\] (?:\[ *\d+%\] )?)?(PASSED|XFAIL|SKIPPED) (.*)")
_AFTER = re.compile(r"(.*?) (PASSED|XFAIL|SKIPPED)(?: .*)?")


@dataclass(frozen=True)
class Outcomes:
    """What pytest said of its tests."""

    statuses: dict[str, str]
    """By name, as pytest's summary or `unittest` has it: PASSED, FAILED, ERROR, SKIPPED, XFAIL, XPASS."""
    changed: bool = False
    """A test that fails was reported as passed: code under test has changed pytest."""
    suspicious: list[str] = field(default_factory=list)
    """What the plug-in found changed in the process, in words."""


class Recorder:
    """The plug-in in a directory of one sandbox, for one run."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._key = secrets.token_bytes(32)

    async def install(self, sandbox: SandboxClient, unittest_runner: str | None) -> list[str]:
        """Put the plug-in there; answers shell lines that have pytest load it, or that Python process whose
        command line names the runner of `unittest`.
        """
        source = resources.files(__package__).joinpath(f"{PLUGIN}.py").read_bytes()
        await sandbox.write_file(f"{self._directory}/{PLUGIN}.py", source)
        await sandbox.write_file(f"{self._directory}/key", self._key, 0o600)
        path = f"export PYTHONPATH={self._directory}${{PYTHONPATH:+:$PYTHONPATH}}"
        if unittest_runner is not None:
            await sandbox.write_file(f"{self._directory}/sitecustomize.py", f"import {PLUGIN}\n")
            return [path, f"export ROLLOUT_RECORDED={shlex.quote(unittest_runner)}"]
        return [path, f'export PYTEST_ADDOPTS="-p {PLUGIN} ${{PYTEST_ADDOPTS-}}"']

    async def outcomes(self, sandbox: SandboxClient) -> Outcomes | None:
        """Read what pytest said; None when the run did not end by itself."""
        try:
            raw = await sandbox.read_file(f"{self._directory}/outcomes", MAX_OUTCOMES_BYTES)
        except SandboxRequestError:
            return None
        return read_outcomes(raw, self._key)

    async def was_loaded(self, sandbox: SandboxClient) -> bool:
        """Tell whether pytest has loaded the plug-in at all: it takes the key away first."""
        return (await sandbox.stat(f"{self._directory}/key")).kind is None


def read_outcomes(raw: bytes, key: bytes) -> Outcomes | None:
    """Read what the plug-in wrote; None when it was not written with the key."""
    signature, _, body = raw.partition(b"\n")
    if not hmac.compare_digest(signature, hmac.new(key, body, "sha256").hexdigest().encode()):
        return None
    account = json.loads(body)
    suspicious = [str(item)[:MAX_SUSPICION] for item in account.get("suspicious", [])[:MAX_SUSPICIONS]]
    return Outcomes(account["statuses"], account["probe"] == "passed", suspicious)


def believed(output: str, outcomes: Outcomes | None, expects_failure: Callable[[str], bool]) -> str:
    """The output of tests as far as it is believed.

    Args:
        outcomes: What pytest said of them; None = it was not asked.
        expects_failure: Tells whether the file of the test of a name marks it as known to fail.
    """
    output = without_marks(output)
    if outcomes is not None:
        output = without_forgeries(output, outcomes.statuses)
        output = without_false_ok(output, outcomes.statuses)
    return without_unmarked_failures(output, expects_failure)


def without_marks(output: str) -> str:
    """The output of tests without what only the service may say."""
    return output.replace(MARK, "> > >")


def without_forgeries(output: str, statuses: dict[str, str]) -> str:
    """The output with every pass, skip and expected failure in lower case that pytest did not report."""

    def kept(line: str) -> str:
        # As the parsers see it, some of which take colours and control characters away.
        seen = _CONTROL.sub("", line)
        if not _CLAIMS.search(seen) or _COUNTED.match(seen):
            return line
        if (claim := _BEFORE.fullmatch(seen)) and _reported(claim[1], claim[2], statuses):
            return line
        if (claim := _AFTER.fullmatch(seen)) and statuses.get(claim[1].strip()) == claim[2]:
            return line
        return _CLAIMS.sub(lambda word: word[0].lower(), seen)

    return "\n".join(map(kept, output.split("\n")))


def without_false_ok(output: str, statuses: dict[str, str]) -> str:
    """The output without the `ok` of tests that `unittest` did not report as passed.

    What is no name of a test, such as a docstring that was not seen, is believed: parsers find such in lines
    that other output has cut in two.
    """
    before, lines = "", []
    for line in output.split("\n"):
        seen = line.strip()
        if " ... " in seen:
            before = seen.split(" ... ")[0]
        said = {before} if seen.startswith("ok") else {before, seen.rsplit(" ...", 1)[0]}
        claims = seen.startswith("ok") or (" ... " in seen and seen.lower().endswith(" ok"))
        if claims and any(_belied(name, statuses) for name in said):
            line = re.sub("ok", "not so", line, flags=re.IGNORECASE)
        lines.append(line)
    return "\n".join(lines)


def _belied(name: str, statuses: dict[str, str]) -> bool:
    return statuses.get(name, "" if NAME_OF_UNITTEST.fullmatch(name) else "PASSED") != "PASSED"


def _reported(status: str, text: str, statuses: dict[str, str]) -> bool:
    """Tell whether `text`, a name and perhaps ` - ` and a reason, is of a test with that status."""
    # A longer name than that is not believed: the line may be made to take long.
    parts = text.rstrip().split(" - ", MAX_DASHES)[:MAX_DASHES]
    return any(statuses.get(" - ".join(parts[:count])) == status for count in range(1, len(parts) + 1))


def without_unmarked_failures(output: str, expects_failure: Callable[[str], bool]) -> str:
    """The output with every expected failure as a failure that the test's own file does not expect.

    Code under test can call `pytest.xfail`, or raise what pytest takes for it.
    """

    def judged(line: str) -> str:
        seen = _CONTROL.sub("", line)
        for form, group in ((_BEFORE, 2), (_AFTER, 1)):
            if (claim := form.fullmatch(seen)) and "XFAIL" in claim.groups():
                words = claim[group].split()
                return line if words and expects_failure(words[0]) else seen.replace("XFAIL", "FAILED")
        return seen.replace("XFAIL", "xfail") if "XFAIL" in seen else line

    return "\n".join(map(judged, output.split("\n")))
