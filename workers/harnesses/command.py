"""Any program: told by a command line with places to fill in, and by the variables of the vendors' SDKs."""

from __future__ import annotations

import re

from workers.harnesses.base import Harness, Job, Launch

ARGUMENT_BYTES = 131071
"""Longest argument or variable that Linux starts a program with, the final NUL left out."""


class Command(Harness):
    name = "command"

    def launch(self, job: Job) -> Launch:
        if not job.command:
            raise ValueError("the harness `command` needs `agent.command`: the program and its arguments")
        fields = ("instruction", "instruction_file", "base_url", "key", "model", "home", "workspace")
        values = {name: getattr(job, name) for name in fields}
        # In one pass: what is filled in may have braces of its own. Other braces stand for themselves.
        places = re.compile("{(" + "|".join(values) + ")}")
        argv = tuple(places.sub(lambda found: values[found[1]], word) for word in job.command)
        if any(len(word.encode()) > ARGUMENT_BYTES for word in argv):
            raise ValueError(
                f"an argument is longer than {ARGUMENT_BYTES} bytes, which no program can be given; "
                "have it read the file {instruction_file}"
            )
        env = {"GOOGLE_GEMINI_BASE_URL": job.base_url}
        env |= {"OPENAI_BASE_URL": f"{job.base_url}/v1", "ANTHROPIC_BASE_URL": job.base_url}
        for vendor in ("OPENAI", "ANTHROPIC", "GEMINI"):
            env |= {f"{vendor}_API_KEY": job.key, f"{vendor}_MODEL": job.model}
        return Launch(argv, {**env, **job.env}, {job.instruction_file: job.instruction})
