"""Harbor tasks made from real packages: each has a function broken by a line, an issue, tests and a solution.

The sources are those that are installed with this Python, copied when the task is made. What is here of them
are the lines that are changed, as short as they can be told apart.
"""

from __future__ import annotations

import difflib
import shutil
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

CONFIG = """\
schema_version = "1.4"
[task]
name = "packages/{name}"
description = "{package}, with one function broken."
[agent]
timeout_sec = 300
[verifier]
timeout_sec = 60
[environment]
docker_image = "base"
workdir = "/app"
[[steps]]
name = "fix"
"""
TEST = """\
if PYTHONPATH=/app/src python3 -B /tests/check.py; then echo 1; else echo 0; fi >/logs/verifier/reward.txt
"""
SOLVE = "cd /app/src && patch -s -p1 </solution/fix.patch\n"
INSTRUCTION = """\
# {title}

{issue}

The sources of `{package}` are in /app/src. Fix the cause there; its public interface stays as it is.
"""


@dataclass(frozen=True)
class Broken:
    """A package with one function broken."""

    name: str
    file: str
    """Below the directory of packages."""
    right: str
    """As it stands in the package."""
    wrong: str
    """What stands there instead."""
    issue: str
    checks: str
    """Python that fails on the broken package and not on the whole one."""

    @property
    def package(self) -> str:
        return self.file.partition("/")[0].removesuffix(".py")

    def write(self, root: Path) -> Path:
        """Make the task's directory.

        Raises:
            LookupError: The package is not as this table has it; the lines must be looked up again.
        """
        step = root / "steps" / "fix"
        where = step / "workdir" / "src"
        where.mkdir(parents=True)
        _copy(self.package, where)
        text = (where / self.file).read_text("utf-8")
        if self.right not in text:
            raise LookupError(f"{self.name}: {self.file} has no {self.right!r}")
        broken = text.replace(self.right, self.wrong, 1)
        (where / self.file).write_text(broken, "utf-8")
        patch = difflib.unified_diff(
            broken.splitlines(keepends=True),
            text.splitlines(keepends=True),
            f"a/{self.file}",
            f"b/{self.file}",
        )
        title = self.issue.partition(".")[0]
        instruction = INSTRUCTION.format(title=title, issue=self.issue, package=self.package)
        files = {
            root / "task.toml": CONFIG.format(name=self.name, package=self.package),
            step / "instruction.md": instruction,
            step / "tests" / "test.sh": TEST,
            step / "tests" / "check.py": self.checks,
            step / "solution" / "solve.sh": SOLVE,
            step / "solution" / "fix.patch": "".join(patch),
        }
        for path, content in files.items():
            path.parent.mkdir(exist_ok=True)
            path.write_text(content, "utf-8")
        return root


def _copy(package: str, into: Path) -> None:
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise LookupError(f"{package} is not installed")
    origin = Path(spec.origin)
    if origin.name == "__init__.py":
        ignored = shutil.ignore_patterns("__pycache__", "*.so", "locale", "tests", "*.pyi")
        shutil.copytree(origin.parent, into / package, ignore=ignored)
    else:
        shutil.copy(origin, into)


def write_all(root: Path, count: int | None = None) -> list[Path]:
    """The directories of all tasks, or of the first `count`, made below `root`."""
    return [broken.write(root / broken.name) for broken in BROKEN[:count]]


BROKEN = (
    Broken(
        "click-clamp",
        "click/types.py",
        "return bound + dir",
        "return bound",
        "IntRange clamps to a bound that is open. With `max_open=True, clamp=True` a value beyond the "
        "maximum becomes the maximum itself, which the range does not include.",
        """\
import click
assert click.IntRange(0, 10, max_open=True, clamp=True).convert("12", None, None) == 9
assert click.IntRange(0, 10, min_open=True, clamp=True).convert("-5", None, None) == 1
assert click.IntRange(0, 10, clamp=True).convert("12", None, None) == 10
assert click.IntRange(0, 10, clamp=True).convert("7", None, None) == 7
""",
    ),
    Broken(
        "click-range-text",
        "click/types.py",
        'op = "<" if self.max_open else "<="',
        'op = "<="',
        "The help of an open range reads as if it were closed. `IntRange(max=5, max_open=True)` is described "
        "as `x<=5`.",
        """\
import click
assert "x<5" in repr(click.IntRange(max=5, max_open=True)), click.IntRange(max=5, max_open=True)
assert "x<=5" in repr(click.IntRange(max=5))
assert "x>=1" in repr(click.IntRange(min=1))
""",
    ),
    Broken(
        "packaging-prerelease",
        "packaging/version.py",
        "return self.dev is not None or self.pre is not None",
        "return self.pre is not None",
        "Development releases count as final. `Version('1.0.dev3').is_prerelease` is False.",
        """\
from packaging.version import Version
assert Version("1.0.dev3").is_prerelease
assert Version("1.0rc1").is_prerelease and Version("1.0a1.dev2").is_prerelease
assert not Version("1.0").is_prerelease and not Version("1.0.post1").is_prerelease
""",
    ),
    Broken(
        "packaging-name",
        "packaging/utils.py",
        '.replace("_", "-").replace(".", "-")',
        '.replace("_", "-")',
        "Names with dots are not normalised. `canonicalize_name('zope.interface')` should be the same as of "
        "`zope-interface` (PEP 503).",
        """\
from packaging.utils import canonicalize_name
assert canonicalize_name("zope.interface") == "zope-interface"
assert canonicalize_name("A_.-b") == "a-b"
assert canonicalize_name("Django") == "django"
""",
    ),
    Broken(
        "humanize-binary",
        "humanize/filesize.py",
        "base = 1024 if (gnu or binary) else 1000",
        "base = 1024 if gnu else 1000",
        "Binary sizes are divided by 1000. `naturalsize(1024 * 1024, binary=True)` should be `1.0 MiB`.",
        """\
from humanize.filesize import naturalsize
assert naturalsize(1024 * 1024, binary=True) == "1.0 MiB", naturalsize(1024 * 1024, binary=True)
assert naturalsize(3000, binary=True) == "2.9 KiB"
assert naturalsize(3000, gnu=True) == "2.9K"
assert naturalsize(3_000_000) == "3.0 MB"
""",
    ),
    Broken(
        "humanize-ordinal",
        "humanize/number.py",
        "in (11, 12, 13)",
        "in (11, 12)",
        "The ordinal of thirteen is wrong. `ordinal(13)` gives `13rd`, and so do 113 and 1013.",
        """\
from humanize import ordinal
assert [ordinal(n) for n in (1, 2, 3, 4, 11, 12, 13)] == ["1st", "2nd", "3rd", "4th", "11th", "12th", "13th"]
assert ordinal(113) == "113th" and ordinal(103) == "103rd"
""",
    ),
    Broken(
        "cachetools-resize",
        "cachetools/__init__.py",
        "diffsize = itemsize - size[key]",
        "diffsize = itemsize",
        "Replacing a value counts its size twice. After a key of a cache with `getsizeof` was set again, "
        "`currsize` is too large and items are thrown out although there is room.",
        """\
from cachetools import LRUCache
cache = LRUCache(maxsize=10, getsizeof=len)
cache["a"] = "12345"
cache["b"] = "123"
cache["a"] = "1234"
assert cache.currsize == 7, cache.currsize
assert sorted(cache) == ["a", "b"]
cache["a"] = "1"
assert cache.currsize == 4
""",
    ),
    Broken(
        "cachetools-pop",
        "cachetools/__init__.py",
        "            value = self[key]\n            del self[key]\n",
        "            value = self[key]\n",
        "`pop` leaves the item in the cache. After `cache.pop(key)` the key is still there.",
        """\
from cachetools import Cache, LFUCache
for kind in (Cache, LFUCache):
    cache = kind(maxsize=3)
    cache["a"] = 1
    assert cache.pop("a") == 1
    assert "a" not in cache and cache.currsize == 0
    assert cache.pop("a", 5) == 5
""",
    ),
    Broken(
        "mdurl-ipv6",
        "mdurl/_format.py",
        '":" in url.hostname',
        'url.hostname.startswith(":")',
        "Formatting a URL loses the brackets of IPv6 addresses. `format(parse('http://[fe80::1]:80/x'))` is "
        "no URL any more.",
        """\
import mdurl
for text in ("http://[fe80::1]:80/x", "http://[::1]/", "http://host:8080/a?b#c", "mailto:a@b.c"):
    assert mdurl.format(mdurl.parse(text)) == text, mdurl.format(mdurl.parse(text))
""",
    ),
    Broken(
        "mdurl-decode",
        "mdurl/_decode.py",
        "(b1 & 0xE0) == 0xC0 and (i + 3 < l)",
        "(b1 & 0xE0) == 0xC0 and (i + 6 < l)",
        "A character of two bytes at the end of a sequence is not decoded. `decode('caf%C3%A9')` gives two "
        "replacement characters.",
        """\
import mdurl
assert mdurl.decode("caf%C3%A9") == "caf\\u00e9", mdurl.decode("caf%C3%A9")
assert mdurl.decode("%C3%A9%C3%A9") == "\\u00e9\\u00e9"
assert mdurl.decode("%E2%82%AC") == "\\u20ac" and mdurl.decode("%C3") == "\\ufffd"
""",
    ),
    Broken(
        "iniconfig-equals",
        "iniconfig/_parse.py",
        'line.split("=", 1)',
        'line.split("=")',
        "A value with an equals sign cannot be read. `opts = --level=3` is an unexpected line.",
        """\
from iniconfig import IniConfig
config = IniConfig("x.ini", data="[s]\\nopts = --level=3\\nplain = 1\\nother: 2\\n")
assert config["s"]["opts"] == "--level=3"
assert config["s"]["plain"] == "1" and config["s"]["other"] == "2"
""",
    ),
    Broken(
        "itsdangerous-padding",
        "itsdangerous/encoding.py",
        "(-len(string) % 4)",
        "(-len(string) % 2)",
        "Some values cannot be decoded. `base64_decode(base64_encode(b'ab'))` works, and for one byte it "
        "says that the data is invalid.",
        """\
from itsdangerous import URLSafeSerializer
from itsdangerous.encoding import base64_decode, base64_encode
for length in range(12):
    assert base64_decode(base64_encode(b"x" * length)) == b"x" * length, length
assert URLSafeSerializer("key").loads(URLSafeSerializer("key").dumps({"a": 1})) == {"a": 1}
""",
    ),
    Broken(
        "h11-lengths",
        "h11/_headers.py",
        'lengths = {length.strip() for length in value.split(b",")}',
        "lengths = {value}",
        "A Content-Length that is said twice is refused. `Content-Length: 5, 5` is as good as `5`.",
        """\
import h11
connection = h11.Connection(h11.SERVER)
connection.receive_data(b"POST / HTTP/1.1\\r\\nHost: a\\r\\nContent-Length: 5, 5\\r\\n\\r\\nhello")
request = connection.next_event()
assert dict(request.headers)[b"content-length"] == b"5"
assert bytes(connection.next_event().data) == b"hello"
try:
    h11.Request(method="GET", target="/", headers=[("Host", "a"), ("Content-Length", "5, 6")])
except h11.LocalProtocolError:
    pass
else:
    raise AssertionError("conflicting lengths")
""",
    ),
    Broken(
        "idna-hyphen",
        "idna/core.py",
        'label.startswith("-") or label.endswith("-")',
        'label.startswith("-")',
        "A label that ends with a hyphen passes. `check_hyphen_ok('abc-')` should raise IDNAError.",
        """\
import idna
from idna.core import check_hyphen_ok
for bad in ("abc-", "-abc", "ab--c"):
    try:
        check_hyphen_ok(bad)
    except idna.IDNAError:
        continue
    raise AssertionError(bad)
assert check_hyphen_ok("a-b") and idna.encode("m\\u00fcnchen.de") == b"xn--mnchen-3ya.de"
""",
    ),
    Broken(
        "sortedcontainers-count",
        "sortedcontainers/sortedlist.py",
        "return self._len - self._loc(pos_left, idx_left)",
        "return self._loc(pos_left, idx_left)",
        "SortedList.count is wrong for the largest value. `SortedList([1, 2, 2]).count(2)` gives 1.",
        """\
from sortedcontainers import SortedList
values = SortedList([1, 2, 2, 3, 3, 3])
assert [values.count(n) for n in (0, 1, 2, 3, 4)] == [0, 1, 2, 3, 0]
assert SortedList([7] * 3000).count(7) == 3000
""",
    ),
    Broken(
        "prometheus-buckets",
        "prometheus_client/utils.py",
        ".rstrip('0.')",
        ".rstrip('.')",
        "Large bucket bounds are written with needless zeros. `floatToGoString(1e7)` should be `1e+07`, as "
        "Go has it.",
        """\
from prometheus_client.utils import floatToGoString
assert floatToGoString(1e7) == "1e+07", floatToGoString(1e7)
assert floatToGoString(12500000.0) == "1.25e+07"
assert floatToGoString(0.5) == "0.5" and floatToGoString(float("inf")) == "+Inf"
""",
    ),
    Broken(
        "blinker-muted",
        "blinker/base.py",
        "        if self.is_muted:\n            return []\n",
        "",
        "A muted signal is sent all the same. Within `with signal.muted():` receivers are called.",
        """\
from blinker import Signal
signal, heard = Signal(), []
def receiver(sender, **_):
    heard.append(sender)
signal.connect(receiver)
with signal.muted():
    assert signal.send("a") == []
signal.send("b")
assert heard == ["b"], heard
""",
    ),
    Broken(
        "vine-barrier",
        "vine/synchronization.py",
        "if self.finalized and self._value >= self.size:",
        "if self.finalized and self._value > self.size:",
        "A barrier is never reached. The callback of `barrier([p1, p2])` is not called when both promises "
        "are fulfilled.",
        """\
from vine import barrier, promise
first, second, calls = promise(), promise(), []
both = barrier([first, second], callback=promise(lambda: calls.append(1)))
first()
assert calls == []
second()
assert calls == [1] and both.ready
""",
    ),
    Broken(
        "tqdm-interval",
        "tqdm/std.py",
        "divmod(mins, 60)",
        "divmod(mins, 100)",
        "Hours are never shown. `tqdm.format_interval(3661)` gives `61:01`.",
        """\
from tqdm.std import tqdm
assert tqdm.format_interval(3661) == "1:01:01", tqdm.format_interval(3661)
assert tqdm.format_interval(59) == "00:59" and tqdm.format_interval(3599) == "59:59"
""",
    ),
    Broken(
        "six-metaclass",
        "six.py",
        "orig_vars.pop('__weakref__', None)",
        "orig_vars.pop('__weakrefs__', None)",
        "A class made by add_metaclass takes no weak references. `weakref.ref` of an instance fails, or "
        "making the class does.",
        """\
import gc, weakref
import six
class Meta(type):
    pass
@six.add_metaclass(Meta)
class Thing:
    value = 3
thing = Thing()
assert "__weakref__" not in vars(Thing) or vars(Thing)["__weakref__"].__objclass__ is Thing
assert weakref.ref(thing)() is thing and type(Thing) is Meta and thing.value == 3
""",
    ),
)
