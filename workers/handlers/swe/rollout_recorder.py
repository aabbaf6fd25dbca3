# ruff: noqa: PTH100, PTH108, PTH109, PTH206, PTH118, PTH120, PTH123, SIM105
"""A plug-in of pytest that tells the outcomes of tests by a channel that printing cannot forge.

The same for `unittest`, where Python loads it at its start.

It lies alone in a directory of the sandbox, with a key that it takes before code of the repository runs, and
writes the outcomes beside it, authenticated with that key. Not imported by the service. It runs in the Python
of any image: 3.5 and later, with any pytest.
"""

import atexit
import builtins
import hashlib
import hmac
import json
import os
import random
import sys

HOME = os.path.dirname(os.path.abspath(__file__))


RUNNER = os.environ.get("ROLLOUT_RECORDED")
"""How the command line of the process that runs `unittest` names its runner; None = pytest runs the tests."""


def _is_runner():
    with open("/proc/self/cmdline", "rb") as file:
        words = file.read().decode("utf-8", "replace").split("\0")
    return any(word.split("/")[-1] == RUNNER for word in words)


def _take_key():
    if RUNNER is not None and not _is_runner():
        return None  # another Python, as of `conda activate`
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


class Watch:
    """Notices what code of the repository has put in the place of what judges it.

    That is told and changes no result. Only what comes from the repository and is no code of tests is told:
    tests may replace what they like, and so may plug-ins.
    """

    FRAMEWORK = ("_pytest", "pluggy", "unittest")
    TESTS = ("test", "tests", "testing", "conftest")

    def __init__(self):
        self._root = os.getcwd() + os.sep
        self._noted = self._framework()
        self._codes = {}
        self._globals = {}
        self._modules = set()
        self.remarks = []

    def _framework(self):
        """Holder and name of each function and class → holder, value, code."""
        values = {}
        for name, module in list(sys.modules.items()):
            if name.split(".")[0] not in self.FRAMEWORK or module is None:
                continue
            holders = [module] + [
                value
                for value in list(vars(module).values())
                if isinstance(value, type) and value.__module__ == name
            ]
            for holder in holders:
                self._note(values, name, holder)
        self._note(values, "builtins", builtins)
        return values

    def _note(self, values, module, holder):
        label = module if holder is sys.modules.get(module) else module + "." + holder.__name__
        for name, value in list(vars(holder).items()):
            if callable(value):
                values[label + "." + name] = (holder, name, value, getattr(value, "__code__", None))

    def collected(self, items):
        """Note the code of tests, and what their modules mean by the names of builtins."""
        for item in items:
            self._codes[item.nodeid] = _code_of(item)
            module = getattr(item, "module", None)
            if module is not None and module.__name__ not in self._globals:
                self._globals[module.__name__] = {
                    name: vars(module).get(name, self) for name in dir(builtins) if name[0] != "_"
                }

    def called(self, item):
        """Before a test is called: whether it is what was collected."""
        noted = self._codes.get(item.nodeid)
        if noted is not None and _code_of(item) is not noted:
            self._tell("the code of " + item.nodeid + " was swapped")
        module = getattr(item, "module", None)
        if module is None:
            return
        for name, value in self._globals.get(module.__name__, {}).items():
            if vars(module).get(name, self) is not value:
                self._tell(name + " was replaced in the module " + module.__name__)
        if module.__name__ not in self._modules:
            self._modules.add(module.__name__)
            self.look()

    def look(self):
        """Whether what runs and reports tests is what it was."""
        for label, (holder, name, value, code) in self._noted.items():
            now = vars(holder).get(name)
            if now is value and getattr(now, "__code__", None) is code:
                continue
            file = self._file_of(now)
            if file is not None:
                self._tell(label + " was replaced by code of " + file)

    def _file_of(self, value):
        """File of the repository, and none of tests, that a function or class comes from; None if of none."""
        code = getattr(value, "__code__", None)
        file = getattr(code, "co_filename", None)
        if file is None:
            module = sys.modules.get(getattr(value, "__module__", None) or "")
            file = getattr(module, "__file__", None)
        if not file or not os.path.abspath(file).startswith(self._root):
            return None
        file = os.path.abspath(file)[len(self._root) :]
        parts = file[: -len(".py")].split(os.sep) if file.endswith(".py") else file.split(os.sep)
        of_tests = set(self.TESTS) & set(parts) or parts[-1].startswith("test_") or "site-packages" in parts
        return None if of_tests else file

    def _tell(self, text):
        if text not in self.remarks and len(self.remarks) < 20:
            self.remarks.append(text)


def _code_of(item):
    value = getattr(item, "obj", None)
    return getattr(getattr(value, "__func__", value), "__code__", None)


def _safely(look, *args):
    try:
        look(*args)
    except Exception:
        pass  # what is watched must not keep tests from being run


class Recorder:
    """Keeps the last status of each test."""

    def __init__(self, config, mac):
        self._config = config
        self._mac = mac
        self._statuses = {}
        self._items = {}

    def pytest_collection_finish(self, session):
        _safely(WATCH.collected, session.items)

    def pytest_runtest_call(self, item):
        _safely(WATCH.called, item)

    def _note(self, nodeid, status):
        name = nodeid
        try:
            name = self._config.cwd_relative_nodeid(nodeid)  # as the summary has it
        except Exception:
            pass
        self._statuses[name] = status

    def pytest_runtest_logreport(self, report):
        was_xfail = hasattr(report, "wasxfail")
        if report.outcome == "skipped":
            self._note(report.nodeid, "XFAIL" if was_xfail else "SKIPPED")
        elif report.outcome == "passed":
            if report.when == "call":
                self._note(report.nodeid, "XPASS" if was_xfail else "PASSED")
        elif report.when == "call" or report.outcome == "failed":
            self._note(report.nodeid, "FAILED" if report.when == "call" else "ERROR")

    def pytest_runtest_protocol(self, item):
        self._items.setdefault(type(item), []).append(item)

    def _probe(self):
        """How tests that fail are reported: `failed`, unless somebody has changed pytest; None if unknown."""
        outcome = None
        for kind, items in self._items.items():
            # By the name of any test, so that none can be told from the others.
            item = random.SystemRandom().choice(items)
            try:
                from _pytest.runner import CallInfo

                # Without the hooks around a test, which want its setup: that would run fixtures once more.
                probe = kind.from_parent(item.parent, name=item.name, callobj=_fail)
                call = CallInfo.from_call(probe.runtest, "call")
                outcome = probe.ihook.pytest_runtest_makereport(item=probe, call=call).outcome
            except Exception:
                continue  # not a kind that is made this way, or another version of pytest
            if outcome == "passed":
                break
        return outcome

    def pytest_sessionfinish(self, session, exitstatus):
        _write(self._mac, self._statuses, self._probe())


def _write(mac, statuses, probe):
    _safely(WATCH.look)
    account = {"statuses": statuses, "probe": probe, "suspicious": WATCH.remarks}
    body = json.dumps(account).encode("ascii")
    mac = mac.copy()
    mac.update(body)
    with open(os.path.join(HOME, "outcomes"), "wb") as file:
        file.write(mac.hexdigest().encode("ascii") + b"\n" + body)


STATUS_OF = {
    "addSuccess": "PASSED",
    "addFailure": "FAILED",
    "addError": "ERROR",
    "addSkip": "SKIPPED",
    "addExpectedFailure": "XFAIL",
    "addUnexpectedSuccess": "XPASS",
}


class Noting:
    """A result of `unittest` that also notes the status of one test."""

    def __init__(self, result):
        vars(self).update(_result=result, _said=[])

    def __getattr__(self, name):
        value = getattr(self._result, name)
        status = STATUS_OF.get(name)
        if name == "addSubTest":

            def note(test, subtest, error):
                self._said.extend(["FAILED"] if error is not None else [])
                return value(test, subtest, error)

        elif status is not None:

            def note(*args):
                self._said.append(status)
                return value(*args)

        else:
            return value
        return note

    def __setattr__(self, name, value):
        setattr(self._result, name, value)


def _record_unittest(mac):
    """Note the status of each test that is run from now on, by the names that runners print."""
    import unittest

    run = unittest.TestCase.run
    statuses = {}

    def noted(self, result=None):
        if result is None or isinstance(result, Noting):
            return run(self, result)
        noting = Noting(result)
        try:
            return run(self, noting)
        finally:
            said = set(noting._said) or {"ERROR"}
            status = "PASSED" if said == {"PASSED"} else sorted(said - {"PASSED"})[0]
            kind = type(self)
            place = "::".join((kind.__module__, kind.__name__, getattr(self, "_testMethodName", "")))
            for name in (str(self), (self.shortDescription() or "").strip(), place):
                # Tests may share a description: a runner prints it for each.
                if name and statuses.get(name) != "PASSED":
                    statuses[name] = status

    class Probe(unittest.TestCase):
        def runTest(self):
            self.assertTrue(False)

    def end():
        result = unittest.TestResult()
        try:
            run(Probe(), result)
        except Exception:
            pass
        _write(mac, statuses, "failed" if result.failures or result.errors else "passed")

    unittest.TestCase.run = noted
    atexit.register(end)


def _new_watch():
    import unittest.case  # pytest loads it when it needs it; what is noted must be there

    assert unittest.case
    return Watch()


MAC = _take_key()
if MAC is not None and RUNNER is not None:
    _record_unittest(MAC)
WATCH = _new_watch() if MAC is not None else None


def pytest_configure(config):
    if MAC is not None:
        config.pluginmanager.register(Recorder(config, MAC), "rollout-recorder-of-outcomes")
