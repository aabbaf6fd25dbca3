# ruff: noqa: PTH100, PTH108, PTH118, PTH120, PTH123, SIM105
"""A pytest plug-in that tells the outcomes of tests by a channel that printing cannot forge.

It lies alone in a directory of the sandbox, with a key that it takes before code of the repository runs, and
writes the outcomes beside it, authenticated with that key. Not imported by the service. It runs in the Python
of any image: 3.5 and later, with any pytest.
"""

import hashlib
import hmac
import json
import os

HOME = os.path.dirname(os.path.abspath(__file__))


def _take_key():
    path = os.path.join(HOME, "key")
    try:
        with open(path, "rb") as file:
            key = file.read()
        os.unlink(path)
    except OSError:
        return None  # another process has it: a worker of pytest-xdist, or a pytest that a test started
    return hmac.new(key, digestmod=hashlib.sha256)


def _fail():
    raise AssertionError("this must be reported as a failure")


class Recorder:
    """Keeps the last status of each test."""

    def __init__(self, config, mac):
        self._config = config
        self._mac = mac
        self._statuses = {}
        self._items = {}

    def _note(self, nodeid, status):
        name = nodeid
        try:
            name = self._config.cwd_relative_nodeid(nodeid)  # as the summary has it
        except Exception:
            pass
        self._statuses[name] = status

    def pytest_runtest_logreport(self, report):
        was_xfail = hasattr(report, "wasxfail")
        if report.when == "call":
            if report.outcome == "passed":
                self._note(report.nodeid, "XPASS" if was_xfail else "PASSED")
            elif report.outcome == "skipped":
                self._note(report.nodeid, "XFAIL" if was_xfail else "SKIPPED")
            else:
                self._note(report.nodeid, "FAILED")
        elif report.outcome == "skipped":
            self._note(report.nodeid, "XFAIL" if was_xfail else "SKIPPED")
        elif report.outcome == "failed":
            self._note(report.nodeid, "ERROR")

    def pytest_runtest_protocol(self, item):
        self._items[type(item)] = item

    def _probe(self):
        """How tests that fail are reported: `failed`, unless somebody has changed pytest; None if unknown."""
        found = None
        for kind, item in self._items.items():
            try:
                from _pytest.runner import CallInfo

                # Without the hooks around a test, which want its setup: that would run fixtures once more.
                probe = kind.from_parent(item.parent, name="test_rollout", callobj=_fail)
                call = CallInfo.from_call(probe.runtest, "call")
                found = probe.ihook.pytest_runtest_makereport(item=probe, call=call).outcome
            except Exception:
                continue  # not a kind that is made this way, or another version of pytest
            if found == "passed":
                break
        return found

    def pytest_sessionfinish(self, session, exitstatus):
        told = {"statuses": self._statuses, "probe": self._probe()}
        body = json.dumps(told).encode("ascii")
        mac = self._mac.copy()
        mac.update(body)
        with open(os.path.join(HOME, "outcomes"), "wb") as file:
            file.write(mac.hexdigest().encode("ascii") + b"\n" + body)


MAC = _take_key()


def pytest_configure(config):
    if MAC is not None:
        config.pluginmanager.register(Recorder(config, MAC), "rollout-recorder-of-outcomes")
