"""Errors a client can be told about, in the shape of vLLM's (OpenAI's) error JSON."""

from __future__ import annotations

from typing import Any


class RequestError(Exception):
    """The request is at fault; answered with `status` and never enqueued."""

    def __init__(self, message: str, param: str | None = None, status: int = 400):
        super().__init__(message)
        self.message = message
        self.param = param
        """Name of the offending field, None when no single field is at fault."""
        self.status = status


class CheckpointError(RequestError):
    """A checkpoint cannot be loaded into the running model; the weights in use stay as they were."""

    def __init__(self, message: str):
        super().__init__(message, param="weights_path")


class EngineError(Exception):
    """The engine failed while it served a request; answered with 500."""


_TYPES = {
    400: "BadRequestError",
    404: "NotFoundError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


def error_body(message: str, status: int, param: str | None = None) -> dict[str, Any]:
    """`{"error": {"message", "type", "param", "code"}}`."""
    return {
        "error": {"message": message, "type": _TYPES.get(status, "Error"), "param": param, "code": status}
    }
