"""Reading and writing files for the client. A relative path starts at the workspace."""

import base64
import os
import stat

from errors import RequestError

MAX_FILE_BYTES = 64 * 1024 * 1024  # content travels as base64 in one frame


class Files:
    """The file system as the sandbox's user sees it."""

    def __init__(self, workspace):
        self._workspace = workspace

    def operations(self):
        """Name of each operation → function(request, connection)."""
        return {"read_file": self._read, "write_file": self._write}

    def _read(self, request, connection):
        path = os.path.join(self._workspace, request["path"])
        limit = min(int(request.get("max_bytes") or MAX_FILE_BYTES), MAX_FILE_BYTES)
        info = os.stat(path)
        if not stat.S_ISREG(info.st_mode):
            raise RequestError("%s is not a regular file" % path)
        with open(path, "rb") as file:
            content = file.read(limit + 1)
        if len(content) > limit:
            raise RequestError("%s has %d bytes; at most %d are read" % (path, info.st_size, limit))
        return {"content": base64.b64encode(content).decode()}

    def _write(self, request, connection):
        path = os.path.join(self._workspace, request["path"])
        content = base64.b64decode(request["content"])
        os.makedirs(os.path.dirname(path) or "/", exist_ok=True)
        with open(path, "wb") as file:
            file.write(content)
        if request.get("mode") is not None:
            os.chmod(path, int(request["mode"]))
        return {"size": len(content)}
