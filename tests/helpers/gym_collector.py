"""NeMo Gym's own rollout collector, of one of its releases, in a process of its own.

`make setup-tests` lays the releases below `.local/nemo-gym`. They want packages of gigabytes (Ray, MLflow,
W&B), of which a collector takes names alone, so names are what they get.
"""

from __future__ import annotations

import asyncio
import importlib.abc
import importlib.machinery
import importlib.metadata
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.stack import ROOT, free_port

RELEASES = ("0.4.0", "0.7.0")
HOME = ROOT / ".local" / "nemo-gym"
ABSENT = {
    *("anthropic", "datasets", "devtools", "gprof2dot", "mcp", "mlflow", "pydot", "ray", "scipy"),
    *("wandb", "yappi"),
}
"""What is not installed for it."""


class Collection:
    """A run of `gym eval run --no-serve` on rows, with a head server of its own beside it.

    Args:
        config: YAML of the servers, as a configuration file of NeMo Gym has them.
    """

    def __init__(
        self, release: str, config: str, rows: list[dict[str, Any]], directory: Path, **options: Any
    ) -> None:
        if not (HOME / release).is_dir():
            pytest.skip(f"there is no {HOME / release}: run `make setup-tests`")
        self._output = directory / f"{release}.jsonl"
        source = directory / f"{release}-input.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
        head = {"head_server": {"host": "127.0.0.1", "port": free_port()}}
        options |= {"input_jsonl_fpath": str(source), "output_jsonl_fpath": str(self._output)}
        env = os.environ | {
            "NEMO_GYM_CONFIG_DICT": yaml.safe_dump(yaml.safe_load(config) | head),
            "PYTHONPATH": os.pathsep.join(map(str, [HOME / release, HOME / "needs", ROOT])),
        }
        command = [sys.executable, "-m", "tests.helpers.gym_collector", json.dumps(options)]
        # Its files go where it runs.
        self._log = directory / f"{release}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, cwd=directory, env=env, stdout=log, stderr=subprocess.STDOUT
            )

    def wait(self, timeout_s: float = 120.0) -> Collection:
        """Until it has ended well."""
        try:
            code = self._process.wait(timeout_s)
        finally:
            self._process.kill()
        assert code == 0, self._log.read_text()[-4000:]
        return self

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def successes(self) -> list[dict[str, Any]]:
        return self._read("")

    @property
    def failures(self) -> list[dict[str, Any]]:
        return self._read("_failures")

    def metrics(self) -> dict[str, Any]:
        """Of the one agent that there was."""
        path = self._output.with_name(f"{self._output.stem}_aggregate_metrics.json")
        (entry,) = json.loads(path.read_text())
        return entry

    def _read(self, suffix: str) -> list[dict[str, Any]]:
        path = self._output.with_name(f"{self._output.stem}{suffix}.jsonl")
        return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


class _Names(types.ModuleType):
    """A package of which every name is a class that does nothing."""

    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        from pydantic_core import core_schema

        schema = classmethod(lambda cls, source, handler: core_schema.any_schema())
        return type(name, (), {"__get_pydantic_core_schema__": schema})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname.split(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Names(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _collect(options: dict[str, Any]) -> None:
    sys.meta_path.insert(0, _Finder())
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: "0" if name in ABSENT else version(name)
    from nemo_gym.base_resources_server import BaseVerifyResponse
    from nemo_gym.rollout_collection import RolloutCollectionConfig, RolloutCollectionHelper
    from nemo_gym.server_utils import HeadServer

    server, thread, _ = HeadServer.run_webserver()
    while not server.started:
        thread.join(0.01)
    config = RolloutCollectionConfig.model_validate(options)
    for row in asyncio.run(RolloutCollectionHelper().run_from_config(config)):
        # What its own agent servers answer with, and its trainers read.
        read = BaseVerifyResponse.model_validate(row).response.model_dump()["output"]
        tokens = "generation_token_ids"
        assert [item.get(tokens) for item in read] == [
            item.get(tokens) for item in row["response"]["output"]
        ], "its classes leave ids out"


if __name__ == "__main__":
    _collect(json.loads(sys.argv[1]))
