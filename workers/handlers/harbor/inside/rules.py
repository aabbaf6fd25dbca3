"""Which of an agent's files would run the verifier; beside `place.py`, in the sandbox that they are for."""

import os
import posixpath
import re
import sys

OWN = ("/tests", "/solution", "/logs/verifier")
"""What only the service puts there."""
KEPT = ("/logs", "/logs/agent", "/logs/artifacts", "/tmp", "/var/tmp")
"""Directories that stay as they are."""
CODE = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/usr")
NO_CODE = ("/usr/local/etc", "/usr/local/src", "/usr/src")
CONFIGURES = (
    *("/etc/alternatives", "/etc/apt", "/etc/bash.bashrc", "/etc/bashrc", "/etc/curlrc", "/etc/environment"),
    *("/etc/gitconfig", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/ld.so.preload"),
    *("/etc/nsswitch.conf", "/etc/perl", "/etc/pip.conf", "/etc/profile", "/etc/profile.d", "/etc/python"),
    *("/etc/python3", "/etc/security", "/etc/ssl/openssl.cnf", "/etc/wgetrc", "/etc/zsh", "/etc/zshenv"),
)
"""Of the system: what programs read before they do anything."""
OF_HOMES = {
    *(".bash_login", ".bash_logout", ".bash_profile", ".bashrc", ".config/pip", ".cshrc", ".curlrc"),
    *(".cache/pip", ".cache/uv", ".gdbinit", ".inputrc", ".kshrc", ".local/share/uv", ".login"),
    *(".node_libraries", ".node_modules", ".npm", ".npmrc", ".nvm", ".pip", ".pyenv", ".rustup"),
    *(".profile", ".pydistutils.cfg", ".pythonrc", ".pythonrc.py", ".tcshrc", ".wgetrc", ".zlogin"),
    *(".zprofile", ".zshenv", ".zshrc"),
}
MACHINERY = re.compile(
    r"conftest\.py|\.?pytest\.(ini|toml)|\.coveragerc|noxfile\.py|gconv-modules.*|openssl\.cnf|.*\.(pth|egg-link)"
    r"|(jest|vitest|karma)\.conf(ig)?\.\w+|\.mocharc.*|python\d*\.(zip|_pth)"
)
"""Names that configure tests, or the start of a program, wherever they are."""
AT_CHECKOUT = re.compile(
    r".*/hooks/(post-(checkout|merge|rewrite|index-change|applypatch)|(pre-)?applypatch(-msg)?|reference-transaction)"
)
"""Hooks that git runs where tests put files in place."""
GIT_CONFIG = re.compile(r".*/(\.git(/.*)?/config(\.worktree)?|\.gitconfig|\.config/git/config)")
RUN_BY_GIT = re.compile(
    r"\b(fsmonitor|hookspath|sshcommand|external|textconv|clean|smudge|process|command|pager|editor|include)",
    re.IGNORECASE,
)
"""Settings, or sections, that name programs."""
AT_START = {"sitecustomize", "usercustomize", "apport_python_hook"}
"""Modules that Python imports unasked."""
METADATA = (".dist-info", ".egg-info", "EGG-INFO")
HARMLESS_GROUPS = {"console_scripts", "gui_scripts"}
"""Of entry points; the others name plug-ins, which pytest and others load."""
RUNNING = {
    *("_pytest", "argcomplete", "attr", "coverage", "exceptiongroup", "hypothesis", "iniconfig", "packaging"),
    *("pip", "pkg_resources", "pluggy", "py", "pygments", "pytest", "setuptools", "tomli", "wheel", "xdist"),
}
"""Modules that run tests."""
PYTEST = {"pytest", "_pytest", "pluggy", "iniconfig"}
"""Names that no other module has."""
NO_DANGER = {"test", "idlelib", "lib2to3", "turtledemo"}
"""Of the standard library: what nothing imports."""
RUNNING_PROGRAMS = {
    *("apt", "apt-get", "bash", "bun", "cargo", "curl", "deno", "env", "git", "go", "gradle", "jest", "make"),
    *("mocha", "mvn", "node", "npm", "npx", "perl", "pip", "pip3", "pnpm", "py.test", "pytest", "python"),
    *("python3", "ruby", "sh", "tox", "uv", "uvx", "vitest", "wget", "yarn"),
}
RUNNING_NODE = {".bin", "ava", "chai", "jasmine", "jest", "karma", "mocha", "playwright", "tap", "vitest"}
PYTHON_LIBRARY = re.compile(
    r"(?:.*/)?(?:site-packages|dist-packages|lib(?:64)?/python[\d.]+(?:/lib-dynload)?)/"
)
MODULE = re.compile(r"([A-Za-z_]\w*)(\.py|\.pyc|(\.[\w-]+)?\.so)")
PACKAGE = re.compile(r"([A-Za-z_]\w*)/__init__(\.py|\.pyc|(\.[\w-]+)?\.so)")
LEFT_BEHIND = ""
"""Why a file does not travel that nobody misses; it is not told."""
MOST_READ = 256 << 10
"""Bytes of a file that may configure tests: what cuts one short breaks it, or says nothing to them."""


def within(path, places):
    """Whether a path is one of these or lies below one."""
    return any(path == place or path.startswith(place + "/") for place in places)


class Image:
    """What runs programs in this sandbox, before anything of the agent's is in it."""

    def __init__(self, workdir, roots, env):
        self.workdir = posixpath.normpath(workdir)
        self.homes = {env.get("HOME", "/root"), "/root"}
        on_path = [place for place in env.get("PATH", "").split(":") if place.startswith("/")]
        on_path += ["/usr/local/bin", "/usr/bin", "/bin"]
        on_path += [f"{home}/{name}" for home in self.homes for name in (".local/bin", ".cargo/bin", "bin")]
        self.program_places = self._both(on_path) - {self.workdir}
        prefixes = {posixpath.dirname(place) for place in self.program_places}
        prefixes -= {self.workdir, "/", *self.homes}
        names = ("lib", "lib64", "libexec")
        self.code = (*CODE, *(f"{prefix}/{name}" for prefix in prefixes for name in names))
        libraries = [place for place in self.code if "/lib" in place] + ["/usr/lib", "/usr/local/lib"]
        libraries += env.get("LD_LIBRARY_PATH", "").split(":")
        below = [f"{place}/{name}" for place in libraries for name in self.listed(place) if "-linux-" in name]
        self.libraries = {
            name for place in (*libraries, *below) for name in self.listed(place) if ".so" in name
        }
        self.programs = RUNNING_PROGRAMS.union(*map(self.listed, self.program_places))
        self.modules = (
            set(sys.stdlib_module_names) - NO_DANGER | RUNNING | AT_START | self._installed(libraries)
        )
        self.made = set()
        """What is not the image's, though it is there."""
        given = [place for place in env.get("PYTHONPATH", "").split(":") if place.startswith("/")]
        self.import_roots = self._both([self.workdir, *roots, *given])

    @staticmethod
    def listed(place):
        """Names of what is in a directory."""
        try:
            return os.listdir(place)
        except OSError:
            return []

    @staticmethod
    def _both(places):
        """As they are called, and where links of the image lead."""
        return {posixpath.normpath(form) for place in places for form in (place, os.path.realpath(place))}

    def _installed(self, libraries):
        names = set()
        for place in libraries:
            for python in self.listed(place):
                if not python.startswith("python"):
                    continue
                for below in ("", "/site-packages", "/dist-packages"):
                    names |= {name.split(".")[0] for name in self.listed(f"{place}/{python}{below}")}
        return names - {"__pycache__"}

    def is_code(self, path):
        """Whether programs and libraries of the system are there, or modules of Python."""
        system = within(path, self.code) and not within(path, NO_CODE)
        return system or bool(PYTHON_LIBRARY.match(path)) or self.has_programs(posixpath.dirname(path))

    def has_programs(self, directory):
        """Whether programs are found there, at once or in an environment that tests may enter."""
        above, name = posixpath.split(directory)
        marks = {f"{above}/pyvenv.cfg", f"{above}/conda-meta"} - self.made
        return directory in self.program_places or (name == "bin" and any(map(os.path.lexists, marks)))

    def is_way(self, path):
        """Whether it is on the way to a place that programs are found in."""
        configured = [f"{home}/.config" for home in self.homes]
        ways = (*self.import_roots, *self.program_places, *self.homes, *configured)
        return any(within(way, (path,)) for way in ways)


class Rules:
    """Which of the agent's files do not travel."""

    most_read = MOST_READ

    def __init__(self, image, trust=False):
        self.image, self._trust = image, trust

    def objection(self, path, kind, read):
        """Why something does not travel, in some words; None = it does.

        Args:
            path: Absolute, as the agent's sandbox had it.
            kind: `file`, `link`, `directory`, or `removed`.
            read: Gives the content of a file.
        """
        old = os.path.lexists(path)
        if within(path, OWN) or path in KEPT:
            return "only the verifier's"
        if self._trust:
            return None
        parts = path.split("/")
        name = parts[-1]
        if "__pycache__" in parts or (name.endswith((".pyc", ".pyo")) and PYTHON_LIBRARY.match(path)):
            return LEFT_BEHIND
        if kind == "link" and (name.endswith(METADATA) or (self.image.is_way(path))):
            return "a link in the place of what the verifier uses"
        if MACHINERY.fullmatch(name) or any(part.split(".")[0] in AT_START for part in parts):
            return "configures tests or the start of programs"
        if within(path, CONFIGURES) or self._of_a_home(path):
            return "configures the start of programs"
        if name == "pyvenv.cfg" and (old or self.image.is_code(path) or self.image.is_code(f"{path}/lib")):
            return "configures the start of programs"
        if kind == "file" and self._configures_tests(path, parts, read):
            return "configures tests"
        if AT_CHECKOUT.fullmatch(path) or (GIT_CONFIG.fullmatch(path) and RUN_BY_GIT.search(_text(read()))):
            return "has git run programs"
        return self._of_code(path, name, kind, old) or self._shadowing(path)

    def objection_to_link(self, path):
        """Why a link does not stay, once all is in place."""
        if within(os.path.realpath(path), (*OWN, "/proc")):
            return "leads to what only the verifier has"
        root, _, name = path.rpartition("/")
        shadowing = not self._trust and root in self.image.import_roots and name in self.image.modules
        package = shadowing and any(entry.startswith("__init__.") for entry in self.image.listed(path))
        return "stands before a module" if package else None

    def _of_a_home(self, path):
        owner = "/".join(path.split("/")[:3]) if path.startswith("/home/") else "/root"
        for home in (*self.image.homes, owner):
            below = path[len(home) + 1 :].split("/") if path.startswith(home + "/") else []
            if below and OF_HOMES & {"/".join(below[:depth]) for depth in (1, 2, 3)}:
                return True
        return False

    def _configures_tests(self, path, parts, read):
        if parts[-1] == "entry_points.txt" and parts[-2].endswith(METADATA):
            heads = [line.strip() for line in _text(read()).splitlines() if line.lstrip().startswith("[")]
            return not {head.strip("[] \t") for head in heads} <= HARMLESS_GROUPS
        told = {"pyproject.toml": _of_pytest, "setup.cfg": _sections, "tox.ini": _sections}.get(parts[-1])
        return told is not None and told(_text(read())) != told(_text(_content(path)))

    def _of_code(self, path, name, kind, old):
        image = self.image
        if "node_modules" in path.split("/"):
            package = path.rpartition("/node_modules/")[2].split("/")[0]
            if package in RUNNING_NODE or within(path, ("/node_modules",)):
                return "runs tests"
        if not image.is_code(path):
            return None
        if old:
            return "of the system"
        if kind == "directory":
            return None
        if image.has_programs(posixpath.dirname(path)) and name in image.programs:
            return "stands before a program"
        if ".so" in name and name in image.libraries:
            return "stands before a library"
        library = PYTHON_LIBRARY.match(path)
        if library and path[library.end() :].split("/")[0].split(".")[0] in image.modules:
            return "stands before a module, or adds to one"
        return None

    def _shadowing(self, path):
        last = "/".join(path.split("/")[-2:])
        named = PACKAGE.fullmatch(last) or MODULE.fullmatch(posixpath.basename(path))
        if named and named[1] in PYTEST and not os.path.lexists(path):
            return "stands before a module"
        for root in self.image.import_roots:
            if not path.startswith(root.rstrip("/") + "/"):
                continue
            below = path[len(root.rstrip("/")) + 1 :]
            found = MODULE.fullmatch(below) or PACKAGE.fullmatch(below)
            if found and found[1] in self.image.modules and not _there(root, found[1]):
                return "stands before a module"
        return None


def _there(root, module):
    """Whether the image has a module of that name there."""
    return any(os.path.lexists(f"{root}/{module}{ending}") for ending in (".py", "/__init__.py"))


def _content(path):
    try:
        with open(path, "rb") as file:
            return file.read(MOST_READ)
    except OSError:
        return b""


def _text(content):
    return content.decode("utf-8", "surrogateescape")


def _of_pytest(text):
    """What a `pyproject.toml` says to pytest; the text itself where nobody can tell."""
    try:
        import tomllib

        tools = tomllib.loads(text).get("tool", {})
        return {name: tools[name] for name in ("pytest", "coverage") if name in tools}
    except (ImportError, ValueError, AttributeError, RecursionError):
        return text


def _sections(text):
    """The lines of an .ini file that are for pytest."""
    lines, inside = [], False
    for line in text.splitlines():
        if line.startswith("["):
            inside = "pytest" in line
        if inside and line.strip():
            lines.append(line.rstrip())
    return lines
