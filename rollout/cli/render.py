"""What the command line shows: a trajectory for a reader, tables, and the progress bar."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from rich.console import Group, RenderableType
from rich.constrain import Constrain
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from rollout.cli.common import Column, Sheet, node_shown, or_dash
from rollout.exports.steps import end_of
from rollout.schema import (
    DEFAULT_POLICY,
    Backend,
    BackendUpdateState,
    Batch,
    Message,
    PolicyStatus,
    PolicyUpdate,
    Rollout,
    Segment,
    Stage,
    State,
    Trajectory,
    UpdateState,
)
from rollout.schema.agents import Receipt

STATE_STYLE = {"completed": "green", "failed": "red", "timed_out": "yellow", "cancelled": "magenta"}
STATE_STYLE |= {"done": "green", "partly": "yellow"}
"""Of rollouts, and of updates of weights."""
ROLE_STYLE = {"system": "dim", "user": "cyan", "assistant": "green", "tool": "yellow"}
STAGES = ("queued", *(stage.value for stage in Stage))
MAX_SHOWN_CHARS = 4000
"""Of one message; the record itself is whole."""


def state_text(state: State | UpdateState) -> Text:
    return Text(state.value, style=STATE_STYLE.get(state, "blue"))


def _grid(rows: Iterable[tuple[str, RenderableType]]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column(overflow="fold")
    for name, value in rows:
        grid.add_row(name, value)
    return grid


# ---------------------------------------------------------------------------------- one rollout


def rollout_view(rollout: Rollout) -> RenderableType:
    """A rollout to read: facts, the conversation with its token counts, the outcome."""
    parts: list[RenderableType] = [_heading(rollout), _grid(_facts(rollout)), Text()]
    trajectory = rollout.trajectory or Trajectory()
    chains, branch = trajectory.chains, trajectory.branch
    for number, (chain, shared) in enumerate(zip(chains, trajectory.shared_ids, strict=True)):
        if len(chains) > 1:
            whose = f" ({chain.policy}, {chain.model})" if chain.policy else ""
            rule = Rule(f"chain {number}: {chain.role}{whose}", style="dim")
            parts.append(Constrain(rule, 80))  # a pipe is very wide
        turn = branch.turn if branch and chain.policy is None else 0
        parts += _conversation(chain.segments, shared, turn)
        for message in chain.texts:
            parts += _said(message.role, "text only", [message])
    if rollout.trajectory and rollout.trajectory.unread:
        parts.append(Text("tool  not read by the model any more", style="dim"))
        parts += [Padding.indent(_message(message), 2) for message in rollout.trajectory.unread]
    if not chains:
        parts.append(Text("no model call was recorded", style="dim"))
    if rollout.error:
        error = rollout.error
        where = f" in {error.stage.value}" if error.stage else ""
        parts.append(Text(f"{error.blame.value} error{where}: {error.type}: {error.message}", style="red"))
        if error.traceback:
            parts.append(Text(error.traceback.rstrip(), style="dim"))
    parts.append(_grid(_outcome(rollout)))
    return Group(*parts)


def _heading(rollout: Rollout) -> Text:
    """Its ids on lines of their own, which are longer than the window rather than cut."""
    return Text(f"rollout {rollout.id}\ngroup   {rollout.group_id}", "bold", no_wrap=True, overflow="ignore")


def _facts(rollout: Rollout) -> list[tuple[str, RenderableType]]:
    resumed = f", taken over {rollout.resumed} times" if rollout.resumed else ""
    moved = f", moved {rollout.moved} times" if rollout.moved else ""
    rows: list[tuple[str, RenderableType]] = [
        ("state", state_text(rollout.state)),
        ("handler", f"{rollout.handler}   attempt {rollout.attempt}{resumed}{moved}"),
        ("task", _shorten(json.dumps(rollout.request.task, ensure_ascii=False), 400)),
    ]
    if origin := rollout.request.origin:
        branch = rollout.trajectory.branch if rollout.trajectory else None
        text = f"from {origin.rollout} at turn {origin.turn}"
        if branch:
            text += f", {branch.tokens} tokens shared, {branch.sampled_tokens} of them sampled there"
        rows.append(("branched", Text(text)))
    if rollout.sandbox:
        box = rollout.sandbox
        text = f"{box.runtime} on {box.node}, image {box.image or '–'}"
        if box.start_ms is not None:
            text += f", started in {box.start_ms:.0f} ms"
        rows.append(("sandbox", text))
    if rollout.backend:
        rows.append(("backend", rollout.backend))
    return rows


def _conversation(segments: Sequence[Segment], shared: int = 0, turn: int = 0) -> list[RenderableType]:
    """Segments as messages. Ids before a message's own segment (spans of a weight swap) are added up.

    Args:
        shared: Ids that it has of another rollout, in so many turns.
    """
    parts: list[RenderableType] = []
    last_call: str | None = None
    for segment in segments:
        if segment.sampled and (segment.call_id is None or segment.call_id != last_call):
            turn += 1
            last_call = segment.call_id
        note = f"{len(segment.token_ids)} tokens"
        if segment.sampled:
            logprob = sum(segment.logprobs or [0.0]) / max(1, len(segment.token_ids))
            note = f"turn {turn}, {note} sampled, mean log-prob {logprob:.2f}"
            note += f", version {segment.policy_version or '–'}"
            if segment.finish_reason:
                note += f", {segment.finish_reason}"
        elif shared > 0:
            note += ", shared"
        shared -= len(segment.token_ids)
        parts += _said(segment.role, note, segment.messages)
    parts.append(Text())
    return parts


def _said(role: str, note: str, messages: Sequence[Message]) -> list[RenderableType]:
    heading = Text(role, style=f"bold {ROLE_STYLE[role]}").append(f"  {note}", style="not bold dim")
    return [heading, *(Padding.indent(_message(message), 2) for message in messages)]


def _message(message: Message) -> Text:
    text = Text(overflow="fold")
    if message.reasoning:
        text.append(_shorten(message.reasoning, MAX_SHOWN_CHARS) + "\n", style="italic dim")
    if message.text:
        text.append(_shorten(message.text, MAX_SHOWN_CHARS) + "\n")
    for call in message.tool_calls:
        arguments = call.arguments
        # A single argument is shown as it is: a command reads better without JSON's escapes.
        single = next(iter(arguments.values())) if len(arguments) == 1 else None
        shown = single if isinstance(single, str) else json.dumps(arguments)
        text.append(f"→ {call.name} ", style="bold")
        text.append(_shorten(shown, MAX_SHOWN_CHARS) + "\n")
    text.rstrip()
    return text


def _outcome(rollout: Rollout) -> list[tuple[str, RenderableType]]:
    components = "".join(f"   {name} {value:g}" for name, value in rollout.reward_components.items())
    rows: list[tuple[str, RenderableType]] = [("reward", or_dash(rollout.reward, "{:.3f}") + components)]
    rows += [(f"reward, {role}", f"{value:.3f}") for role, value in rollout.role_rewards.items()]
    if rollout.drop:
        rows.append(("dropped", rollout.drop_reason or "no reason given"))
    if rollout.finish_reason:
        rows.append(("finish", rollout.finish_reason.value))
    trajectory = rollout.trajectory
    if trajectory and trajectory.own:
        lengths = f"{len(trajectory.prompt_ids)} prompt, {len(trajectory.response_ids)} response"
        sampled = f"{trajectory.sampled_tokens} sampled in {trajectory.turns} turns"
        rows.append(("tokens", f"{lengths}, {sampled}"))
        rows.append(("versions", ", ".join(trajectory.versions_used) or "–"))
        if receipt := trajectory.receipt:
            rows.append(("captured", _receipt(receipt)))
        rows += [("warning", warning) for warning in trajectory.warnings]
    seconds = rollout.stage_seconds
    times = [f"{stage} {seconds[stage]:.3f} s" for stage in STAGES if stage in seconds]
    rows.append(("times", ", ".join(times) or "–"))
    return rows


def _receipt(receipt: Receipt) -> str:
    beside = f"{receipt.branches} branches, {receipt.retries} retries, {receipt.refused} refused"
    kept = f"drift {receipt.drift}, {receipt.share_delivered:.0%} of the tokens delivered"
    by = f"reward of the {receipt.reward_source}, digest {receipt.digest[:12]}"
    return f"{receipt.harness}: {receipt.calls} calls, {beside}; {kept}; {by}"


def timeline_view(rollout: Rollout) -> RenderableType:
    """What happened to a rollout, in order: changes of state, and notes between them."""
    lines = [
        (event, state_text(event.state), event.owner and f"by {event.owner}") for event in rollout.timeline
    ]
    lines += [(note, Text("·", style="dim"), note.text) for note in rollout.notes]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("after (s)", "attempt", "fence"):
        table.add_column(name, justify="right")
    table.add_column("state")
    table.add_column("what", overflow="fold")
    # Stable: within a millisecond the order in which each list was written stays.
    for entry, state, text in sorted(lines, key=lambda line: line[0].at):
        after = f"{entry.at - rollout.created_at:.3f}"
        table.add_row(after, str(entry.attempt), str(entry.fence), state, Text(text or ""))
    return Group(_heading(rollout), table)


def _shorten(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]} … ({len(text) - limit} more characters)"


# ---------------------------------------------------------------------------------- many rollouts


def rollouts_table(rollouts: Sequence[Rollout], now: float | None = None) -> Sheet:
    """One line a rollout; with `now`, seconds since the epoch, a column with the time since each ended."""
    columns = [
        Column("id", lambda rollout: rollout.id, whole=True),
        Column("state", lambda rollout: state_text(rollout.state)),
        Column("handler", lambda rollout: rollout.handler, drop=4),
        Column("reward", lambda rollout: or_dash(rollout.reward, "{:.3f}"), True),
        Column("turns", lambda rollout: or_dash(rollout.metrics.get("turns"), "{:g}"), True, 3),
        Column("attempt", lambda rollout: str(rollout.attempt), True, 2),
        Column("seconds", lambda rollout: f"{end_of(rollout) - rollout.created_at:.1f}", True, 5),
        Column("note", lambda rollout: _shorten(_note_of(rollout) or _origin_of(rollout), 60), drop=1),
    ]
    if now is not None:
        columns.insert(0, Column("ago", lambda rollout: f"{max(0.0, now - end_of(rollout)):.0f} s", True, 6))
    return Sheet(columns, rollouts)


def ended_line(rollout: Rollout) -> Text:
    """Of one that just ended: id, state, reward, handler, why it failed."""
    line = Text(f"{rollout.id}  ", no_wrap=True, overflow="ignore").append_text(state_text(rollout.state))
    reward = or_dash(rollout.reward, "{:.3f}")
    return line.append(f"  {reward}  {rollout.handler}  {_note_of(rollout)}".rstrip())


def _note_of(rollout: Rollout) -> str:
    """The first line of why it failed or was dropped."""
    note = rollout.error.message if rollout.error else rollout.drop_reason or ""
    return note.partition("\n")[0]


def _origin_of(rollout: Rollout) -> str:
    origin = rollout.request.origin
    return f"fork of {origin.rollout} at turn {origin.turn}" if origin else ""


def time_left(done: int, whole: int, since_s: float) -> str:
    """Until all is done, as h:mm:ss, if it goes on as in the `since_s` seconds so far."""
    if not done or done >= whole:
        return "–"
    return str(timedelta(seconds=round(since_s / done * (whole - done))))


def batches_table(batches: Sequence[Batch], now: float | None = None) -> Sheet:
    """One line a batch; with `now`, seconds since the epoch, a column with the time left."""

    def left(batch: Batch) -> str:
        kept = 0 if batch.state.ended or batch.paused else batch.kept
        return time_left(kept, batch.wanted, (now or 0.0) - batch.created_at)

    def state(batch: Batch) -> Text:
        if batch.state.ended:
            return Text(batch.state.value, "dim")
        return Text(batch.state.value + (" (paused)" if batch.paused else ""), "green")

    columns = [
        Column("batch", lambda batch: batch.id, whole=True),
        Column("state", state),
        Column("kept", lambda batch: f"{batch.kept}/{batch.wanted}"),
        Column("filtered", lambda batch: str(batch.filtered), True, 5),
        Column("failed", lambda batch: str(batch.failed), True, 4),
        Column("cancelled", lambda batch: str(batch.cancelled), True, 3),
        Column("carried", lambda batch: f"+{batch.carried_in} -{batch.carried_out}", drop=2),
        Column("open", lambda batch: str(batch.open), True, 7),
        Column("in flight", lambda batch: str(batch.in_flight), True, 6),
        Column("prompts", lambda batch: str(batch.waiting_prompts), True, 1),
    ]
    if now is not None:
        columns.insert(3, Column("end in", left, True))
    return Sheet(columns, batches)


def summary_table(rollouts: Sequence[Rollout], seconds: float | None = None) -> Table:
    """Reward, turns, tokens, stage times and states of finished rollouts, with trajectories."""
    table = Table(title=f"{len(rollouts)} rollouts", title_justify="left", box=None, pad_edge=False)
    for name in ("", "mean", "p50", "p95"):
        table.add_column(name, justify="left" if not name else "right")

    def row(name: str, values: Sequence[float], digits: int) -> None:
        mean = sum(values) / len(values) if values else None
        ordered = sorted(values)  # for percentiles by nearest rank
        spread = [ordered[int(share * len(ordered))] if ordered else None for share in (0.5, 0.95)]
        table.add_row(name, *(or_dash(value, f"{{:.{digits}f}}") for value in (mean, *spread)))

    with_tokens = [r.trajectory for r in rollouts if r.trajectory]
    row("reward", [r.reward for r in rollouts if r.reward is not None], 3)
    row("turns", [t.turns for t in with_tokens], 2)
    row("tokens sampled", [t.sampled_tokens for t in with_tokens], 1)
    for stage in STAGES:
        label = "waiting in queues" if stage == "queued" else f"stage {stage}"
        row(f"{label} (s)", [r.stage_seconds[stage] for r in rollouts if stage in r.stage_seconds], 3)
    states = Counter(r.state.value for r in rollouts)
    table.add_row("states", ", ".join(f"{count} {name}" for name, count in sorted(states.items())))
    blames = Counter(r.error.blame.value for r in rollouts if r.error)
    if blames:
        table.add_row("failures", ", ".join(f"{count} {name}" for name, count in sorted(blames.items())))
    if seconds:
        table.add_row("throughput", f"{len(rollouts) / seconds:.1f} rollouts/s over {seconds:.1f} s")
    return table


def status_view(status: dict[str, Any], steps: Sequence[str] = ()) -> RenderableType:
    """What `GET /v1/status` says, and what to do next."""
    states = [f"{count} {name}" for name, count in status["states"].items() if count]
    queues = [f"{node_shown(name)} {depth}" for name, depth in status["queues"].items()]
    workers = [f"{stage} {len(names)}" for stage, names in status.get("workers", {}).items()]
    rows: list[tuple[str, RenderableType]] = [
        ("version", status["version"]),
        ("rollouts", ", ".join(states) or "none"),
        ("queues", ", ".join(queues) or "–"),
        ("workers", ", ".join(workers) or "–"),
    ]
    for full_name, node in status.get("nodes", {}).items():
        name = node_shown(full_name)
        rows += [("node " + name, Text(f"INIT is stopped: {why}", "red")) for why in node["stopped"].values()]
        if node["full"]:
            rows.append(("node " + name, f"INIT waits for RUN: {node['ahead']} rollouts are ahead of it"))
    for backend in status["backends"]:
        load = f"{backend['live_rollouts']} rollouts, load {backend['load']:g}"
        served = f"{backend['model']}), version {backend['policy_version'] or '–'}"
        draining = ", draining" if backend["draining"] else ""
        rows.append(("backend", f"{backend['url']} ({served}, {load}{draining}"))
    if not status["backends"]:
        rows.append(("backend", "none: rollouts that need a model wait"))
    if flower := status.get("flower"):
        rows.append(("flower", Text(flower["url"])))
    if compat := status.get("compat"):
        text = f"{compat['address']}: whoever reaches it is {compat['tenant']!r}"
        rows.append(("no key", Text(text, "red")))
    for name, part in (status.get("parts") or {}).items():
        if part["away"]:
            rows.append(("part " + name, Text("has ended; it is started anew soon", "red")))
        elif part["restarts"]:
            rows.append(("part " + name, Text(f"was started anew {part['restarts']} times", "yellow")))
    rows += [("next" if step is steps[0] else "", Text(step, "cyan")) for step in steps]
    return _grid(rows)


def next_steps(status: dict[str, Any], missing: Sequence[str]) -> list[str]:
    """Commands that help now, each with what it is for; `missing` is what `GET /ready` misses."""
    steps = []
    if any("worker" in part for part in missing):
        steps.append("rollout up, or rollout slurm scale --nodes 1   workers, without which nothing runs")
    backends, states = status["backends"], status["states"]
    if not backends:
        steps.append("rollout backends add http://HOST:8000   an LLM server, for rollouts that need a model")
    elif not any(backend["healthy"] and not backend["draining"] for backend in backends):
        steps.append("rollout backends   why no LLM server takes rollouts")
    if states.get("failed"):
        steps.append("rollout list --state failed   what failed, and why")
    if any(count for name, count in states.items() if not State(name).terminal):
        steps.append("rollout top   how they go, live")
    elif not steps:
        steps.append("rollout submit FILE --handler NAME   tasks; `rollout handlers` lists the handlers")
    return steps


# ---------------------------------------------------------------------------------- backends


def backends_table(backends: Sequence[Backend], tokens_per_s: dict[str, float] | None = None) -> Sheet:
    """One line a backend; with tokens a second by id, a column of these and one of the mean time of calls."""

    def load(backend: Backend) -> str:
        return f"{backend.load:g}" + (f" of {backend.capacity_tokens}" if backend.capacity_tokens else "")

    def engine(backend: Backend) -> str:
        if backend.api == "chat":
            return "text only"
        return backend.engine if backend.engine == backend.api else f"{backend.engine} ({backend.api})"

    def stat(field: str, form: str = "{}") -> Callable[[Backend], str]:
        return lambda backend: or_dash(getattr(backend.stats, field, None), form)

    def call(backend: Backend) -> str:
        stats = backend.stats
        if stats is None or not stats.requests or stats.request_seconds is None:
            return "–"
        return f"{stats.request_seconds / stats.requests:.2g} s"

    columns = [
        Column("id", lambda backend: backend.id, whole=True),
        Column("state", _backend_state),
        Column("url", lambda backend: backend.url, drop=9),
        Column("model", lambda backend: _by_policy(backend, backend.served), drop=8),
        Column("engine", engine, drop=7),
        Column("version", lambda backend: _by_policy(backend, backend.versions)),
        Column("rollouts", lambda backend: str(backend.live_rollouts), True),
        Column("load", load, True, 10),
        Column("running", stat("running"), True, 5),
        Column("waiting", stat("waiting"), True, 6),
        Column("cache", stat("kv_usage", "{:.0%}"), True, 4),
        Column("cached", stat("cached_ratio", "{:.0%}"), True, 3),
    ]
    if tokens_per_s is not None:
        columns += [
            Column("tokens/s", lambda backend: or_dash(tokens_per_s.get(backend.id), "{:.0f}"), True),
            Column("call", call, True, 2),
        ]
    return Sheet(columns, backends)


def _by_policy(backend: Backend, words: Mapping[str, str]) -> str:
    """A word for each policy that it serves; with its name, unless that is `default` alone."""
    if [*backend.served] == [DEFAULT_POLICY]:
        return words.get(DEFAULT_POLICY) or backend.policy_version or "–"
    named = {policy: words.get(policy) or "–" for policy in backend.served}
    return ", ".join(f"{policy}={word}" for policy, word in named.items())


def _backend_state(backend: Backend) -> Text:
    if not backend.healthy:
        return Text(f"unhealthy: {_shorten(backend.error or 'no reason given', 60)}", style="red")
    if backend.rejected:
        why = "; ".join(f"{policy}: {text}" for policy, text in backend.rejected.items())
        return Text(f"not for {_shorten(why, 60)}", style="yellow")
    states = [name for name in ("draining", "paused") if getattr(backend, name)]
    return Text(", ".join(states), style="yellow") if states else Text("ready", style="green")


# ---------------------------------------------------------------------------------- policy


def policy_view(status: PolicyStatus) -> RenderableType:
    """The weights in use, and the latest updates."""

    def done(update: PolicyUpdate) -> str:
        states = [backend.state for backend in update.backends.values()]
        return f"{states.count(BackendUpdateState.RESUMED)} of {len(states)}"

    def seconds(update: PolicyUpdate) -> str:
        over = update.started_at and update.finished_at
        return f"{update.finished_at - update.started_at:.3f}" if over else "–"

    head = [("policy" if status.name == DEFAULT_POLICY else f"policy {status.name}", _current(status))]
    columns = [
        Column("update", lambda update: update.id, whole=True),
        Column("version", lambda update: update.version, whole=True),
        Column("state", lambda update: state_text(update.state)),
        Column("mode", lambda update: update.mode, drop=1),
        Column("backends", done),
        Column("seconds", seconds, True),
    ]
    history = ["", Sheet(columns, status.history)] if status.history else []
    return Group(_grid(head), *history)


def policies_table(policies: Sequence[PolicyStatus]) -> Sheet:
    """One line a policy."""
    columns = [
        Column("policy", lambda status: status.name, whole=True),
        Column("backends", lambda status: ", ".join(status.backends) or "none"),
        Column("weights", _current),
    ]
    return Sheet(columns, policies)


def _current(status: PolicyStatus) -> Text:
    now = status.current
    if now is None:
        return Text("none: backends of any weights take rollouts")
    path = now.path or "weights brought by the trainer"
    return Text(f"{now.version} ({path}{'' if now.verified else ', not verified'})")


def update_view(update: PolicyUpdate) -> RenderableType:
    """One update, a line a backend."""
    rows: list[tuple[str, RenderableType]] = [
        ("update", update.id),
        *([("policy", Text(update.policy))] if update.policy != DEFAULT_POLICY else []),
        ("version", Text(update.version)),
        ("state", state_text(update.state)),
        *(("warning", Text(line, style="yellow")) for line in update.warnings),
    ]
    for name, backend in update.backends.items():
        seconds = ", ".join(f"{step} {value:.3f} s" for step, value in backend.seconds.items())
        worst = "" if backend.canary_max_error is None else f"; canary off by {backend.canary_max_error:.2g}"
        error = f"; {backend.error}" if backend.error else ""
        rows.append((name, Text(f"{backend.state.value}: {seconds or '–'}{worst}{error}")))
    return _grid(rows)
