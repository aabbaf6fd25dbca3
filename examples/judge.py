"""A judge with a rubric: rollouts of the handler `rubric`, scored by a policy that is not trained.

    python examples/judge.py                                   a judge that this file plays
    python examples/judge.py --judge https://provider/v1 --model NAME --key KEY

The judge is a backend of a policy of its own, `judge`. Here it is text only, as any server with
`/v1/chat/completions` is; KEY names a file in the service's directory of engine keys. The demo model can do
nothing but arithmetic, so without --judge this file serves a judge that knows as much: it shows what one is
asked, and what it has to answer. Without --url a service of its own is started, with the demo model behind.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # examples are no installed package

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from rich.text import Text  # noqa: E402

from examples.demo_model.task import make_tasks  # noqa: E402
from examples.training.service import own_service  # noqa: E402
from rollout.client import Client  # noqa: E402
from rollout.schema import Limits, Rollout, RolloutRequest, SamplingParams  # noqa: E402

TIMEOUT_S = 600.0
RUBRIC = [
    {"name": "right", "text": "The answer is the number that the task asks for.", "weight": 3},
    {"name": "number", "text": "The answer is a number and nothing else."},
]
AT_ONCE = 8
"""Most conversations with the judge at once; a provider's own limit of calls belongs here."""


def requests(n: int, votes: int, seed: int) -> list[RolloutRequest]:
    """So many answers to one question of the demo model's kind."""
    (task,) = make_tasks(1, seed)
    asked = {"prompt": task["question"], "reference": task["answer"], "rubric": RUBRIC, "votes": votes}
    return [
        RolloutRequest(
            handler="rubric",
            task=asked,
            n=n,
            sampling=SamplingParams(temperature=1.3, max_tokens=64, seed=seed),
            limits=Limits(max_turns=2),
        )
    ]


def verdict(question: str) -> str:
    """What a judge answers that knows arithmetic and no more."""
    nonce = re.search(r"<answer (\w+)>", question)[1]

    def part(name: str) -> str:
        return question.split(f"<{name} {nonce}>\n")[1].split(f"\n</{name} {nonce}>")[0]

    answer, right = part("answer").strip(), part("reference")
    # Half of the points for being near: rewards that are all the same teach nothing.
    number = re.fullmatch(r"-?\d+", answer)
    near = number is not None and len(answer) == len(right)
    scores = [10 if answer == right else 5 * near, 10 * (number is not None)]
    return f'It should be {right}.\n{{"verdict": "{nonce}", "scores": {json.dumps(scores)}}}'


@contextmanager
def stand_in() -> Iterator[str]:
    """Serves `verdict` as chat completions; gives the URL."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            self._answer({"data": [{"id": "stand-in"}]})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            message = {"role": "assistant", "content": verdict(asked["messages"][-1]["content"])}
            self._answer({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})

        def _answer(self, body: dict) -> None:
            data = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def judged(
    client: Client, judge: str, model: str | None, key: str | None, n: int, votes: int, seed: int = 0
) -> list[Rollout]:
    """Register the judge, have answers scored, and take the judge away again."""
    backend = client.add_backend(
        judge, model=model, key=key, text_only=True, policies={"judge": None}, max_rollouts=AT_ONCE
    )
    try:
        return client.run(requests(n, votes, seed), TIMEOUT_S)
    finally:
        client.remove_backend(backend.id)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--url", help="a service that runs; None = one of its own")
    parser.add_argument("--backend", help="an LLM server for the service of its own; None = the demo model")
    parser.add_argument("--judge", help="a server with /v1/chat/completions; None = one that this file plays")
    parser.add_argument("--model", help="its model; None = the first that it lists")
    parser.add_argument("--key", help="name of the engine key that it is called with")
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--votes", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    service = nullcontext(args.url) if args.url else own_service(args.backend, None, print)
    judge = nullcontext(args.judge) if args.judge else stand_in()
    with service as url, judge as at, Client(url) as client:
        rollouts = judged(client, at, args.model, args.key, args.n, args.votes, args.seed)
    shown = Table(title=f"judged answers to: {rollouts[0].request.task['prompt']}")
    for name in ("answer", "reward", *(criterion["name"] for criterion in RUBRIC), "votes", "dropped for"):
        shown.add_column(name)
    for rollout in rollouts:
        said = rollout.trajectory.final_text() if rollout.trajectory else ""
        parts = [f"{rollout.reward_components.get(one['name'], 0):.2f}" for one in RUBRIC]
        reward = "–" if rollout.reward is None else f"{rollout.reward:.2f}"
        votes = f"{rollout.metrics.get('judge_calls', 0):g}"
        shown.add_row(Text(" ".join(said.split())[:60]), reward, *parts, votes, rollout.drop_reason or "")
    Console().print(shown)


if __name__ == "__main__":
    main()
