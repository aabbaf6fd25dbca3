"""IPython cells through Jupyter's Kernel Gateway and a websocket, the way OpenHands runs them.

The message loop ends at `execute_reply`, as that of OpenHands does (November 2025; written anew from its
behaviour). The protocol orders the messages of one channel only: a result that the kernel publishes on
another channel may come later, and is lost then. Protocol: "Messaging in Jupyter" of jupyter_client's manual.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
from tornado.httpclient import AsyncHTTPClient, HTTPClientError, HTTPRequest
from tornado.websocket import WebSocketClientConnection, websocket_connect

START_S = 120.0
CELL_S = 60.0
END_S = 10.0


class GatewayError(RuntimeError):
    """The gateway did not start, or a cell did not come to its end."""


class KernelGateway:
    """A Kernel Gateway of our own on a free loopback port, one kernel in it, and a connection to that."""

    def __init__(self, directory: Path):
        """`directory`: for all files of Jupyter and IPython."""
        self._directory = directory
        self._token = secrets.token_hex(16)
        self._process: subprocess.Popen | None = None
        self._connection: WebSocketClientConnection | None = None
        self._url = ""

    async def start(self) -> None:
        """Start gateway and kernel and connect. Raises GatewayError."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._url = f"127.0.0.1:{port}/api/kernels"
        names = ("HOME", "IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")
        with (self._directory / "gateway.log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "kernel_gateway", "--KernelGatewayApp.ip=127.0.0.1"),
                    *(f"--KernelGatewayApp.port={port}", "--KernelGatewayApp.port_retries=0"),
                ],
                env={
                    **dict.fromkeys(names, str(self._directory)),
                    "PATH": os.environ["PATH"],
                    "KG_AUTH_TOKEN": self._token,
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        async with asyncio.timeout(START_S):
            kernel = await self._make_kernel()
            request = HTTPRequest(f"ws://{self._url}/{kernel}/channels", headers=self._headers())
            self._connection = await websocket_connect(request)

    async def run(self, code: str) -> str:
        """What had come of the cell when its `execute_reply` came."""
        assert self._connection is not None
        message_id = uuid.uuid4().hex
        await self._connection.write_message(_execute_request(message_id, code))
        output = []
        async with asyncio.timeout(CELL_S):
            while (frame := await self._connection.read_message()) is not None:
                message = json.loads(frame)
                content = message["content"]
                if message["parent_header"].get("msg_id") != message_id:
                    continue  # of an earlier cell, whose loop has ended
                match message["msg_type"]:
                    case "stream":
                        output.append(content["text"])
                    case "execute_result" | "display_data":
                        output.append(content["data"].get("text/plain", ""))
                    case "error":
                        output.append("\n".join(content["traceback"]))
                    case "execute_reply":
                        return "".join(output)
        raise GatewayError("the gateway closed the connection in the middle of a cell")

    def close(self) -> None:
        """End gateway and kernel."""
        if self._connection is not None:
            self._connection.close()
        if self._process is None:
            return
        try:
            family = [self._process, *psutil.Process(self._process.pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            family = [self._process]
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for process in family[1:]:
            try:
                process.kill()  # psutil has made sure that it is still that process
            except psutil.NoSuchProcess:
                continue

    async def _make_kernel(self) -> str:
        """Id of a new kernel, as soon as the gateway answers."""
        request = HTTPRequest(
            f"http://{self._url}", method="POST", body="{}", headers=self._headers(), request_timeout=START_S
        )
        assert self._process is not None
        while True:
            try:
                return json.loads((await AsyncHTTPClient().fetch(request)).body)["id"]
            except (HTTPClientError, OSError) as error:
                if self._process.poll() is not None or isinstance(error, HTTPClientError):
                    said = (self._directory / "gateway.log").read_text(errors="replace")[-1500:]
                    raise GatewayError(
                        f"the Kernel Gateway did not start ({error}); it said: {said}"
                    ) from error
                await asyncio.sleep(0.01)

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"token {self._token}"}


def _execute_request(message_id: str, code: str) -> str:
    header = {
        "msg_id": message_id,
        "msg_type": "execute_request",
        "username": "",
        "session": "",
        "version": "5.0",
    }
    content = {
        "code": code,
        "silent": False,
        "store_history": False,
        "user_expressions": {},
        "allow_stdin": False,
    }
    return json.dumps(
        {
            "header": header,
            "parent_header": {},
            "metadata": {},
            "content": content,
            "buffers": {},
            "channel": "shell",
        }
    )
