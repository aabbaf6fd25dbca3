# A failing assertion raises what pytest takes for an expected failure.
import builtins, unittest
from _pytest.outcomes import XFailed
class Expected(XFailed):
    pass
builtins.AssertionError = Expected
unittest.TestCase.failureException = Expected
