"""Drives rollouts by a program that knows nothing of them: `drive.py PROGRAM TASKS --handler HANDLER`."""

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from rollout.client import KEY_VARIABLE, Client, RolloutError
from rollout.schema import EXTERNAL, Agent, AgentAccess, Rollout, RolloutRequest, State

POLL_S, SAY_S, TRIES = 0.2, 30.0, 5


def drive(access: AgentAccess, request: RolloutRequest, program: Path, ask: str, expect: str | None) -> None:
    """Run a program for one attempt of a rollout, with question, address and key; then say that it is done,
    and what it was worth where `expect` names the field of the task that is to be printed."""
    env = {name: text for name, text in os.environ.items() if name != KEY_VARIABLE} | access.environment()
    argv, seconds = [sys.executable, str(program), str(request.task[ask])], request.limits.run_timeout_s
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=seconds, check=False)
    worth = None if expect is None else {"reward": float(str(request.task[expect]) in done.stdout)}
    with httpx.Client(transport=httpx.HTTPTransport(retries=TRIES), timeout=SAY_S) as capture:
        url, key = f"{access.base_url}/v1/{'reward' if worth else 'finish'}", f"Bearer {access.reward_key}"
        capture.post(url, json=worth, headers={"Authorization": key}).raise_for_status()
    print(done.stderr, end="", file=sys.stderr)  # of one whose rollout was cancelled nobody wants to know


def whole(client: Client, how: argparse.Namespace, task: dict) -> Rollout:
    """A rollout of a task from its submission to its end; a failed attempt is followed by another one."""
    request = RolloutRequest(handler=how.handler, task=task, agent=Agent(harness=EXTERNAL))
    (entry,), driven = client.submit(request), 0
    while not (rollout := client.get(entry.id, include="summary")).state.terminal:
        if rollout.state is State.RUNNING and rollout.attempt > driven:
            driven = rollout.attempt
            try:
                drive(client.agent(entry.id), request, how.program, how.ask, how.expect)
            except (subprocess.SubprocessError, httpx.HTTPError, RolloutError) as error:
                print(f"{entry.id}, which RUN's own limit will end: {error}", file=sys.stderr)
        time.sleep(POLL_S)
    return rollout


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Drive rollouts by a program.")
    parser.add_argument("program", type=Path, help="gets the question as its argument")
    parser.add_argument("tasks", type=Path, help="JSON lines, a task each")
    parser.add_argument("--handler", required=True)
    parser.add_argument("--ask", default="question", help="field of a task with the question")
    parser.add_argument("--expect", help="field with what is printed for a reward of 1 [the handler scores]")
    parser.add_argument("--at-once", type=int, default=4, help="programs that run beside each other")
    args = parser.parse_args()
    with Client() as client, ThreadPoolExecutor(args.at_once) as pool:
        for ended in pool.map(lambda line: whole(client, args, json.loads(line)), args.tasks.open()):
            print(f"{ended.id}  {ended.state.value}  reward {ended.reward}  {ended.error or ''}")
