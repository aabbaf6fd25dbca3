"""An agent whose diary tells whether its sandbox came whole to another node.

It lies beside the directory of the shell, and its lines are numbered by an exported variable: both must
have come along. What the first turn made, of each kind of file, is compared with what is there in the end.
"""

from __future__ import annotations

import secrets
import shlex

from rollout.schema import Stage
from rollout.trajectory import Message
from tests.helpers import diary
from workers.handlers.base import EvalContext, Reward

PLACES = "/workspace/deep /tmp/deep /home/sandbox/deep /etc/deep"
MAKE = f"""
mkdir {PLACES}; cd /workspace/deep
for place in {PLACES}; do
  head -c 300000 /dev/urandom > $place/blob; chmod 750 $place/blob
  ln -s blob $place/link; ln $place/blob $place/hard
  truncate -s 40M $place/sparse; printf end >> $place/sparse; mkdir $place/empty; echo x > "$place/a b"
done
for i in $(seq 2000); do echo $i > small.$i; done
rm /etc/hostname /etc/issue 2>/dev/null
"""
LOOK = f"""
( find {PLACES} -type d -printf '%p %m\\n' -o -printf '%p %y %m %l %n %T@\\n' | sort
  find {PLACES} -type f -print0 | sort -z | xargs -0 sha256sum; ls /etc/issue ) 2>&1 | sha256sum
"""


class Journey(diary.GatedTask):
    large: bool = False
    """Whether it has 50 MB with it."""


class Traveller(diary.GatedDiary):
    """A diary whose files, directory and variable travel."""

    name = "traveller"
    Task = Journey

    def prompt(self, task: Journey) -> list[Message]:
        (message,) = super().prompt(task)
        return [Message(role="user", content=f"{message.text}{' with luggage' if task.large else ''}")]

    async def evaluate(self, ctx: EvalContext[Journey]) -> Reward:
        await self._pass("eval", ctx)
        look = await ctx.sandbox.exec(["bash", "-c", LOOK])
        before = (await ctx.sandbox.read_file("before")).decode()
        ctx.metrics["same_files"] = float(look.stdout == before)
        ctx.artifacts["looks"] = f"{before}\n{look.stdout}"
        return await super().evaluate(ctx)


class Homebody(Traveller):
    """One that needs its processes."""

    name = "homebody"
    survives = "nothing"
    repeatable = (Stage.INIT, Stage.RUN, Stage.EVAL)


all_handlers = [Traveller, Homebody]


def script(prompt: list[int], number: int) -> list[int]:
    """As `diary.script`, for `fake_engine --script`."""
    text = diary.tokenizer().decode(prompt, skip_special_tokens=False)
    lines, pause, _ = diary._ASKED.search(text).groups()
    asked, word = text.count("export n="), secrets.token_hex(4)
    if asked >= int(lines):
        return diary.spoken("finish", {"message": "done"})
    first = f"{MAKE}\nbash -c {shlex.quote(LOOK)} > /workspace/before; " if not asked else ""
    if "with luggage" in text and not asked:
        first += "head -c 50000000 /dev/zero > /tmp/luggage; "
    rest = f"; sleep {pause}; echo wrote $n" if asked else ""
    command = f"{first}export n=$((n+1)); echo $n {word} >> ../diary{rest}"
    return diary.spoken("execute_bash", {"command": command, "timeout": 300})
