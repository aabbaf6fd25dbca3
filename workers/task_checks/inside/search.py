"""Looks for what must not be in the agent's sandbox. Runs in it, by the trusted Python.

What to look for comes on standard input, what was found goes out as JSON. It writes nothing.
"""

import json
import os
import re
import stat
import subprocess
import sys
import threading
import time

KERNEL = ("/proc", "/sys", "/dev")
OURS = "/sbx-"
"""What the sandbox itself brings, beside what the image has."""
SYSTEM = (
    *(
        "/bin",
        "/boot",
        "/lib",
        "/lib32",
        "/lib64",
        "/libx32",
        "/sbin",
        "/usr/bin",
        "/usr/games",
        "/usr/include",
    ),
    *("/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libexec", "/usr/sbin", "/usr/share", "/var/cache"),
    *("/var/lib/apt", "/var/lib/dpkg"),
)
"""What the distribution's packages bring. It is looked through only where that was asked for."""
MOST_FILE = 8 << 20
"""Bytes of a file that is read; a longer one is counted."""
MOST_HISTORY = 16 << 20
MOST_COMMITS = 100
RECENT = 30
"""Commits up to HEAD whose changes are read: one that took the fix out holds it."""
GIT_S = 20.0
BEYOND = "{} commits to which neither HEAD nor its tags lead, such as {}"
_COMMIT = re.compile(rb"(?:^|\n)commit ([0-9a-f]{4,64})\s*$")


class Search:
    def __init__(self, asked):
        self.hidden = [
            (item["what"], [piece.encode("utf-8", "surrogatepass") for piece in item["pieces"]])
            for item in asked["hidden"]
        ]
        self.left_out = set(KERNEL) | (set() if asked["thorough"] else set(SYSTEM))
        self.ends = time.monotonic() + asked["seconds"]
        self.most = asked["bytes"]
        self.repositories = dict.fromkeys(filter(None, asked["repositories"]))
        self.clean = set(self.repositories)
        self.found, self.files, self.bytes, self.complete, self.notes = {}, 0, 0, True, []

    def run(self):
        self.walk("/")
        for place in self.repositories:
            if time.monotonic() > self.ends:
                self.complete = False
                break
            self.history(place)
        found = [{"what": what, "where": where} for what, where in self.found.items()]
        return {
            "found": found,
            "files": self.files,
            "bytes": self.bytes,
            "complete": self.complete,
            "repositories": len(self.repositories),
            "notes": self.notes[:20],
        }

    def walk(self, top):
        folders = [top]
        while folders:
            here = folders.pop()
            try:
                entries = sorted(os.scandir(here), key=lambda entry: entry.name)
            except OSError:
                continue
            names = {entry.name for entry in entries}
            if ".git" in names:
                self.repositories.setdefault(here)
            elif {"HEAD", "objects", "refs"} <= names:
                self.repositories.setdefault(here)
                continue
            for entry in entries:
                path = entry.path
                if time.monotonic() > self.ends or self.bytes > self.most:
                    self.complete = False
                    return
                try:
                    if entry.is_dir(follow_symlinks=False):
                        if not (path in self.left_out or path.startswith(OURS) or entry.name == ".git"):
                            folders.append(path)
                    elif entry.is_file(follow_symlinks=False):
                        self.look(path)
                except OSError:
                    continue

    def look(self, path):
        size = os.lstat(path).st_size
        if size > MOST_FILE:
            self.notes.append(f"not read, {size >> 20} MiB: {path}")
            return
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return
            data = file.read(MOST_FILE)
        self.files += 1
        self.bytes += len(data)
        self.compare(data, path)

    def compare(self, data, where):
        for what, pieces in self.hidden:
            if what not in self.found and pieces and all(piece in data for piece in pieces):
                self.found[what] = f"is in {where}"

    def history(self, place):
        def git(*arguments, stdin=b"", most=MOST_HISTORY):
            argv = ["git", "-c", "safe.directory=*", "--no-pager", "-C", place, *arguments]
            process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "GIT_CONFIG_NOSYSTEM": "1", "GIT_OPTIONAL_LOCKS": "0"},
            )
            end = threading.Timer(GIT_S, process.kill)
            end.start()
            process.stdin.write(stdin)
            process.stdin.close()
            data = process.stdout.read(most)
            if end.finished.is_set() or len(data) == most:
                self.complete = False
            end.cancel()
            process.kill()
            process.wait()
            return data

        try:
            listed = git("cat-file", "--batch-all-objects", "--batch-check=%(objecttype) %(objectname)")
            tags = git("for-each-ref", "--merged=HEAD", "--format=%(refname)", "refs/tags").split()
            reached = git("rev-list", "HEAD", *[tag.decode() for tag in tags]).split()
        except OSError as error:
            self.notes.append(f"no git here reads {place}: {error}")
            return
        commits = [line[7:] for line in listed.splitlines() if line.startswith(b"commit ")]
        beyond = sorted(set(commits) - set(reached))
        if beyond and place in self.clean:
            name = git("log", "--no-walk", "--format=%h %s", beyond[0].decode()).decode("utf-8", "replace")
            self.found["later commits:"] = f"{place} has {BEYOND.format(len(beyond), name.strip())}"
        chosen = b"\n".join([*beyond[:MOST_COMMITS], *reached[:RECENT]]) + b"\n"
        show = ("log", "--stdin", "--no-walk", "-p", "--no-color", "--no-ext-diff", "--format=commit %h")
        commit = ""
        for part in git(*show, stdin=chosen).split(b"\ndiff --git "):
            self.compare(part, f"commit {commit} of {place}")
            if following := _COMMIT.search(part):
                commit = following[1].decode()


if __name__ == "__main__":
    print(json.dumps(Search(json.load(sys.stdin)).run()))
