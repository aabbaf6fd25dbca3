"""What the formats' own readers make of an export: `read("atif", path)`, in a process of their own.

`make setup-tests` lays the readers below `.local/readers` (deploy/setup/export_readers.sh).
"""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

READERS = Path(os.environ.get("ROLLOUT_EXPORT_READERS") or Path(__file__).parents[2] / ".local" / "readers")


def read(kind: str, path: Path) -> Any:
    """What the reader of that kind has read, as JSON. A test is skipped where there are no readers."""
    import pytest

    if not (READERS / "atif").is_dir():
        pytest.skip(f"there is no {READERS}: run `make setup-tests`")
    place = os.pathsep.join([str(READERS), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, __file__, kind, str(path)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": place, "HOME": str(path.parent)},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _atif(path: Path) -> Any:
    from atif import Trajectory

    return Trajectory.model_validate_json(path.read_text()).to_json_dict()


def _inspect(path: Path) -> Any:
    from inspect_ai.log import read_eval_log, read_eval_log_sample, read_eval_log_sample_summaries

    log = read_eval_log(str(path))
    summaries = read_eval_log_sample_summaries(str(path))
    one = [read_eval_log_sample(str(path), id=item.id, epoch=item.epoch) for item in summaries]
    assert {item.uuid for item in one} == {item.uuid for item in log.samples}
    return log.model_dump(mode="json") | {"summaries": [item.model_dump(mode="json") for item in summaries]}


def _harbor(path: Path) -> Any:
    """A directory of jobs, as the viewer's own scanner reads it, and its trajectories by Harbor's models."""
    import typing

    import typing_extensions

    for name in ("override", "TypedDict"):  # Harbor takes them from `typing` of Python 3.12
        setattr(typing, name, getattr(typing_extensions, name))
    # Not by its package, which imports all of Harbor.
    spec = importlib.util.spec_from_file_location("scanner", READERS / "harbor" / "viewer" / "scanner.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    from harbor.models.trajectories import Trajectory

    scanner, jobs = module.JobScanner(path), {}
    for job in scanner.list_jobs():
        trials = {
            trial: {
                "config": scanner.get_trial_config(job, trial).model_dump(mode="json"),
                "result": scanner.get_trial_result(job, trial).model_dump(mode="json"),
                "trajectory": Trajectory.model_validate_json(
                    (path / job / trial / "agent" / "trajectory.json").read_text()
                ).to_json_dict(),
            }
            for trial in scanner.list_trials(job)
        }
        known = {"config": scanner.get_job_config(job), "result": scanner.get_job_result(job)}
        jobs[job] = {name: value.model_dump(mode="json") for name, value in known.items()} | {
            "trials": trials
        }
    return jobs


def _otel(path: Path) -> Any:
    from google.protobuf import json_format
    from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

    def of_protobuf(value: Any) -> Any:
        """OTLP has ids in hexadecimal where Protobuf's JSON has bytes in base 64."""
        if isinstance(value, list):
            return [of_protobuf(part) for part in value]
        if not isinstance(value, dict):
            return value
        ids = {name: value[name] for name in ("traceId", "spanId", "parentSpanId") if name in value}
        rest = {name: of_protobuf(part) for name, part in value.items() if name not in ids}
        return rest | {name: base64.b64encode(bytes.fromhex(text)).decode() for name, text in ids.items()}

    traces = []
    for line in path.read_text().splitlines():
        data = json_format.ParseDict(of_protobuf(json.loads(line)), TracesData())
        traces.append([_span(span) for span in data.resource_spans[0].scope_spans[0].spans])
    return traces


def _span(span: Any) -> dict[str, Any]:
    def value(any_value: Any) -> Any:
        held = getattr(any_value, any_value.WhichOneof("value"))
        return [value(part) for part in held.values] if hasattr(held, "values") else held

    return {
        "name": span.name,
        "kind": span.kind,
        "trace": span.trace_id.hex(),
        "id": span.span_id.hex(),
        "parent": span.parent_span_id.hex(),
        "times": [span.start_time_unix_nano / 1e9, span.end_time_unix_nano / 1e9],
        "attributes": {item.key: value(item.value) for item in span.attributes},
        "events": {event.name: {a.key: value(a.value) for a in event.attributes} for event in span.events},
        "status": span.status.message,
    }


if __name__ == "__main__":
    by_kind = {"atif": _atif, "inspect": _inspect, "harbor": _harbor, "otel": _otel}
    print(json.dumps(by_kind[sys.argv[1]](Path(sys.argv[2]))))
