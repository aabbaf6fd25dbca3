"""Qwen Code, without a terminal."""

from __future__ import annotations

import json

from workers.harnesses.base import Harness, Job, Launch
from workers.harnesses.starting import NODE, fed, instruction_file, npm_program

SETTINGS = {
    "general": {"disableAutoUpdate": True, "enableAutoUpdate": False, "checkpointing": {"enabled": False}},
    "privacy": {"usageStatisticsEnabled": False},
    "telemetry": {"enabled": False},
    "security": {"auth": {"selectedType": "openai"}},
}


class QwenCode(Harness):
    name = "qwen_code"
    packages = ("npm:@qwen-code/qwen-code",)

    def launch(self, job: Job) -> Launch:
        argv = (
            NODE,
            npm_program(self.name, "qwen"),
            "--yolo",
            "--auth-type=openai",
            "--output-format=stream-json",
        )
        env = {
            "OPENAI_BASE_URL": f"{job.base_url}/v1",
            "OPENAI_API_KEY": job.key,
            "OPENAI_MODEL": job.model,
            "NO_COLOR": "1",
            **job.env,
        }
        path = instruction_file(job.home)
        files = {path: job.instruction, f"{job.home}/.qwen/settings.json": json.dumps(SETTINGS)}
        return Launch(fed(argv, path), env, files, (".qwen/projects",))
