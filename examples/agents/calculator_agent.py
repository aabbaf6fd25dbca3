"""A calculator on OpenAI's SDK: it runs what the model calls, until the model says a number.

    OPENAI_BASE_URL=… OPENAI_API_KEY=… python examples/agents/calculator_agent.py "37 times 85"

It offers no tools: the demo model was taught the call's format, and a description is longer than its tasks.
"""

import json
import subprocess
import sys

from openai import OpenAI

TURNS, SECONDS = 4, 30
# A model that is being trained may say anything: it gets what bash can do by itself, and may end nothing.
LIMITS = 'enable -n kill; ulimit -t 2 -v 200000; eval "$1"'


def execute_bash(command: str = "", **_: object) -> str:
    argv = ["/bin/bash", "--restricted", "-c", LIMITS, "bash", command]
    quiet = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT, "env": {"PATH": "/nowhere"}}
    try:
        done = subprocess.run(argv, stdout=subprocess.PIPE, timeout=SECONDS, check=False, **quiet)
    except (subprocess.TimeoutExpired, ValueError, TypeError) as error:
        return f"Error: {type(error).__name__}"
    code = f"\n[exit code {done.returncode}]" if done.returncode else ""
    return (done.stdout.decode(errors="replace").strip("\n") + code).strip("\n") or "[no output]"


client, messages = OpenAI(), [{"role": "user", "content": sys.argv[1]}]
for _ in range(TURNS):
    message = client.chat.completions.create(model="calculator", messages=messages).choices[0].message
    messages.append(message)
    for call in message.tool_calls or ():
        output = execute_bash(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": output})
    if not message.tool_calls:
        break
print(message.content or "")
