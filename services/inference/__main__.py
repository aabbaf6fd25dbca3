"""`python -m services.inference --model DIR`: load, warm up, then listen; SIGTERM ends it in order."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import time
from pathlib import Path

from aiohttp import web

from services.guard.engine_token import VARIABLE, TokenFile

log = logging.getLogger("services.inference")

GIB = 2**30

SHUTDOWN_GRACE = 5.0
"""Seconds that open connections get to read their aborted replies."""

SMALL_MODEL = 50_000_000
"""Parameters below which one thread is fastest: handing out the work costs more than it saves."""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; option names follow vLLM's where it has them."""
    parser = argparse.ArgumentParser(prog="python -m services.inference", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="directory in Hugging Face's format")
    parser.add_argument("--host", default="127.0.0.1", help="without a token: keep it private")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--token-file", default=os.environ.get(VARIABLE), help="tokens that it asks for")
    parser.add_argument("--served-model-name", help="default: the value of --model")
    parser.add_argument("--max-model-len", type=int, help="tokens; default: the model's context")
    parser.add_argument("--max-num-seqs", type=int, default=128, help="sequences sampled together")
    parser.add_argument("--kv-cache-gib", type=float, default=1.0, help="memory for keys and values, GiB")
    parser.add_argument("--threads", type=int, help="default: 1 for small models, else all processors")
    args = parser.parse_args(argv)
    for name in ("max_model_len", "max_num_seqs", "kv_cache_gib", "threads"):
        value = getattr(args, name)
        if value is not None and value <= 0:
            parser.error(f"--{name.replace('_', '-')} {value} must be above 0")
    return args


async def serve(args: argparse.Namespace) -> None:
    """Run until SIGTERM or SIGINT. ValueError when the model or the options cannot be served."""
    started = time.monotonic()
    tokens = TokenFile(args.token_file) if args.token_file else None
    # Imported late: `--help` and bad options need no torch.
    import torch

    from services.inference.engine import Engine
    from services.inference.model import load_model
    from services.inference.server import create_app

    torch.set_num_threads(args.threads or 1)
    model = load_model(args.model, args.max_model_len)
    parameters = sum(p.numel() for p in model.module.parameters())
    torch.set_num_threads(args.threads or (1 if parameters < SMALL_MODEL else os.cpu_count() or 1))

    capacity = int(args.kv_cache_gib * GIB) // model.kv_bytes_per_token
    if capacity < model.max_model_len:
        raise ValueError(
            f"--kv-cache-gib {args.kv_cache_gib} holds {capacity} tokens, less than one sequence of "
            f"{model.max_model_len}; raise it or lower --max-model-len"
        )
    served_name = args.served_model_name or str(args.model)
    engine = Engine(model, served_name, args.max_num_seqs, capacity)
    engine.start()
    runner = web.AppRunner(
        create_app(engine, tokens),
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=SHUTDOWN_GRACE,
    )
    await runner.setup()
    await web.TCPSite(runner, args.host, args.port).start()
    log.info(
        "serving %s (%.2f M parameters, %d tokens of context, %d of cache) on http://%s:%d after %.1f s",
        served_name,
        parameters / 1e6,
        model.max_model_len,
        capacity,
        args.host,
        args.port,
        time.monotonic() - started,
    )

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()
    log.info("stopping: running requests end with finish_reason abort")
    await engine.stop()
    await runner.cleanup()


def main() -> int:
    """Entry point; 2 for a model or options that cannot be served."""
    args = parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        asyncio.run(serve(args))
    except (ValueError, OSError) as error:
        print(f"services.inference: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
