"""The final answer of a trajectory: the message of `finish`, or the last words; and what is boxed in it."""

from __future__ import annotations

import re

from rollout.trajectory import Trajectory
from workers.agent.tools.finish import Finish

_FINISH = {Finish.name, *Finish.aliases}
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_THINK_END = "</think>"
_LEAD = re.compile(
    r"^[\s*#>-]*(?:(?:so|thus|therefore|hence),?\s+)?(?:the\s+)?(?:final\s+|correct\s+)?(?:answer|result)\b"
    r"(?:\s+(?:is|equals)\b)?[\s:=*]*",
    re.IGNORECASE,
)


def finish_message(trajectory: Trajectory) -> str | None:
    """What the last turn called `finish` with; None: it did not, or with nothing."""
    for message in reversed(trajectory.messages):
        if message.role == "assistant":
            texts = [call.arguments.get("message") for call in message.tool_calls if call.name in _FINISH]
            return next((text.strip() for text in texts if isinstance(text, str) and text.strip()), None)
    return None


def last_words(trajectory: Trajectory) -> str:
    """The last text of the agent without its thoughts, or the empty string.

    A turn that only calls a tool has no text: then the one before it counts.
    """
    for message in reversed(trajectory.messages):
        if message.role == "assistant" and (text := without_thoughts(message.text)):
            return text
    return ""


def without_thoughts(text: str) -> str:
    """What comes after the thoughts; nothing, where they have no end."""
    if _THINK_END in text:
        return text.rsplit(_THINK_END, 1)[1].strip()
    return text.split("<think>", 1)[0].strip()


def boxed(text: str) -> str | None:
    r"""Content of the last `\\boxed{...}` that is whole and not empty; None: there is none."""
    for opening in reversed(list(_BOX.finditer(text))):
        depth = 1
        for brace in _BRACE.finditer(text, opening.end()):
            depth += {"{": 1, "}": -1}.get(brace[0], 0)
            if depth == 0:
                if content := text[opening.end() : brace.start()].strip():
                    return content
                break
    return None


def in_box(answer: str) -> str:
    """Final words that give the answer, which may come in a box of its own."""
    return answer if boxed(answer) else f"\\boxed{{{answer}}}"


def boxed_answer(trajectory: Trajectory) -> str | None:
    """What is boxed in the message of `finish` or beside the call; without a box, the message's last line.

    Where `finish` was not called, or with nothing: what is boxed in the last words. None: there is no answer.
    """
    if message := finish_message(trajectory):
        return boxed(message) or boxed(without_thoughts(trajectory.final_text())) or stated(message)
    return boxed(last_words(trajectory))


def stated(text: str) -> str:
    """The last line of a text, without words such as `The answer is` before it."""
    line = next((line for line in reversed(text.splitlines()) if line.strip()), "")
    return _LEAD.sub("", line, count=1).strip() or line.strip()


def declared(text: str) -> str | None:
    """What the last line says behind words such as `The answer is`; None: it has no such words."""
    line = next((line for line in reversed(text.splitlines()) if line.strip()), "")
    rest = _LEAD.sub("", line, count=1).strip(" *")
    return rest if rest and _LEAD.match(line) else None
