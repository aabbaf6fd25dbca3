"""An agent of smolagents, which answers by calling a tool of its own, `final_answer`.

OPENAI_BASE_URL=… OPENAI_API_KEY=… python examples/agents/smolagents_agent.py "What is 37 times 85?"
"""

import sys

from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


model = OpenAIModel("gpt-5-mini")
agent = ToolCallingAgent([multiply, add], model, max_steps=8, verbosity_level=LogLevel.OFF)
print(agent.run(sys.argv[1]))
