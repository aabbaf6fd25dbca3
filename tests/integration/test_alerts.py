"""Alert rules and dashboard ask for metrics and labels that a running service has, and lead to a runbook."""

from __future__ import annotations

import importlib.util
import json
import re
from typing import get_args

import promql_parser
import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from rollout.schema import RolloutRequest
from services.capture import metrics as capture
from services.capture.call import Kind
from tests.helpers.keys import http
from tests.helpers.stack import ROOT, wait_until
from workers.harnesses.drive import OURS
from workers.metrics import WorkerMetrics

DEPLOY = ROOT / "deploy" / "prometheus"
SETS = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"]
RULES = [rule for group in SETS for rule in group["rules"]]
FROM_PROMETHEUS = {"up": {"job", "instance"}}
"""What a scrape adds by itself."""
HIDDEN = {"le", "quantile"}
"""Labels of a histogram's parts."""


def of_text(text):
    """Sample name → its labels; None for a metric that has no sample yet."""
    labels: dict[str, set[str] | None] = {}
    suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum"), "gauge": ("",)}
    for family in text_string_to_metric_families(text):
        for suffix in suffixes.get(family.type, ("",)):
            labels.setdefault(family.name + suffix, None)
        for sample in family.samples:
            labels[sample.name] = (labels.get(sample.name) or set()) | (set(sample.labels) - HIDDEN)
    return labels


@pytest.fixture(scope="module")
def metrics(stack):
    """Of a service that has worked: a rollout in a sandbox with a model, and what goes wrong with one."""
    client = stack.client
    client.run([RolloutRequest(handler="calculator", task={"question": "1 plus 1", "answer": "2"})])
    (waits,) = client.submit(RolloutRequest(handler="noop", task={"run_s": 600}))
    client.cancel(waits.id)
    url = f"{stack.url}/metrics"
    # Workers pass on what the sandbox hosts say, and the backend's numbers, every few seconds.
    for name in ("rollout_sandbox_events_total", "rollout_backend_generation_tokens_total"):
        wait_until(lambda name=name: f"{name}{{" in http.get(url).text, 60, name)
    elsewhere = [WorkerMetrics(lambda: []).registry, capture.registry]
    texts = [http.get(url).text, *(generate_latest(registry).decode() for registry in elsewhere)]
    return {name: labels for text in texts for name, labels in of_text(text).items()}


@pytest.fixture(scope="module")
def documented():
    """Metric → its labels, from the tables of docs/observability.md."""
    text = (ROOT / "docs" / "observability.md").read_text()
    rows = re.findall(r"^\| `(rollout_\w+)(?:\{([^}]*)\})?`", text, re.MULTILINE)
    return {name: set(filter(None, labels.split(","))) for name, labels in rows}


def base(name, documented):
    if name in documented:
        return name
    return re.sub(r"_(bucket|count|sum)$", "", name)


def used(expression):
    """`(metric, labels)` for each selector of an expression, and the labels that aggregations keep."""
    selectors, kept = [], set()

    def look(node):
        if isinstance(node, promql_parser.MatrixSelector):
            look(node.vector_selector)
        elif isinstance(node, promql_parser.VectorSelector):
            selectors.append((node.name, {matcher.name for matcher in node.matchers.matchers}))
        elif isinstance(node, promql_parser.AggregateExpr):
            if node.modifier is not None:
                kept.update(node.modifier.labels)
            look(node.expr)
        elif isinstance(node, promql_parser.BinaryExpr):
            look(node.lhs)
            look(node.rhs)
        elif isinstance(node, promql_parser.Call):
            for argument in node.args:
                look(argument)
        elif isinstance(node, promql_parser.ParenExpr | promql_parser.UnaryExpr | promql_parser.SubqueryExpr):
            look(node.expr)

    look(promql_parser.parse(expression.replace("$__rate_interval", "5m")))
    assert selectors, expression
    return selectors, kept


def check(expression, metrics, documented):
    selectors, kept = used(expression)
    having = set()
    for name, matched in selectors:
        if name in FROM_PROMETHEUS:
            labels = FROM_PROMETHEUS[name]
        else:
            assert name in metrics, f"no metric {name}: {expression}"
            labels = documented[base(name, documented)] | HIDDEN | {"instance", "job"}
        assert matched <= labels, f"{name} has no label {sorted(matched - labels)}: {expression}"
        having |= labels
    assert kept <= having, f"nothing has label {sorted(kept - having)}: {expression}"
    return kept or having


def test_documented_labels_are_those_of_the_running_service(metrics, documented):
    compared = 0
    for name, labels in metrics.items():
        if labels is not None and name.startswith("rollout_") and not name.endswith("_created"):
            assert documented[base(name, documented)] == labels, name
            compared += 1
    assert compared > 80
    assert metrics["rollout_sandbox_events_total"] == {"node", "event"}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_asks_for_what_there_is_and_leads_to_its_runbook(rule, metrics, documented):
    labels = check(rule["expr"], metrics, documented)
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    shown = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
    assert shown <= labels, f"{sorted(shown - labels)} is lost on the way"
    path, _, anchor = rule["annotations"]["runbook"].partition("#")
    headings = re.findall(r"^#+ (.+)$", (ROOT / path).read_text(), re.MULTILINE)
    assert anchor == rule["alert"].lower()
    assert rule["alert"] in headings


def test_the_runbooks_are_those_of_the_alerts():
    headings = re.findall(r"^### (Rollout\w+)$", (ROOT / "docs/operations.md").read_text(), re.MULTILINE)
    assert headings == [rule["alert"] for rule in RULES]


def test_the_dashboard_asks_for_what_there_is(metrics, documented):
    spec = importlib.util.spec_from_file_location("made", ROOT / "deploy/grafana/make_dashboard.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    board = json.loads(made.TARGET.read_text())
    targets = [target for panel in board["panels"] for target in panel.get("targets", [])]
    assert len(targets) > 40
    for target in targets:
        labels = check(target["expr"], metrics, documented)
        shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        assert shown <= labels, target


def test_prometheus_scrapes_with_the_jobs_that_the_alerts_name():
    config = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())
    assert config["rule_files"] == ["alerts.yaml"]
    jobs = {job["job_name"] for job in config["scrape_configs"]}
    named = set(re.findall(r'job="([\w-]+)"', (DEPLOY / "alerts.yaml").read_text()))
    assert named and named <= jobs
    (target,) = config["scrape_configs"][0]["static_configs"][0]["targets"]
    assert target.startswith("127.0.0.1:")


def test_failures_of_capture_are_what_it_calls_its_own_and_no_programs_fault():
    (rule,) = (rule for rule in RULES if rule["alert"] == "RolloutCaptureFailures")
    (named,) = re.findall(r'outcome=~"([^"]+)"', rule["expr"])
    assert tuple(named.split("|")) == OURS
    assert set(OURS) < set(get_args(Kind))
