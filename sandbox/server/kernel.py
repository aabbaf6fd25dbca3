"""Runs under the image's own Python, the one that has ipykernel: `kernel.py kernel …` is the IPython kernel,
`kernel.py bridge …` speaks Jupyter's protocol to it on behalf of the server, which has neither package.

Both are started at the same time, because each spends most of its start importing. The kernel's standard
output and error are a pipe that the server reads: what Python, C code and child processes print keeps its
order, a flood is slowed down by the full pipe instead of filling memory, and nothing is lost. Displays,
results and tracebacks go through the bridge; a marker in the pipe says where each belongs.
"""

import base64
import faulthandler
import itertools
import os
import socket
import struct
import sys
import threading

NO_PACKAGES = 97  # exit status: this Python has no ipykernel or no jupyter_client
IMAGES = (("image/png", "png"), ("image/jpeg", "jpg"), ("image/svg+xml", "svg"))
PLACED = ("display_data", "update_display_data", "execute_result", "error", "clear_output")
PLACE_KEY = "sandbox_place"  # in a message's metadata: the number of its marker
TEXTS = ("text/plain", "text/markdown", "text/html", "text/latex", "application/json")
MAX_IMAGES_A_CELL = 100
READY_ROUND_MS = 50


def leave_own_directory():
    """Drop this directory from the path: names like `files` and `errors` belong to the agent here."""
    own = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if entry and os.path.abspath(entry) != own]


def missing(error):
    """Say which package this Python lacks and exit so that the server tries the next one."""
    sys.stderr.write("%s: %s\n" % (sys.executable, error))
    sys.stderr.flush()
    os._exit(NO_PACKAGES)


# -- the kernel ------------------------------------------------------------------------------------


def run_kernel(connection_file, ipython_dir, nonce, ready_fd):
    """Be the kernel until told to end; a byte goes to `ready_fd` when its sockets are bound."""
    ready_fd = int(ready_fd)
    os.set_inheritable(ready_fd, False)
    pipe = os.dup(1)  # not inherited; the agent may redirect its own
    leave_own_directory()
    # ipykernel imports it for a debugger nobody attaches: a tenth of a second.
    absent = [name for name in ("debugpy",) if name not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))
    try:
        from ipykernel.kernelapp import IPKernelApp
        from traitlets.config import Config
    except ImportError as error:
        missing(error)
    for name in absent:
        del sys.modules[name]

    class App(IPKernelApp):
        outstream_class = None  # standard output stays the pipe

        def _bind_socket(self, s, port):
            s.sndhwm = 0  # else a burst of displays loses messages, the end of the cell among them
            return super()._bind_socket(s, port)

    config = Config()
    config.IPKernelApp.connection_file = connection_file
    config.IPKernelApp.ipython_dir = ipython_dir
    config.IPKernelApp.log_level = 50
    config.HistoryManager.enabled = False
    os.makedirs(ipython_dir, exist_ok=True)
    for stream in (sys.stdout, sys.stderr):  # by line, so that a time-out shows what was printed so far
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    faulthandler.enable()
    app = App.instance(config=config)
    had = os.environ.get("IPYTHONDIR")
    os.environ["IPYTHONDIR"] = ipython_dir  # nothing is read from or written to ~/.ipython
    app.initialize([])
    del os.environ["IPYTHONDIR"]
    if had is not None:
        os.environ["IPYTHONDIR"] = had
    mark_places(app.session, pipe, nonce)
    shell = app.shell
    shell.ask_exit = lambda: None  # `exit()` must not end the kernel
    shell.system = plain_system(shell)
    os.write(ready_fd, b"r")
    os.close(ready_fd)
    app.start()


def mark_places(session, pipe, nonce):
    """Have every display write a numbered marker to the pipe and carry its number."""
    lock = threading.Lock()  # numbers ascend on both ways, whichever thread displays
    send, numbers = session.send, itertools.count(1)

    def send_marked(stream, msg_or_type, *args, **kwargs):
        kind = msg_or_type if isinstance(msg_or_type, str) else msg_or_type["header"]["msg_type"]
        if kind not in PLACED:
            return send(stream, msg_or_type, *args, **kwargs)
        sys.stdout.flush()
        sys.stderr.flush()
        with lock:
            number = next(numbers)
            os.write(pipe, ("\x1e%s;%d\x1e" % (nonce, number)).encode())
            if isinstance(msg_or_type, str):
                kwargs["metadata"] = dict(kwargs.get("metadata") or {}, **{PLACE_KEY: number})
            else:
                msg_or_type["metadata"] = dict(msg_or_type.get("metadata") or {}, **{PLACE_KEY: number})
            return send(stream, msg_or_type, *args, **kwargs)

    session.send = send_marked


def plain_system(shell):
    """`!command` with the kernel's own output instead of a pseudo terminal: no colours, `&` is allowed."""

    def system(command):
        sys.stdout.flush()
        sys.stderr.flush()
        shell.system_raw(command)

    return system


# -- the bridge ------------------------------------------------------------------------------------


class Bridge:
    """Carries cells to the kernel and what it answers to the server."""

    def __init__(self, sock, connection_file, image_directory, wire, capture):
        self._sock = sock
        self._connection_file = connection_file
        self._image_directory = image_directory
        self._wire = wire
        self._capture = capture
        self._message_id = None  # of the cell under way
        self._cell = {}
        self._reply = None
        self._idle = False
        self._images = 0

    def connect(self, zmq, client_class):
        """Connect and wait until the kernel answers on both channels."""
        self._zmq = zmq
        self._client = client = client_class()
        client.load_connection_file(self._connection_file)
        client.start_channels(shell=True, iopub=True, stdin=False, hb=False, control=False)
        # Depending on its version the client's sockets belong to asyncio; we read them ourselves.
        channels = (client.shell_channel, client.iopub_channel)
        self._shell, self._iopub = (zmq.Socket.shadow(channel.socket.underlying) for channel in channels)
        self._poller = zmq.Poller()
        self._poller.register(self._shell, zmq.POLLIN)
        self._poller.register(self._iopub, zmq.POLLIN)
        replied = heard = False
        while not (replied and heard):
            client.kernel_info()  # again: the first ones may be sent before the subscription is known
            for _ in range(2):
                events = dict(self._poller.poll(READY_ROUND_MS))
                replied = bool(self._receive(self._shell)) or replied if self._shell in events else replied
                while self._iopub in events and self._receive(self._iopub):
                    heard = True
                if replied and heard:
                    break
        self._poller.register(self._sock, zmq.POLLIN)
        self._send(event="ready")

    def serve(self):
        """Until the server closes its end."""
        while True:
            for source, _ in self._poller.poll():
                if source == self._sock.fileno():
                    request = self._wire.receive(self._sock)
                    if request is None:
                        return
                    if request["op"] == "end":
                        self._drain_published()
                        return
                    if request["op"] == "nudge":
                        self._client.kernel_info()
                    else:
                        self._execute(request)
                elif source == self._shell:
                    self._take_replies()
                else:
                    self._take_published()

    def _execute(self, request):
        self._cell, self._reply, self._idle, self._images = request, None, False, 0
        if request["env"]:
            update = "__import__('os').environ.update(%r)" % request["env"]
            self._client.execute(update, silent=True, store_history=False, allow_stdin=False)
        self._message_id = self._client.execute(
            request["code"], store_history=True, allow_stdin=False, stop_on_error=False
        )

    def _take_replies(self):
        message = self._receive(self._shell)
        while message:
            if message["msg_type"] == "execute_reply" and self._is_current(message):
                self._reply = message["content"]
                self._finish_if_complete()
            message = self._receive(self._shell)

    def _take_published(self):
        """Some of what waits, so that requests of the server are looked at in between."""
        for _ in range(100):
            message = self._receive(self._iopub)
            if not message:
                return
            self._publish(message)

    def _drain_published(self):
        while self._poller.poll(100):
            message = self._receive(self._iopub)
            if message:
                self._publish(message)
            elif not self._receive(self._shell):
                return

    def _publish(self, message):
        kind, content = message["msg_type"], message["content"]
        current = self._is_current(message)
        place = (message.get("metadata") or {}).get(PLACE_KEY)
        if kind == "status":
            if current and content["execution_state"] == "idle":
                self._idle = True
                self._finish_if_complete()
        elif kind == "execute_input" and current:
            self._send(event="started", cell=self._cell["cell"])
        elif kind in ("display_data", "execute_result", "update_display_data"):
            text = self._render(content.get("data") or {})
            display_id = (content.get("transient") or {}).get("display_id")
            update = kind == "update_display_data"
            self._send(
                event="show", current=current, place=place, text=text, display_id=display_id, update=update
            )
        elif kind == "stream":
            self._send(event="stream", current=current, text=self._cut(content.get("text", "")))
        elif kind == "clear_output":
            self._send(event="clear", current=current, place=place, wait=bool(content.get("wait")))
        elif kind == "error":
            text = self._cut("\n".join(content.get("traceback") or []))
            self._send(event="show", current=current, place=place, text=text)

    def _finish_if_complete(self):
        """A cell is over at `idle` and `execute_reply`: they travel on two sockets, in either order."""
        if self._reply is None or not self._idle:
            return
        reply, self._message_id = self._reply, None
        pages = [page.get("data", {}) for page in reply.get("payload") or [] if page.get("source") == "page"]
        for page in pages:  # `name?` and %pinfo
            self._send(event="show", current=True, text=self._render(page))
        self._send(
            event="done",
            cell=self._cell["cell"],
            error=reply.get("ename") if reply.get("status") == "error" else None,
            count=reply.get("execution_count"),
        )

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

    def _is_current(self, message):
        parent = message.get("parent_header") or {}
        return self._message_id is not None and parent.get("msg_id") == self._message_id

    def _cut(self, text):
        """Bounds the frame; the server bounds the sum."""
        limit = int(self._cell.get("max_chars") or 30000)
        if len(text) <= limit:
            return text
        capture = self._capture(limit)
        capture.add(text.encode("utf-8", "replace"))
        return capture.text()[0]

    def _receive(self, zmq_socket):
        try:
            return self._client.session.recv(zmq_socket, self._zmq.NOBLOCK)[1]
        except (ValueError, KeyError, TypeError):
            return None  # not signed as it should be: not from our kernel

    def _send(self, **event):
        self._wire.send(self._sock, event)


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


def run_bridge(connection_file, image_directory, sock_fd, ready_fd):
    """Be the bridge until the server closes its end of `sock_fd`; the kernel's byte comes from `ready_fd`."""
    import wire
    from output import Capture

    leave_own_directory()
    try:
        import zmq
        from jupyter_client.blocking import BlockingKernelClient
    except ImportError as error:
        missing(error)
    if not os.read(int(ready_fd), 1):
        sys.exit("the kernel ended before it was ready")
    bridge = Bridge(socket.socket(fileno=int(sock_fd)), connection_file, image_directory, wire, Capture)
    try:
        bridge.connect(zmq, BlockingKernelClient)
        bridge.serve()
    except (BrokenPipeError, ConnectionResetError):
        pass  # the server has closed its end
    os._exit(0)  # closing sockets and contexts in order can wait for the kernel


if __name__ == "__main__":
    {"kernel": run_kernel, "bridge": run_bridge}[sys.argv[1]](*sys.argv[2:])
