"""An agent of the OpenAI Agents SDK, which calls the Responses API.

OPENAI_BASE_URL=… OPENAI_API_KEY=… python examples/agents/openai_agents_agent.py "What is 37 times 85?"
"""

import sys

from agents import Agent, Runner, function_tool, set_tracing_disabled


@function_tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


set_tracing_disabled(True)  # traces go to OpenAI, and the key is not theirs
agent = Agent("calculator", instructions="Use the tools.", tools=[multiply, add], model="gpt-5-mini")
print(Runner.run_sync(agent, sys.argv[1], max_turns=8).final_output)
