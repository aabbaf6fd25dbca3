"""The API against its own description: requests that fit `/openapi.json`, and ones that do not quite."""

from __future__ import annotations

import pytest
from flask import Flask
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from services.gateway import openapi
from services.gateway.app import BLUEPRINTS
from services.gateway.compat.app import BLUEPRINTS as COMPATIBLE
from tests.helpers.keys import HEADERS
from tests.helpers.lazy import Lazy
from tests.helpers.long_forms import CHAOS
from tests.helpers.stack import Stack

schemathesis, checks = Lazy("schemathesis"), Lazy("schemathesis.specs.openapi.checks")
EXAMPLES = CHAOS("examples of an operation", short=6, long=100)
"""Of each operation, in each mode."""
NOBODY = "http://127.0.0.1:9"
ENDLESS = {"/v1/results/stream", "/v1/completions/stream", "/v1/live"}
API = Flask("api")
for blueprint in (*BLUEPRINTS, *COMPATIBLE):
    API.register_blueprint(blueprint)
OPERATIONS = [
    (method.upper(), path)
    for path, operations in openapi.document(API)["paths"].items()
    for method in operations
    if path not in ENDLESS
]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory):
    """A gateway and a worker: calls of the compatible wires wait until their rollout has ended."""
    directory = tmp_path_factory.mktemp("fuzz")
    schemathesis.serializer("application/gzip")(lambda _, value: getattr(value, "data", str(value).encode()))
    with Stack(directory, directory / "sbx") as stack:
        stack.start_worker("init,run,eval", "all")
        yield stack, schemathesis.openapi.from_url(f"{stack.url}/openapi.json")


def tame(case):
    """Nothing that waits long or reaches out: not what is tested here."""
    query = case.query or {}
    if isinstance(query.get("wait"), int | float):
        query["wait"] = min(query["wait"], 0.01)
    if isinstance(case.body, dict):
        if isinstance(case.body.get("wait"), int | float):
            case.body["wait"] = min(case.body["wait"], 0.01)
        for name in ("url", "address"):
            if isinstance(case.body.get(name), str):
                case.body[name] = NOBODY
        if isinstance(case.body.get("handler"), str):
            case.body["handler"] = "noop"


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_every_answer_is_documented_and_none_is_a_server_error(gateway, method, path):
    stack, schema = gateway
    operation = schema[path][method]
    documented = {int(status) for status in operation.definition.raw["responses"] if status.isdigit()}
    cases = st.one_of(*(operation.as_strategy(generation_mode=mode) for mode in schemathesis.GenerationMode))

    @settings(
        max_examples=2 * EXAMPLES,
        deadline=None,
        derandomize=True,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases)
    def ask(case):
        tame(case)
        answer = case.call(base_url=stack.url, timeout=240, headers=HEADERS)
        assert answer.status_code in documented, f"{answer.status_code} is not documented: {answer.text}"
        assert answer.status_code < 500 or path == "/ready", answer.text
        case.validate_response(
            answer, checks=[checks.content_type_conformance, checks.response_schema_conformance]
        )

    ask()
