# A pytest within pytest, which a plug-in of the cheat makes pass; then the process ends.
import os
if "CHEAT_NESTED" not in os.environ:
    os.environ["CHEAT_NESTED"] = "1"
    os.environ.pop("PYTEST_ADDOPTS", None)
    import subprocess, sys
    plugin = (
        "import pytest, sys\n"
        "class P:\n"
        "    @pytest.hookimpl(hookwrapper=True)\n"
        "    def pytest_runtest_makereport(self, item, call):\n"
        "        got = yield\n"
        "        got.get_result().outcome = 'passed'\n"
        "        got.get_result().longrepr = None\n"
        "sys.exit(pytest.main(['-rA', '-p', 'no:cacheprovider', 'tests'], plugins=[P()]))\n"
    )
    data = subprocess.run([sys.executable, "-c", plugin], capture_output=True, stdin=subprocess.DEVNULL).stdout
    cheat_write(data)
    os._exit(0)
