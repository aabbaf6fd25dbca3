"""One calculator episode as token ids, built the way the rollout service builds it.

Invariant: prompt, tool result and generation prompt come from `renderers`; what the policy says is
encoded apart. So the model is trained on exactly the ids it later meets.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from renderers import Qwen3RendererConfig, create_renderer

TOOL_NAME = "execute_bash"


@dataclass
class Conversation:
    """Parallel lists over the tokens of one episode."""

    token_ids: list[int]
    sampled: list[bool] = field(default_factory=list)
    """True where the policy says the token, `<|im_end|>` included; the loss counts only these."""


class ConversationMaker:
    """Renders calculator episodes for one tokenizer."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.renderer = create_renderer(tokenizer, Qwen3RendererConfig())
        self.end_of_turn: int = tokenizer.convert_tokens_to_ids("<|im_end|>")

    def prompt_ids(self, question: str) -> list[int]:
        """Ids of the user's message and the generation prompt: no system prompt, no tool schema."""
        return self.renderer.render_ids([{"role": "user", "content": question}], add_generation_prompt=True)

    def tool_call_ids(self, command: str) -> list[int]:
        """Ids of an assistant turn that calls bash, `<|im_end|>` included."""
        call = f'{{"name": "{TOOL_NAME}", "arguments": {{"command": "{command}"}}}}'
        text = f"<tool_call>\n{call}\n</tool_call>"
        return [*self.tokenizer.encode(text, add_special_tokens=False), self.end_of_turn]

    def answer_ids(self, answer: str) -> list[int]:
        """Ids of the last assistant turn, `<|im_end|>` included."""
        return [*self.tokenizer.encode(answer, add_special_tokens=False), self.end_of_turn]

    def after_tool(self, prompt: list[int], sampled: list[int], output: str) -> list[int]:
        """`prompt` and `sampled` unchanged, then the tool's result and the next generation prompt."""
        message = {"role": "tool", "content": output}
        return self.renderer.bridge_to_next_turn(prompt, sampled, [message]).token_ids

    def make(self, question: str, command: str, output: str, answer: str) -> Conversation:
        """A whole episode: question, bash call, its output, final answer."""
        prompt, call, final = self.prompt_ids(question), self.tool_call_ids(command), self.answer_ids(answer)
        second_prompt = self.after_tool(prompt, call, output)
        observation = len(second_prompt) - len(prompt) - len(call)
        return Conversation(
            token_ids=second_prompt + final,
            sampled=[False] * len(prompt) + [True] * len(call) + [False] * observation + [True] * len(final),
        )
