"""Frames on a Unix socket: four bytes of length (big-endian), then JSON in UTF-8.

Request: {"op": name, ...}. Reply: {"ok": true, "result": {...}} or {"ok": false, "error": {"type",
"message"}}.
"""

import json
import struct

HEADER = struct.Struct(">I")
_JSON = json.JSONEncoder(separators=(",", ":"))  # made once, which `json.dumps` would do for each
MAX_FRAME_BYTES = 128 * 1024 * 1024  # bounds what a broken peer can make us allocate


class FrameTooLarge(Exception):
    """A frame longer than MAX_FRAME_BYTES."""


def encode(message):
    """One frame as bytes. Raises FrameTooLarge."""
    body = _JSON.encode(message).encode()
    check_size(len(body))
    return HEADER.pack(len(body)) + body


def check_size(size, limit=MAX_FRAME_BYTES):
    """Raise FrameTooLarge when a frame of `size` bytes is not acceptable."""
    if size > limit:
        raise FrameTooLarge("frame of %d bytes; at most %d are allowed" % (size, limit))


def send(sock, message):
    """Write one frame to a connected blocking socket."""
    sock.sendall(encode(message))


def receive(sock, limit=MAX_FRAME_BYTES):
    """Read one frame of at most `limit` bytes from a connected blocking socket; None when the peer closed the
    connection. Raises FrameTooLarge.
    """
    header = _exactly(sock, HEADER.size)
    if header is None:
        return None
    size = HEADER.unpack(header)[0]
    check_size(size, limit)
    body = _exactly(sock, size)
    return None if body is None else json.loads(body.decode())


def _exactly(sock, size):
    chunks = []
    while size:
        chunk = sock.recv(min(size, 1 << 20))
        if not chunk:
            return None
        chunks.append(chunk)
        size -= len(chunk)
    return b"".join(chunks)
