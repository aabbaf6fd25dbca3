"""`str_replace_editor`: view and edit files."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from workers.agent.tools.base import Arguments, Observation, Tool, ToolContext, sandbox_of


class EditorArgs(Arguments):
    command: Literal["view", "create", "str_replace", "insert", "undo_edit"]
    path: str = Field(description="Absolute path of a file or, for `view`, a directory.")
    file_text: str | None = Field(None, description="For `create`: content of the new file.")
    old_str: str | None = Field(
        None,
        description="For `str_replace`: text to replace, exactly as in the file and found there only once.",
    )
    new_str: str | None = Field(
        None, description="For `str_replace`: text to put there; for `insert`: lines to add."
    )
    insert_line: int | None = Field(
        None, description="For `insert`: line after which to add; 0 adds at the start of the file."
    )
    view_range: Annotated[list[int], Field(min_length=2, max_length=2)] | None = Field(
        None, description="For `view`: first and last line, from 1; -1 as last means the end of the file."
    )


class StrReplaceEditor(Tool):
    """Files of the sandbox, viewed and edited."""

    name = "str_replace_editor"
    description = (
        "View, create and edit text files. `view` shows a file with line numbers, or a directory two levels "
        "deep; `create` writes a new file and never overwrites one; `str_replace` replaces the single "
        "occurrence of `old_str`; `insert` adds lines; `undo_edit` takes back the last edit of the file."
    )
    Args = EditorArgs

    async def call(self, args: EditorArgs, ctx: ToolContext) -> Observation:
        options = args.model_dump(exclude={"command", "path"})
        result = await sandbox_of(ctx, self).editor(args.command, args.path, **options)
        return Observation(result.output.rstrip("\n") if result.ok else f"Error: {result.output}")
