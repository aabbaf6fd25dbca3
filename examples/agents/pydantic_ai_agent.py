"""An agent of Pydantic AI.

OPENAI_BASE_URL=… OPENAI_API_KEY=… python examples/agents/pydantic_ai_agent.py "What is 37 times 85?"
"""

import sys

from pydantic_ai import Agent

agent = Agent("openai-chat:gpt-5-mini", instructions="Use the tools.")


@agent.tool_plain
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


@agent.tool_plain
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


print(agent.run_sync(sys.argv[1]).output)
