"""Runs under the image's own Python, the one that has ipykernel: an IPython kernel and, in the same process,
jupyter_client's client of it, which ipykernel brings (`ipykernel.inprocess`); nothing is sent between them.

Cells come by a pipe, a line of JSON each. Standard output and error are another pipe, to the server: what
Python, C code and child processes print keeps its order, a flood is slowed down by the full pipe instead of
filling memory, and nothing is lost. What is displayed, and that a cell is over, is told amid that, by events.
"""

import base64
import faulthandler
import itertools
import os
import signal
import struct
import sys
import threading
import types
from json import dumps, loads
from os import write  # what an agent puts in its place is not for us

NO_PACKAGES = 97  # exit status: this Python has no ipykernel or no jupyter_client
IMAGES = (("image/png", "png"), ("image/jpeg", "jpg"), ("image/svg+xml", "svg"))
TEXTS = ("text/plain", "text/markdown", "text/html", "text/latex", "application/json")
MAX_IMAGES_A_CELL = 100
PIECE_CHARS = 4000  # with what stands around it no more than is written at once, whoever else writes


def leave_own_directory():
    """Drop this directory from the path: names like `files` and `errors` belong to the agent here."""
    own = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if entry and os.path.abspath(entry) != own]
    del sys.modules["output"]


class Events:
    """What the server is told amid what is printed: JSON in pieces, `RS nonce ; NUMBER ; LEFT ; PIECE RS`."""

    def __init__(self, nonce):
        # Opened anew: programs may have what they share with us fail when it is full.
        self._fd = os.open("/proc/self/fd/1", os.O_WRONLY)
        self._nonce = nonce
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def ours(self):
        """False in a fork of the kernel, which has no say."""
        return os.getpid() == self._pid

    def send(self, **event):
        """Tell it behind what was printed so far."""
        text = dumps(event)
        pieces = [text[start : start + PIECE_CHARS] for start in range(0, len(text), PIECE_CHARS)]
        with self._lock:
            number = next(self._numbers)
            for left, piece in zip(reversed(range(len(pieces))), pieces):
                write(self._fd, ("\x1e%s;%d;%d;%s\x1e" % (self._nonce, number, left, piece)).encode())


class Displays:
    """What a kernel publishes, as events."""

    def __init__(self, events, image_directory, capture):
        self._events = events
        self._image_directory = image_directory
        self._capture = capture
        self._cell = {}
        self._images = 0
        self._unanswered = None

    def begin(self, cell):
        """What comes now is of this cell, a request of the server."""
        self._cell, self._images, self._unanswered = cell, 0, cell

    def follow(self, run):
        """End the kernel if a cell's run ends without an answer: it closed the output, or cancelled all."""
        cell = self._cell
        run.add_done_callback(lambda _: self._unanswered is cell and os._exit(1))

    def send(self, stream, msg_or_type, content=None, *args, **kwargs):
        """In the place of a session's method: nothing that the kernel sends is made a message."""
        if not isinstance(msg_or_type, str):
            msg_or_type, content = msg_or_type["header"]["msg_type"], msg_or_type["content"]
        if self._events.ours():
            self._tell(msg_or_type, content)
        elif msg_or_type == "execute_reply":
            os._exit(0)  # a fork that did not end in its cell
        return {"content": content}

    def _tell(self, kind, content):
        if kind in ("display_data", "execute_result", "update_display_data"):
            event = {"event": "show", "text": self._render(content.get("data") or {})}
            event["display_id"] = (content.get("transient") or {}).get("display_id")
            event["update"] = kind == "update_display_data"
        elif kind == "error":
            event = {"event": "show", "text": self._cut("\n".join(content.get("traceback") or []))}
        elif kind == "clear_output":
            event = {"event": "clear", "wait": bool(content.get("wait"))}
        elif kind == "stream":
            event = {"event": "stream", "text": self._cut(content.get("text", ""))}
        elif kind == "execute_reply":
            for page in content.get("payload") or []:
                if page.get("source") == "page":  # `name?` and %pinfo
                    self._events.send(event="show", text=self._render(page.get("data", {})))
            event = {"event": "done", "cell": self._cell["cell"], "count": content.get("execution_count")}
            event["error"] = content.get("ename") if content.get("status") == "error" else None
            self._unanswered = None
        else:
            return
        sys.stdout.flush()
        sys.stderr.flush()
        self._events.send(**event)

    def _render(self, data):
        """The text that stands for a display; images become files."""
        notes = [self._save(kind, ending, data[kind]) for kind, ending in IMAGES if data.get(kind)]
        if notes:
            return "\n".join(notes)
        plain = str(data.get("text/plain", "")).strip()
        bare = plain.startswith("<") and plain.endswith(">") and "\n" not in plain
        for kind in TEXTS[1:] + TEXTS[:1] if bare else TEXTS:  # "<... object>" says less than any other form
            if kind in data:
                return self._cut(data[kind] if isinstance(data[kind], str) else repr(data[kind]))
        return "[display without text: %s]" % ", ".join(sorted(data)) if data else ""

    def _save(self, kind, ending, content):
        self._images += 1
        if self._images > MAX_IMAGES_A_CELL:
            return "[%s not saved: a cell may show %d images]" % (kind, MAX_IMAGES_A_CELL)
        name = "cell-%d-%d.%s" % (self._cell.get("cell", 0), self._images, ending)
        path = os.path.join(self._image_directory, name)
        try:
            text = kind == "image/svg+xml"
            raw = content.encode("utf-8", "replace") if text else base64.b64decode(content)
            os.makedirs(self._image_directory, exist_ok=True)
            with open(path, "wb") as file:
                file.write(raw)
        except (OSError, ValueError) as error:
            return "[%s could not be saved as %s: %s]" % (kind, path, error)
        size = image_size(kind, raw)
        return "[%s saved as %s%s]" % (kind, path, ", %dx%d" % size if size else "")

    def _cut(self, text):
        """Bounds the event; the server bounds the sum."""
        limit = int(self._cell.get("max_chars") or 30000)
        if len(text) <= limit:
            return text
        capture = self._capture(limit)
        capture.add(text.encode("utf-8", "replace"))
        return capture.text()[0]


def image_size(kind, raw):
    """(width, height) in pixels as the file's header says; None where it does not."""
    if kind == "image/png" and len(raw) >= 24 and raw[12:16] == b"IHDR":
        return struct.unpack(">II", raw[16:24])
    position = 2
    while kind == "image/jpeg" and position + 9 <= len(raw) and raw[position] == 0xFF:
        marker, length = struct.unpack(">BH", raw[position + 1 : position + 4])
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack(">HH", raw[position + 5 : position + 9])
            return width, height
        position += 2 + length
    return None


def plain_system(shell):
    """`!command` with the kernel's own output instead of a pseudo terminal: no colours, `&` is allowed."""

    def system(command):
        sys.stdout.flush()
        sys.stderr.flush()
        shell.system_raw(command)

    return system


def make_client(ipython_dir, follow):
    """A client, and with it a kernel that is ready. `follow` is given the future of each cell."""
    import asyncio  # here, for the server imports this module as well

    # ipykernel imports it for a debugger nobody attaches: a tenth of a second.
    absent = [name for name in ("debugpy",) if name not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))
    try:
        import ipykernel
        from ipykernel.inprocess.client import InProcessKernelClient
        from ipykernel.inprocess.ipkernel import InProcessKernel
        from ipykernel.inprocess.socket import DummySocket
        from ipykernel.iostream import BackgroundSocket
        from ipykernel.ipkernel import IPythonKernel
        from ipykernel.kernelapp import IPKernelApp
        from ipykernel.zmqshell import ZMQInteractiveShell
        from tornado.ioloop import IOLoop
        from traitlets.config import Config
    except ImportError as error:  # the server tries the next Python
        sys.stderr.write("%s: %s\n" % (sys.executable, error))
        sys.stderr.flush()
        os._exit(NO_PACKAGES)
    for name in absent:
        del sys.modules[name]

    stream = DummySocket()

    class Client(InProcessKernelClient):
        def _dispatch_to_kernel(self, msg):
            """In the loop that runs already, and whose end is not waited for."""
            del msg["header"]["date"]  # to parse it can take as long as a small cell
            stream.send_multipart(self.session.serialize(msg))
            arguments = (stream,) if ipykernel.version_info < (6,) else ()
            follow(asyncio.ensure_future(self.kernel.dispatch_shell(*arguments, stream.recv_multipart())))

    class Kernel(InProcessKernel):
        # The other one puts its own output in the pipe's place.
        execute_request = IPythonKernel.execute_request
        # Since version 7 it is asked for where a cell awaits, also where there is none.
        shell_channel_thread = types.SimpleNamespace(parent_thread=threading.main_thread())
        _supports_kernel_subshells = False

    class App(IPKernelApp):
        def init_kernel(self):
            self.kernel = Kernel.instance(
                parent=self,
                log=self.log,
                profile_dir=self.profile_dir,
                shell_class=ZMQInteractiveShell,  # by whose name programs tell a notebook
                iopub_socket=BackgroundSocket(None),
            )

        def _nothing(self):
            """No other process is spoken to, and standard output stays the pipe."""

        init_connection_file = init_sockets = init_heartbeat = write_connection_file = init_io = _nothing

    config = Config()
    config.IPKernelApp.ipython_dir = ipython_dir
    config.IPKernelApp.log_level = 50
    config.Kernel._execute_sleep = 0.0  # for output that takes another way than ours
    config.HistoryManager.enabled = False
    os.makedirs(ipython_dir, exist_ok=True)
    app = App.instance(config=config)
    had = os.environ.get("IPYTHONDIR")
    os.environ["IPYTHONDIR"] = ipython_dir  # nothing is read from or written to ~/.ipython
    app.initialize([])
    del os.environ["IPYTHONDIR"]
    if had is not None:
        os.environ["IPYTHONDIR"] = had
    kernel, shell = app.kernel, app.shell
    kernel.io_loop = IOLoop.current()
    shell.ask_exit = lambda: None  # `exit()` must not end the kernel
    shell.enable_gui = lambda gui=None: None
    shell.system = plain_system(shell)
    return Client(kernel=kernel, session=kernel.session)


def main(requests_fd, image_directory, ipython_dir, nonce):
    """Run the server's cells until it closes its end of `requests_fd`."""
    from output import Capture

    os.set_inheritable(int(requests_fd), False)
    requests = os.fdopen(int(requests_fd), "rb")
    leave_own_directory()
    events = Events(nonce)
    displays = Displays(events, image_directory, Capture)
    for stream in (sys.stdout, sys.stderr):  # by line, so that a time-out shows what was printed so far
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    faulthandler.enable()
    import asyncio

    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    client = make_client(ipython_dir, displays.follow)
    client.session.send = displays.send

    def take():
        line = requests.readline()
        if not line:
            os._exit(0)
        cell = loads(line)
        os.environ.update(cell["env"])
        displays.begin(cell)
        client.execute(cell["code"], allow_stdin=False)

    # With a handler of its own, all signals wake the loop: so a cell that awaits is interrupted at once.
    loop.add_signal_handler(signal.SIGURG, int)
    signal.set_wakeup_fd(signal.set_wakeup_fd(-1), warn_on_full_buffer=False)
    loop.add_reader(requests, take)
    events.send(event="ready")
    loop.run_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
