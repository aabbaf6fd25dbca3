"""What deploy/slurm/*.sbatch become: `python -m services.launch.slurm.job head|node|engine RUN`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import structlog

from services import logs
from services.launch import SlurmError, StackError
from services.launch.slurm.place import Place
from services.launch.slurm.plan import ENGINE, HEAD, NODE
from services.launch.slurm.rundir import RunDir
from services.queues import STAGES
from services.settings import SettingsError, settings

log = structlog.get_logger("slurm")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m services.launch.slurm.job", description=__doc__)
    parser.add_argument("role", choices=[HEAD, NODE, ENGINE])
    parser.add_argument("run_dir", type=Path, help="the run directory, seen by every node")
    parser.add_argument("--stages", default=",".join(STAGES), help="of a node: init,run,eval or some of them")
    args = parser.parse_args(argv)
    args.stages = [stage for stage in args.stages.split(",") if stage]
    if not args.stages or set(args.stages) - set(STAGES):
        parser.error(f"--stages {','.join(args.stages) or '(none)'}: there are {', '.join(STAGES)}")
    return args


def main() -> int:
    """Entry point; 1 with the reason in the job's output when it cannot go on."""
    args = parse_args()
    try:
        logs.configure(settings())
        run, place = RunDir(args.run_dir), Place.here()
        logs.identify(node=place.name)
        run.make()
        if args.role == HEAD:
            from services.launch.slurm.head import HeadJob

            return HeadJob(run, place).run()
        if args.role == ENGINE:
            from services.launch.slurm.engine import EngineJob

            return EngineJob(run, place).run()
        from services.launch.slurm.node import NodeJob

        return NodeJob(run, place, args.stages).run()
    except (SlurmError, StackError, SettingsError) as error:
        log.error(str(error))
        print(f"rollout slurm: {error}", file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
