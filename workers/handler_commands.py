"""`rollout handlers` and `rollout run`: entry points of the group `rollout.commands`."""

from __future__ import annotations

import asyncio
import importlib.util
import signal
import sys
from pathlib import Path
from typing import IO, Any

import click
from rich.console import Console
from rich.table import Table

from rollout.cli import render, url_option
from rollout.cli.common import Column, ReadingGroup, Sheet, connect, json_option, show_view
from rollout.cli.tasks import IN_FLIGHT, Tasks, dataset_options, submit_all
from rollout.schema import BackendRequest, HandlerInfo, Rollout
from services.engines.describe import DescribeError, describe
from services.settings import Settings, SettingsError
from services.settings import settings as read_settings
from workers.agent.replay import read_actions
from workers.bundles import keep
from workers.errors import StageError
from workers.handlers import skeleton
from workers.handlers.base import AgentHandler
from workers.handlers.registry import Registry
from workers.inprocess import Actions, InProcess, Model, Server, demo_tokenizer

out = Console()
err = Console(stderr=True)


@click.group(cls=ReadingGroup)
def handlers() -> None:
    """List the handlers of the workers, or begin one of your own. Without a command: list them."""


@handlers.command("list")
@json_option
@url_option
def list_handlers(as_json: bool, url: str | None) -> None:
    """Show what the workers announced."""
    with connect(url) as client:
        infos = client.handlers()

    def fields(info: HandlerInfo) -> str:
        needed = info.task_schema.get("required", [])
        names = info.task_schema.get("properties", {})
        return ", ".join(name + ("" if name in needed else "?") for name in names)

    columns = [
        Column("handler", lambda info: info.name, whole=True),
        Column("sandbox", lambda info: (info.image or "yes") if info.uses_sandbox else "no"),
        Column("tools", lambda info: ", ".join(info.tools), drop=1),
        Column("task", fields),
        Column("what it is", lambda info: info.description, drop=2),
    ]
    show_view(Sheet(columns, infos), infos, as_json)


@handlers.command()
@click.argument("name")
@click.option(
    "--directory", type=click.Path(file_okay=False, path_type=Path), default=Path(), help="[default: here]"
)
def new(name: str, directory: Path) -> None:
    """Write a handler NAME that works, with a task, a test, and the actions of a scripted agent."""
    try:
        files = skeleton.write(name, directory)
    except (ValueError, OSError) as error:
        raise click.ClickException(str(error)) from None
    for path in files:
        out.print(f"wrote {path}", highlight=False, soft_wrap=True)
    handler, test, tasks, actions = files
    cls = "".join(part.capitalize() for part in name.split("_"))
    out.print(
        f"\nTry it:   rollout run {handler}:{cls} --task {tasks} --local --actions {actions}\n"
        f"Test it:  pytest {test}\n"
        f"Serve it: ROLLOUT_HANDLERS={handler.stem}:{cls}, with {handler.parent.resolve()} on the workers' "
        "PYTHONPATH",
        highlight=False,
        soft_wrap=True,
    )


def load_handler(name: str, settings: Settings) -> AgentHandler[Any]:
    """A handler by name, as `module:Class` or as `file.py:Class`.

    Raises:
        click.ClickException: There is none of that name, or it cannot be imported.
    """
    target, colon, attribute = name.rpartition(":")
    try:
        if not colon:
            return Registry(settings).get(name)
        if not target.endswith(".py"):
            sys.path.insert(0, str(Path.cwd()))
            return getattr(importlib.import_module(target), attribute)()
        path = Path(target)
        # So that it may import its neighbours, as it can where the workers find it.
        sys.path.insert(0, str(path.resolve().parent))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None or not path.is_file():
            raise click.ClickException(f"there is no file {target}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
        return getattr(module, attribute)()
    except (ImportError, AttributeError, SyntaxError, StageError, SettingsError) as error:
        raise click.ClickException(f"handler {name!r}: {error}") from error


def _model(
    handler: AgentHandler[Any], backend: str | None, actions: Path | None, tokenizer: str | None
) -> Model:
    try:
        if actions is not None:
            return Actions(read_actions(actions), tokenizer or demo_tokenizer())
        if backend is not None:
            return Server(describe(BackendRequest(url=backend, tokenizer=tokenizer)))
        if handler.uses_model:
            raise click.UsageError(
                f"{handler.name} needs a model: --backend URL of an LLM server, or --actions FILE. `python "
                "-m services.inference --model examples/demo_model/checkpoint` serves the demo model."
            )
        return Actions([], "")
    except (DescribeError, StageError, OSError) as error:
        raise click.ClickException(str(error)) from error


def as_interrupt(*_: object) -> None:
    """TERM ends a local run as Ctrl-C does, which releases its sandbox; a second one would end that."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.raise_signal(signal.SIGINT)


@click.command()
@click.argument("handler")
@click.option("--task", "file", required=True, help="A dataset, a task a row, or task directories.")
@click.option("--local", is_flag=True, help="In this process, without a service: for debugging.")
@click.option("--n", type=click.IntRange(1, 1000), default=1, show_default=True, help="Rollouts per task.")
@click.option("--backend", metavar="URL", help="With --local: the LLM server.")
@click.option(
    "--actions",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="With --local: turns to play instead of a model, one a line.",
)
@click.option(
    "--tokenizer", help="With --local. [default: as the server says; the demo model's for --actions]"
)
@click.option(
    "--runtime",
    help="With --local: apptainer, bubblewrap, or local-unsafe where ROLLOUT_SANDBOX_RUNTIMES has it.",
)
@click.option(
    "-o", "--output", type=click.File("w", encoding="utf-8"), help="Where whole rollouts go as JSON lines."
)
@dataset_options
@url_option
def run(
    handler: str,
    file: str,
    local: bool,
    n: int,
    backend: str | None,
    actions: Path | None,
    tokenizer: str | None,
    runtime: str | None,
    output: IO[str] | None,
    url: str | None,
    **dataset: Any,
) -> None:
    """Run tasks with HANDLER (a name, module:Class or file.py:Class) and show what happened.

    With --local all three stages run in this process: breakpoints work, and nothing is started but the host
    of the sandboxes. Without, rollouts are written as by `submit`. Ends with 1 when a rollout failed.
    """
    if not local:
        if backend or actions or tokenizer or runtime:
            raise click.UsageError("--backend, --actions, --tokenizer and --runtime go with --local")
        tasks = Tasks(file, handler, n=n, **dataset)
        submit_all(tasks, output or click.get_text_stream("stdout"), IN_FLIGHT, url, file)
        return
    try:
        settings = read_settings()
    except SettingsError as error:
        raise click.ClickException(str(error)) from error
    loaded = load_handler(handler, settings)
    runner = InProcess(loaded, _model(loaded, backend, actions, tokenizer), settings)
    before = signal.signal(signal.SIGTERM, as_interrupt)
    click.get_current_context().call_on_close(lambda: signal.signal(signal.SIGTERM, before))
    done: list[Rollout] = []
    tasks = Tasks(file, loaded.name, n=n, **dataset)
    tasks.put_bundles(lambda task: keep(task.bundle()))
    for request in tasks:
        for rollout in asyncio.run(runner.run(request.model_copy(update={"sandbox_runtime": runtime}))):
            done.append(rollout)
            out.print(render.rollout_view(rollout))
            if output is not None:
                output.write(rollout.model_dump_json() + "\n")
    if not done:
        raise click.ClickException(f"{file} holds no task")
    table = Table("", "", box=None, show_header=False, pad_edge=False)
    for name, value in loaded.aggregate_metrics(done).items():
        table.add_row(name, f"{value:g}")
    out.print(table)
    if any(rollout.drop for rollout in done):
        raise click.exceptions.Exit(1)
