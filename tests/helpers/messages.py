"""docs/messages.md: the messages of errors that a user may meet, as the code has them.

    python -m tests.helpers.messages > docs/messages.md

`…` stands for what a message fills in.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce

from tests.helpers.stack import ROOT


@dataclass(frozen=True)
class Group:
    """Errors of one kind, and what one does about all of them."""

    title: str
    remedy: str
    names: tuple[str, ...]
    """What is raised: classes, or functions that make one."""
    places: tuple[str, ...] = ()
    """Files or directories in which Python's own errors are of this kind; the longest that fits counts."""


LOGGED = "a line of a log"

GROUPS = (
    Group(
        "Commands",
        "The command has changed nothing, unless it says so. `rollout COMMAND --help` shows an example.",
        ("BadParameter", "ClickException", "UsageError", "_OutputError"),
    ),
    Group(
        "Client",
        "Is the service up (`rollout status`), and is it the one that you mean (`ROLLOUT_URL`, "
        "`ROLLOUT_API_KEY`)? [Python and HTTP](api.md)",
        ("AddressError", "ApiKeyError", "RolloutError", "Unavailable", "WaitTimeout", "WireError"),
        ("rollout/",),
    ),
    Group(
        "Webhooks",
        "The receiver says why it does not believe a message, the gateway why it sends none to an address. "
        "[Webhooks](results.md#webhooks)",
        ("AddressRefused", "WebhookError"),
        ("services/webhook_address.py",),
    ),
    Group(
        "Adapters and trainers",
        "The trainer's settings and what the service sampled do not fit together. [Trainers](trainers.md), "
        "[verl](verl.md)",
        (),
        ("rollout/adapters/", "rollout/integrations/"),
    ),
    Group(
        "Answers of the gateway",
        "A 4xx is the request's: the message names the field. After 429 and 503 the client tries again by "
        "itself. [API](api.md)",
        (
            *("ApiProblem", "BatchConflict", "BatchEnded", "BatchRuns", "BundlesFull", "IdConflict"),
            "NoSuchBatch",
            *(
                "PayloadError",
                "QuotaExceeded",
                "StoreFull",
                "Unstorable",
                "_refusal",
                "_refuse",
                "_too_large",
                "refused",
            ),
        ),
        ("rollout/schema/", "services/gateway/", "services/state/"),
    ),
    Group(
        "Tasks and datasets",
        "Mend the row, the map or the handler that is named. [Datasets](datasets.md), "
        "[handlers](handlers.md)",
        ("DatasetError", "Refused", "SuiteError"),
        (
            "rollout/datasets.py",
            "rollout/suites/",
            "workers/handlers/",
            "workers/agent/tools/",
            "workers/scoring/",
        ),
    ),
    Group("Planning", "[The path from start to end](guides/swe-qwen3-8b-verl.md)", ("PlanError",)),
    Group(
        "Start and settings",
        "Nothing was left running. Logs are in `.local/run/logs/`. [Settings](settings.md), "
        "[deployment](deploy.md)",
        (
            "FlowerAuthError",
            "KeyProblem",
            "SettingsError",
            "StackError",
            "SystemExit",
            "UnfitRedis",
            "failure",
        ),
        (
            *(
                "services/autoscale/",
                "services/broker.py",
                "services/gateway/parking.py",
                "services/settings.py",
            ),
            *("services/launch/", "services/state/tenants.py", "workers/", "sandbox/config.py"),
        ),
    ),
    Group("Slurm", "`rollout slurm status` says what to do next. [Slurm](guides/slurm.md)", ("SlurmError",)),
    Group(
        "Images and sandboxes",
        "`python -m sandbox.check --image base` on the node finds the cause. [What to do]"
        "(guides/operate.md#sandboxes-fail-on-one-node)",
        (
            *(
                "ImageError",
                "LocksUnsupported",
                "NodeShort",
                "NotAllowed",
                "NotListening",
                "NotMounted",
                "RuntimeUnavailable",
            ),
            *("SandboxAhead", "SandboxError", "SandboxGone", "SandboxRequestError", "SandboxStartError"),
            *("SandboxTaken", "SandboxTimeout", "SnapshotError"),
        ),
        ("sandbox/",),
    ),
    Group(
        "Why a rollout failed",
        "`rollout show ID` has them. Blame says whose failure it is. [Blame](architecture.md#blame)",
        (
            *(
                "AgentFault",
                "BackendUnavailable",
                "BrokenCall",
                "CodecError",
                "DeadlinePassed",
                "HandlerError",
            ),
            *(
                "InfrastructureError",
                "ModelError",
                "OtherRefused",
                "NoPython",
                "NotReady",
                "RedisAway",
                "RunDiverged",
                "SandboxFailure",
                "ScorerCrashed",
                "crashed",
            ),
            *("ScorerError", "ScorerOutOfMemory", "ScorerTimeout", "StageTimeout", "TaskError"),
            *("FilesElsewhere", "TokenizerMissing", "TurnGone", "UnknownHandler", "WorkerLost"),
        ),
        ("workers/agent/", "workers/handlers/base.py", "workers/scoring/wire.py"),
    ),
    Group(
        "Environments",
        "Foreign code or a server did not do what an environment does; the sample has no reward. "
        "[Environments](environments.md#reward)",
        ("EnvironmentFault", "EnvironmentLost"),
        ("workers/handlers/environments/",),
    ),
    Group(
        "Why a patch was not taken",
        "The score of `swe` has the reason, and the rollout its reward. [Software engineering](swe.md)",
        ("_NoPatch",),
    ),
    Group(
        "LLM servers and weights",
        "`rollout backends` has the reason of each. [What to do]"
        "(guides/operate.md#an-engine-answers-nonsense)",
        (
            *("BoundlessAnswer", "BrokenAnswer", "CallAborted", "CanaryFailed", "CheckpointError"),
            "ClientPayloadError",
            *(
                "ControlError",
                "DescribeError",
                "EngineError",
                "EngineKeyProblem",
                "ProbeError",
                "ReadTimeout",
            ),
            "RequestError",
        ),
        ("services/engines/", "services/guard/", "services/inference/"),
    ),
    Group(
        "Programs and capture",
        "What a program is told in its own dialect, by which it goes on or ends, and what keeps one from "
        "being started. [Agents](agents.md#what-a-program-is-told)",
        ("PackError", "Refusal", "UnknownHarness"),
        ("services/capture/", "workers/harnesses/"),
    ),
    Group(
        "Archive",
        "[Results](results.md)",
        ("ArchiveError",),
        ("rollout/archive.py", "workers/chores/archive.py"),
    ),
    Group(
        "Lines of logs",
        "What services and workers write at the levels WARNING and ERROR; the rollout's id stands beside it. "
        "[What to look at](observability.md)",
        (LOGGED,),
    ),
)
OWN = {
    # The agent reads them as the answer of its tool, and goes on.
    "EditError",
    # One part of ours tells another, which catches it.
    *("AssertionError", "AttributeError", "FrameTooLarge", "HTTPError", "LeaseLost", "NoOracle"),
    *("NoReward", "OvertakenError", "ServerError", "UpdateConflict"),
    # It begins the name of a field; pydantic words the rest.
    "from_validation",
}
"""What is raised and not met by a user."""
OWN_PLACES = (
    "sandbox/server/",
    "workers/handlers/harbor/inside/",
    "workers/handlers/swe/rollout_recorder.py",
    "rollout/__init__.py",
)
LEAST_LETTERS = 12
"""A shorter one says nothing without what it fills in."""
INTRO = """# Error messages

Search here for a part of yours; `…` stands for what a message fills in. These are the messages with which a
command, the client, the gateway, a rollout or a part of the service may end, as the code has them where it
raises an error, and the warnings in logs. `python -m tests.helpers.messages` makes this page, and a test
compares. What the parts say of the whole, such as [a lost head](guides/operate.md#the-head-is-gone), is in
[Operate it](guides/operate.md).
"""
PYTHON = {
    name for name, kind in vars(builtins).items() if isinstance(kind, type) and issubclass(kind, Exception)
}
BY_PLACE = {"invalid", "unserved"}
"""Functions of the same name that make errors of several groups."""
PLACES = sorted(
    ((place, group) for group in GROUPS for place in group.places), key=lambda entry: -len(entry[0])
)
BY_NAME = {name: group for group in GROUPS for name in group.names}


def words(node: ast.expr | None, known: dict[str, ast.expr]) -> str:
    """The text of a literal, or of a name that is `known` to stand for one, with … for what is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%(?:\.\d)?[sdrfg]", "…", node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(
            words(getattr(part, "value", part) if isinstance(part, ast.FormattedValue) else part, known)
            for part in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return words(node.left, known) + words(node.right, known)
    return words(known[node.id], {}) if isinstance(node, ast.Name) and node.id in known else "…"


def message(call: ast.Call, known: dict[str, ast.expr]) -> str:
    """What a call says: its literals, the status of an answer before them."""
    texts = [words(value, known) for value in call.args if not isinstance(value, ast.Starred)]
    texts += [words(word.value, known) for word in call.keywords if word.arg in ("detail", "message")]
    status = str(call.args[0].value) + " " if call.args and isinstance(call.args[0], ast.Constant) else ""
    said = ": ".join(text for text in texts if text.strip("… :"))
    said = re.sub("…{2,}", "…", " ".join(said.split()))
    return (status if status.strip().isdigit() else "") + said


class _Errors(ast.NodeVisitor):
    """Gathers what the code of a file makes of each kind of error: (name, message, whether it raises it)."""

    def __init__(self) -> None:
        self.made: list[tuple[str, str, bool]] = []
        self._class = ""
        self._known: dict[str, ast.expr] = {}

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        outer, self._class = self._class, node.name
        self.generic_visit(node)
        self._class = outer

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        outer, assigned = self._known, [part for part in ast.walk(node) if isinstance(part, ast.Assign)]
        targets = [(part.targets[0], part.value) for part in assigned]
        self._known = outer | {name.id: value for name, value in targets if isinstance(name, ast.Name)}
        self.generic_visit(node)
        self._known = outer

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Raise(self, node: ast.Raise) -> None:
        if isinstance(node.exc, ast.Call):
            self._add(node.exc, raises=True)
            list(map(self.visit, ast.iter_child_nodes(node.exc)))

    def visit_Call(self, node: ast.Call) -> None:
        self._add(node, raises=False)
        self.generic_visit(node)

    def _add(self, call: ast.Call, raises: bool) -> None:
        made = call.func.body if isinstance(call.func, ast.IfExp) else call.func  # of a choice, the first
        name = getattr(made, "attr", getattr(made, "id", ""))
        if name in ("warning", "error", "exception", "critical"):
            owner = getattr(call.func, "value", None)
            name = LOGGED if getattr(owner, "id", getattr(owner, "attr", "")) in ("log", "bound") else name
        elif name == "__init__" and self._class in BY_NAME:  # an error that words itself
            name = self._class
        text = message(call, self._known)
        if sum(map(str.isalpha, text)) >= LEAST_LETTERS:
            self.made.append((name, text, raises))


def errors() -> Iterator[tuple[str, str, str, bool]]:
    """Each file of the product, what it makes there, its message, and whether it raises it on the spot."""
    for package in ("rollout", "services", "workers", "sandbox"):
        for path in sorted((ROOT / package).rglob("*.py")):
            gather, place = _Errors(), str(path.relative_to(ROOT))
            gather.visit(ast.parse(path.read_text()))
            yield from ((place, *made) for made in gather.made if not place.startswith(OWN_PLACES))


def group_of(place: str, name: str, raises: bool) -> Group | None:
    """Where the page has an error that a file makes; None = nowhere."""
    pythons = raises and (not name or (name in PYTHON - OWN and name not in BY_NAME))
    if pythons or name in BY_PLACE:
        return next((group for prefix, group in PLACES if place.startswith(prefix)), None)
    return BY_NAME.get(name)


def messages() -> Iterator[tuple[Group, str]]:
    """Each message with its group, those of a group in alphabetical order."""
    of_group: dict[Group, set[str]] = {group: set() for group in GROUPS}
    for place, name, text, raises in errors():
        if group := group_of(place, name, raises):
            of_group[group].add(text)
    for group, texts in of_group.items():
        yield from ((group, text) for text in sorted(texts, key=str.casefold))


def unplaced() -> set[tuple[str, str]]:
    """What is raised with words of its own and has no place on the page: file and name."""
    return {
        (place, name)
        for place, name, _, raises in errors()
        if raises and name not in OWN and group_of(place, name, raises) is None
    }


def page() -> str:
    """The page as it should be."""

    def add(text: str, entry: tuple[Group, str]) -> str:
        group, line = entry
        heading = f"\n## {group.title}\n\n{group.remedy}\n\n```text\n"
        text = text if heading in text else text + ("```\n" if "```" in text else "") + heading
        return f"{text}{line}\n"

    return reduce(add, messages(), INTRO) + "```\n"


if __name__ == "__main__":
    print(page(), end="")
