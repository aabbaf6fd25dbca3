"""Gemini CLI, without a terminal."""

from __future__ import annotations

import json

from workers.harnesses.base import Harness, Job, Launch
from workers.harnesses.starting import NODE, fed, instruction_file, npm_program

SETTINGS = {
    "general": {"enableAutoUpdate": False, "enableAutoUpdateNotification": False},
    "privacy": {"usageStatisticsEnabled": False},
    "telemetry": {"enabled": False},
    "security": {"auth": {"selectedType": "gemini-api-key"}, "folderTrust": {"enabled": False}},
}


class GeminiCli(Harness):
    name = "gemini_cli"
    packages = ("npm:@google/gemini-cli",)

    def launch(self, job: Job) -> Launch:
        argv = (
            *(NODE, npm_program(self.name, "gemini"), "--approval-mode=yolo", "--skip-trust"),
            *("--output-format=stream-json", f"--model={job.model}"),
        )
        env = {
            "GOOGLE_GEMINI_BASE_URL": job.base_url,
            "GEMINI_API_KEY": job.key,
            "GEMINI_MODEL": job.model,
            "NO_COLOR": "1",
            **job.env,
        }
        path = instruction_file(job.home)
        files = {path: job.instruction, f"{job.home}/.gemini/settings.json": json.dumps(SETTINGS)}
        return Launch(fed(argv, path), env, files, (".gemini/tmp",))
