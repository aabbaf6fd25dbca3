"""Calls a function of a solution once, inside a sandbox. Standard library, Python 3.7 or newer.

    python3 call.py SOLUTION NAME <ARGUMENTS

ARGUMENTS is a JSON list. Standard output gets the result as JSON, and nothing that the solution prints. What
is expected is not here: nothing that the solution does can make a wrong answer right.
"""

import json
import os
import sys


def main(path, name):
    args = json.load(sys.stdin)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the solution prints is not its answer
    scope = {"__name__": "solution", "__file__": path}
    with open(path) as source:
        exec(compile(source.read(), path, "exec"), scope)
    function = scope.get(name)
    if function is None and "Solution" in scope:
        function = getattr(scope["Solution"](), name)
    if function is None:
        sys.exit("the solution defines no %s" % name)
    json.dump(function(*args), out, default=plain)
    out.flush()
    os._exit(0)


def plain(value):
    return sorted(value) if isinstance(value, (set, frozenset)) else repr(value)


if __name__ == "__main__":
    main(*sys.argv[1:])
