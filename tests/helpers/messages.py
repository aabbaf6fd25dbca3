"""docs/messages.md: the messages of errors that a user may meet, as the code has them.

    python -m tests.helpers.messages > docs/messages.md

`…` stands for what a message fills in.
"""

from __future__ import annotations

import ast
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


GROUPS = (
    Group(
        "Commands",
        "The command has changed nothing, unless it says so. `rollout COMMAND --help` shows an example.",
        ("ClickException", "UsageError", "BadParameter"),
    ),
    Group(
        "Client",
        "Is the service up (`rollout status`), and is it the one that you mean (`ROLLOUT_URL`, "
        "`ROLLOUT_API_KEY`)?",
        ("AddressError", "ApiKeyError", "RolloutError", "Unavailable", "WaitTimeout"),
    ),
    Group(
        "Answers of the gateway",
        "A 4xx is the request's: the message names the field. After 429 and 503 the client tries again by "
        "itself. [API](api.md)",
        ("ApiProblem", "invalid"),
    ),
    Group(
        "Tasks and datasets",
        "Mend the row or the map that is named. [Datasets](datasets.md)",
        ("DatasetError",),
    ),
    Group("Planning", "[The path from start to end](guides/swe-qwen3-8b-verl.md)", ("PlanError",)),
    Group(
        "Start and settings",
        "Nothing was left running. Logs are in `.local/run/logs/`. [Settings](settings.md), "
        "[deployment](deploy.md)",
        ("FlowerAuthError", "KeyProblem", "SettingsError", "StackError", "UnfitRedis"),
    ),
    Group("Slurm", "`rollout slurm status` says what to do next. [Slurm](guides/slurm.md)", ("SlurmError",)),
    Group(
        "Images and sandboxes",
        "`python -m sandbox.check --image base` on the node finds the cause. [What to do]"
        "(guides/operate.md#sandboxes-fail-on-one-node)",
        (
            "ImageError",
            "NotAllowed",
            "RuntimeUnavailable",
            "SandboxError",
            "SandboxGone",
            "SandboxStartError",
        ),
    ),
    Group(
        "Why a rollout failed",
        "`rollout show ID` has them. Blame says whose failure it is. [Blame](architecture.md#blame)",
        (
            "AgentFault",
            "BackendUnavailable",
            "CodecError",
            "DeadlinePassed",
            "HandlerError",
            "InfrastructureError",
            "ModelError",
            "NoPython",
            "RedisAway",
            "SandboxFailure",
            "ScorerCrashed",
            "ScorerError",
            "ScorerOutOfMemory",
            "ScorerTimeout",
            "StageTimeout",
            "TaskError",
            "TokenizerMissing",
            "UnknownHandler",
            "WorkerLost",
        ),
    ),
    Group(
        "LLM servers and weights",
        "`rollout backends` has the reason of each. [What to do]"
        "(guides/operate.md#an-engine-answers-nonsense)",
        ("ControlError", "DescribeError", "ProbeError"),
    ),
    Group("Archive", "[Results](results.md)", ("ArchiveError",)),
)
LEAST_LETTERS = 12
"""A shorter one says nothing without what it fills in."""
INTRO = """# Error messages

Messages with which a command, the client, the gateway or a rollout may end, as the code has them where it
raises an error. Those that are composed elsewhere are missing, such as that of
[a lost head](guides/operate.md#the-head-is-gone). Search here for a part of yours; `…` stands for what a
message fills in. `python -m tests.helpers.messages` makes this page, and a test compares.
"""


def words(node: ast.expr | None) -> str:
    """The text of a literal, with … for what is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(words(part) if isinstance(part, ast.Constant) else "…" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return words(node.left) + words(node.right)
    return "…"


def message(call: ast.Call) -> str:
    """What a call says: its literals, the status of an answer before them."""
    texts = [words(value) for value in call.args if not isinstance(value, ast.Starred)]
    texts += [words(word.value) for word in call.keywords if word.arg in ("detail", "message")]
    status = str(call.args[0].value) + " " if call.args and isinstance(call.args[0], ast.Constant) else ""
    said = ": ".join(text for text in texts if text.strip("… :"))
    return (status if status.strip().isdigit() else "") + " ".join(said.split())


def messages() -> Iterator[tuple[Group, str]]:
    """Each message with its group, those of a group in alphabetical order."""
    found: dict[Group, set[str]] = {group: set() for group in GROUPS}
    by_name = {name: group for group in GROUPS for name in group.names}
    for package in ("rollout", "services", "workers", "sandbox"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call):
                    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                    text = message(node) if name in by_name else ""
                    if sum(map(str.isalpha, text)) >= LEAST_LETTERS:
                        found[by_name[name]].add(text)
    for group, texts in found.items():
        yield from ((group, text) for text in sorted(texts, key=str.casefold))


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
