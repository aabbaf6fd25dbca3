"""Messages and tools as the model is given them, built of what a dialect has read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from msgspec import Raw, Struct

from rollout.trajectory import Message, Role, TextPart, ToolCall
from services.capture.dialects.fields import decoded, invalid, shallow, unserved
from services.capture.history import History, going_on

FREE_TEXT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
"""Parameters of a tool that takes a text instead of arguments."""
TEXTS = frozenset({"text", "input_text", "output_text", "refusal", "summary_text", "reasoning_text"})
_OF_SYSTEM = ("system", "developer")


class Part(Struct):
    """A piece of content, in the dialects that call it by its type."""

    type: str = "text"
    text: str | None = None
    refusal: str | None = None


Content = str | list[Part] | None


def text_of(content: Content, where: str, *, seam: str = "\n", by_tool: bool = False) -> str:
    """The text of content.

    Args:
        by_tool: Whether a tool has answered it. What is no text is then named in its place: were this call
            refused, so were all that follow, and the score would be of an image.

    Raises:
        Refusal: `invalid`: a part is something else, an image for example.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for index, part in enumerate(content):
        if part.type not in TEXTS and not by_tool:
            raise unserved(f"{where}[{index}].type", part.type)
        texts.append((part.text or part.refusal or "") if part.type in TEXTS else unseen(part.type))
    return joined(texts, seam)


def unseen(kind: str) -> str:
    """What stands in place of what a tool has shown and a model of text cannot be."""
    return f"[{kind}: it is not shown, for this model reads text alone]"


def joined(texts: Iterable[str], seam: str = "\n") -> str:
    """Texts as one; with the seam between two, unless a line ends there anyway."""
    whole = ""
    for text in texts:
        if whole and text and not (whole.endswith("\n") or text.startswith("\n")):
            whole += seam
        whole += text
    return whole


def message(role: Role, text: str, **fields: Any) -> Message:
    """A message of one text."""
    return Message(role=role, content=[TextPart(text=text)] if text else [], **fields)


def said(text: str = "", reasoning: str = "", calls: Iterable[ToolCall] = ()) -> Message:
    """A message of the assistant."""
    return message("assistant", text, reasoning=reasoning or None, tool_calls=list(calls))


def result(
    text: str, call_id: str | None, *, failed: bool | None = False, name: str | None = None
) -> Message:
    """What a tool has answered; where it failed, the text says so."""
    mark = "Error: " if failed and "error" not in text[:100].lower() else ""
    return message("tool", mark + text, tool_call_id=call_id, name=name)


def of_role(role: str, content: Content, where: str) -> Message:
    """A message of OpenAI's dialects, by its role alone."""
    text = text_of(content, f"{where}.content", seam="" if role == "assistant" else "\n")
    if role == "assistant":
        return said(text)
    if role not in ("user", *_OF_SYSTEM):
        raise unserved(f"{where}.role", role)
    return message("system" if role in _OF_SYSTEM else "user", text)


def tool_call(call_id: str | None, name: str, arguments: str | dict[str, Any] | None, where: str) -> ToolCall:
    """A call of a tool in a history.

    Raises:
        Refusal: `invalid`: its arguments are no object.
    """
    if not isinstance(arguments, dict):
        arguments = decoded(arguments.encode(), dict[str, Any], where) if arguments else {}
    return ToolCall(id=call_id or "", name=name, arguments=shallow(arguments, where))


def offered(name: str, description: str | None, parameters: Any, where: str) -> dict[str, Any]:
    """A tool as codecs render it."""
    if not name:
        raise invalid(f"{where}.name", "a tool needs a name")
    schema = shallow(parameters, where) or {"type": "object", "properties": {}}
    function = {"name": name, "description": description or "", "parameters": schema}
    return {"type": "function", "function": function}


def conversation(
    recent: Iterable[History],
    entries: list[Raw],
    read: Callable[[Raw, str], Iterable[Message]],
    *,
    where: str,
    lead: Iterable[Message] = (),
    merge: bool = False,
) -> History:
    """Messages as a `ModelCall` has them: what of the system leads is one message, what comes later a user's.

    Args:
        recent: Of the same session; what they have is not read again.
        entries: The JSON of what `read`, told where it is, makes messages of.
        lead: What comes before them.
        merge: Whether assistant's messages that follow each other are parts of one turn.
    """
    lead = list(lead)
    history = going_on(recent, [message.text for message in lead], entries)
    rest, system = history.messages, []

    def add(entry: Message) -> None:
        if entry.role == "system" and not rest:
            system.append(entry.text)
        elif entry.role == "system":
            rest.append(message("user", entry.text))
        elif merge and rest and rest[-1].role == entry.role == "assistant":
            first = rest[-1]
            reasoning = (first.reasoning or "") + (entry.reasoning or "")
            rest[-1] = said(first.text + entry.text, reasoning, first.tool_calls + entry.tool_calls)
        else:
            rest.append(entry)

    for entry in () if rest else lead:
        add(entry)
    for at in range(len(history.starts), len(entries)):
        history.starts.append(len(rest))
        for entry in read(entries[at], f"{where}[{at}]"):
            add(entry)
    if text := joined(system, "\n\n"):
        rest.insert(0, message("system", text))
        history.starts = [start + 1 for start in history.starts]
    if not rest:
        raise invalid(where, "there are no messages")
    return history
