"""Handlers are loaded by every worker, also where what they score with is not installed."""

from __future__ import annotations

import configparser
import json
import subprocess
import sys

from tests.helpers.stack import ROOT

SCORING = ["math_verify", "sympy", "reasoning_gym", "pint", "swebench"]

LOAD = """
import importlib, json, sys
points, missing = json.loads(sys.argv[1]), json.loads(sys.argv[2])
sys.modules |= dict.fromkeys(missing)  # an import of these fails
for name, (module, attribute) in points.items():
    handler = getattr(importlib.import_module(module), attribute)()
    assert handler.info().name == name, (name, handler.name)
"""


def test_every_handler_that_the_package_registers_loads_by_its_name_without_the_scoring_libraries():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    lines = config["options.entry_points"]["rollout.handlers"].split("\n")
    points = {
        name.strip(): target.strip().split(":")
        for name, _, target in (x.partition("=") for x in lines)
        if name
    }
    assert {"math", "math_tools", "stem", "stem_tools", "reasoning_gym"} <= points.keys()
    argv = [sys.executable, "-c", LOAD, json.dumps(points), json.dumps(SCORING)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
