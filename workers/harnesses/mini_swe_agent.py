"""mini-SWE-agent, by its command `mini`."""

from __future__ import annotations

import json

from workers.harnesses.base import PACK, PYTHON, Harness, Job, Launch


class MiniSweAgent(Harness):
    name = "mini_swe_agent"
    packages = ("pypi:mini-swe-agent", "pypi:litellm")

    def launch(self, job: Job) -> Launch:
        path, transcripts = f"{job.home}/task.yaml", "trajectories"
        argv = (PYTHON, f"{PACK}/{self.name}/site", "minisweagent.run.mini")
        argv += ("--config=mini.yaml", f"--config={path}", f"--output={job.home}/{transcripts}/mini.json")
        argv += ("--yolo", "--exit-immediately", "--cost-limit=0")
        # JSON is YAML. The rest of its configuration is its own.
        wait = {"timeout": job.timeout_s, "drop_params": True}
        model = {"model_name": f"openai/{job.model}", "model_kwargs": wait, "cost_tracking": "ignore_errors"}
        task = {"run": {"task": job.instruction}, "model": model}
        env = {
            "OPENAI_API_BASE": f"{job.base_url}/v1",
            "OPENAI_API_KEY": job.key,
            "MSWEA_CONFIGURED": "true",
            "MSWEA_SILENT_STARTUP": "1",
            "MSWEA_GLOBAL_CONFIG_DIR": f"{job.home}/.config/mini-swe-agent",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            **job.env,
        }
        return Launch(argv, env, {path: json.dumps(task)}, (transcripts,))
