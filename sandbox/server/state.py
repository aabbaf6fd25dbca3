r"""What of a sandbox is not in its files, and how a fresh one is given it: `state`, `trees`, `restore`.

Processes are not kept. Of bash its directory, variables, functions, aliases, options and traps are, exported
or not, as text that another bash reads; what it has open and what runs in it are not. Of the numbered
operations all outcomes are kept. The kernel's variables and what the editor could undo are lost. Who is given
a sandbox after `restore` sees no difference but where something was lost: then the next result of bash, or of
the kernel, says that it was restarted, as ever.
"""

import contextlib
import json
import os
import stat

import proc
from errors import RequestError
from repair import write_private
from shell import quoted
from terminal import NAME
from tree import MAX_CHANGED, identity, walk

SETTLE_S = 30.0
"""For what was abandoned: a command, a cell or a program is ended in less."""
ASIDE_S = 15.0  # as long as a loaded node may take to start a bash; one that says nothing by then is ended
MOST_NAME_BYTES = 8 << 20
"""Of all names in an answer, which comes in one frame."""
DONE = "__sbx_done"
SAVE = (
    r"\builtin umask -p; \builtin alias -p; \builtin declare -p; \builtin declare -f; \builtin declare -Fx; "
    r"\builtin shopt -p; \builtin trap -p; \builtin set +o; \builtin printf '%s' __sbx_done"
)
"""Functions behind what one of their names could keep from being set; last what changes how this is read, and
traps, for not all that is told of can be set.
"""
RESTORE = r"""\builtin cd -- %(cwd)s
\builtin unset -v %(names)s; \builtin unalias -a; \builtin shopt -u expand_aliases; \builtin shopt -s extglob
\builtin . %(file)s >/dev/null && \builtin printf __sbx_done
[[ . -ef $PWD ]] || \builtin cd -- %(home)s"""


class State:
    """Of one sandbox, by its parts."""

    def __init__(self, shell, ipython, ledger, trees, env, first_env):
        """`env`: as the shell's; `first_env`: what it was at the start."""
        self._shell = shell
        self._ipython = ipython
        self._ledger = ledger
        self._trees = trees
        self._env = env
        self._first_env = first_env

    def op_state(self, request, connection):
        """All but the trees, once no numbered operation runs; those that do after `wait_s` are abandoned."""
        self._ledger.settle(float(request.get("wait_s") or 0), SETTLE_S)
        text = self._shell.aside(SAVE, ASIDE_S)
        whole = isinstance(text, bytes) and text.endswith(DONE.encode())
        notes = self._shell.notes()
        alive = proc.descendants(os.getpid())  # before what is ours is asked for: a kernel may be starting
        others = {*alive} - {self._shell.pid(), *self._ipython.all_pids()}
        variables = self._ipython.variables()
        notes["restarted"] = notes["restarted"] or not whole or bool(others)
        return {
            "cwd": os.fsdecode(self._shell.cwd()),
            "exports": text.decode("utf-8", "surrogateescape")[: -len(DONE)] if whole else None,
            "jobs": bool(others) or variables["lost"],
            "shell": notes,
            "kernel": variables,
            "env": {name: value for name, value in self._env.items() if self._first_env.get(name) != value},
            "ledger": self._ledger.state(),
        }

    def op_trees(self, request, connection):
        """How what `note_tree` remembered differs now, by directory. True of files that are copied as long as
        no process runs from before this is asked until they are.
        """
        told, size = {}, 0
        for path, (exclude, directories, noted) in self._trees.noted.items():
            new, altered, seen = [], [], set()
            for name, is_now in _identities(path, exclude, directories):
                seen.add(name)
                if noted is not None and noted.get(name) != is_now:
                    (altered if name in noted else new).append(name)
            altered += [name for name in noted or () if name not in seen]
            size += len(json.dumps(new)) + len(json.dumps(altered))
            if noted is None or len(new) + len(altered) > MAX_CHANGED or size > MOST_NAME_BYTES:
                new = altered = None
            walked = {"exclude": sorted(exclude), "directories": directories}
            told[path] = dict(walked, new=new, altered=altered)
        return {"trees": told}

    def op_restore(self, request, connection):
        """Be as the sandbox whose `state`, with its `trees`, is given. Nothing may have been done here."""
        state = request["state"]
        if not self._ledger.seed(state["ledger"]):
            raise RequestError("only a fresh sandbox can be given the state of another one")
        self._env.update(state["env"])
        self._ipython.variables(state["kernel"])
        self._restore_shell(state["cwd"], state["exports"], dict(state["shell"]))
        self.note_again(state["trees"])
        return {}

    def note_again(self, told):
        """What was noted elsewhere, by what `trees` told of it; what has changed is never as it was again."""
        for path, tree in told.items():
            exclude, noted = frozenset(tree["exclude"]), None
            if tree["altered"] is not None:
                noted = dict.fromkeys(tree["altered"])
                changed = {*tree["altered"], *tree["new"]}
                for name, is_now in _identities(path, exclude, tree["directories"]):
                    if name not in changed:
                        noted[name] = is_now
            self._trees.noted[path] = exclude, tree["directories"], noted

    def _restore_shell(self, cwd, exports, notes):
        file = self._shell.private("state")
        if exports is None:  # what every new bash has
            pairs = ((name, value) for name, value in self._env.items() if NAME.fullmatch(name))
            exports = "".join("export %s=%s\n" % (name, quoted(value)) for name, value in pairs)
        write_private(file, exports)
        names = " ".join(filter(NAME.fullmatch, self._env))
        places = {"cwd": quoted(cwd), "home": quoted(self._shell.home), "names": names, "file": quoted(file)}
        answer = self._shell.aside(RESTORE % places, ASIDE_S)
        notes["restarted"] = notes["restarted"] or answer != DONE.encode()
        self._shell.go_on(notes, None if isinstance(answer, bytes) else os.fsencode(cwd))
        with contextlib.suppress(FileNotFoundError):  # what it says may remove it
            os.unlink(file)


def _identities(path, exclude, directories):
    """Name and identity of all that is below a directory, also where its owner has closed it; it is closed
    again.
    """
    opened = []

    def open_up(place, info, bits):
        if stat.S_ISDIR(info.st_mode) and info.st_mode & bits != bits and info.st_uid == os.geteuid():
            opened.append((place, stat.S_IMODE(info.st_mode)))
            os.chmod(place, opened[-1][1] | bits)

    try:
        for name, _, info in walk(path, exclude, directories, open_up):
            yield name, identity(info)
    finally:
        for place, mode in reversed(opened):
            os.chmod(place, mode)
