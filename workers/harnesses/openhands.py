"""OpenHands, by its SDK: its default agent without a browser, whose last word ends the run."""

from __future__ import annotations

from workers.harnesses.base import PACK, PYTHON, Harness, Job, Launch

RUN = """\
import sys
from pathlib import Path

from openhands.sdk import LLM, Conversation
from openhands.sdk.conversation.state import ConversationExecutionStatus
from openhands.tools.preset.default import get_default_agent

instruction, workspace, transcripts = sys.argv[1:]
agent = get_default_agent(LLM.load_from_env(), cli_mode=True)
kept = {"persistence_dir": transcripts, "delete_on_close": False}
conversation = Conversation(agent=agent, workspace=workspace, visualizer=None, **kept)
conversation.send_message(Path(instruction).read_text(encoding="utf-8"))
conversation.run()
ended = conversation.state.execution_status
conversation.close()
print(ended.value)
sys.exit(ended is not ConversationExecutionStatus.FINISHED)
"""
"""A program of ours, for the SDK has none: variables LLM_* name the model."""


class Openhands(Harness):
    name = "openhands"
    packages = ("pypi:openhands-sdk", "pypi:openhands-tools")

    def launch(self, job: Job) -> Launch:
        program, path, transcripts = f"{job.home}/run.py", job.instruction_file, "conversations"
        argv = (PYTHON, f"{PACK}/{self.name}/site", program, path, job.workspace, f"{job.home}/{transcripts}")
        env = {
            "LLM_MODEL": f"openai/{job.model}",
            "LLM_BASE_URL": f"{job.base_url}/v1",
            "LLM_API_KEY": job.key,
            "LLM_TIMEOUT": str(int(job.timeout_s)),
            "LLM_MAX_INPUT_TOKENS": str(job.context_tokens),
            "ALLOW_SHORT_CONTEXT_WINDOWS": "true",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "OPENHANDS_SUPPRESS_BANNER": "1",
            **job.env,
        }
        return Launch(argv, env, {path: job.instruction, program: RUN}, (transcripts,))
