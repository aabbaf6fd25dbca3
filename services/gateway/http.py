"""What a route says of its call: `operation` reads the query and the body as the view's signature names them,
and `openapi` describes the same signature.

    @blueprint.get("/rollouts/<rollout_id>")
    @operation(429)
    def get(rollout_id: str, wait: Wait, tenant: Tenant) -> Rollout:

A parameter annotated with a `Query` comes from the query string, and a misspelt one is an error; `body` is a
pydantic model of the JSON body. A view returns the model or the dictionary of its answer, or a response.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from flask import Response, request
from pydantic import BaseModel, ValidationError

from services.gateway.auth import tenant_filter
from services.gateway.bodies import body_json
from services.gateway.context import gateway
from services.gateway.problems import from_validation, invalid
from services.gateway.waiting import waiter

F = TypeVar("F", bound=Callable[..., Any])
Schema = type[BaseModel] | Mapping[str, Any] | None
"""What describes a value: a model, or JSON Schema; None = there is no value."""

JSON = "application/json"
OBJECT = {"type": "object"}
STRING = {"type": "string"}
MAX_PAGE = 1000


@dataclass(frozen=True)
class Query:
    """A parameter of the query string: any text."""

    text: str
    schema: Mapping[str, Any] = field(default_factory=lambda: STRING)
    default: Any = None
    header: str = ""
    """The header that it is instead."""

    def read(self, name: str) -> Any:
        """Its value in the request under way.

        Raises:
            ApiProblem: 400, naming the parameter.
        """
        if self.header:
            return request.headers.get(self.header, self.default)
        return request.args.get(name, self.default)


@dataclass(frozen=True)
class Number(Query):
    """A number within limits."""

    low: float = 0.0
    high: Callable[[], float] = lambda: math.inf
    kind: Callable[[float], float] = float

    def read(self, name: str) -> float:
        raw, high = super().read(name), self.high()
        try:
            value = float(raw)
        except ValueError:
            raise invalid(name, f"{raw!r} is not a number") from None
        if not self.low <= value <= high:
            raise invalid(name, f"{raw} is not between {self.low:g} and {high:g}")
        return self.kind(value)


@dataclass(frozen=True)
class Choice(Query):
    """One of some words."""

    options: tuple[str, ...] = ()

    def read(self, name: str) -> str | None:
        value = super().read(name)
        if value is not None and value not in self.options:
            raise invalid(name, f"{value!r} is not one of {', '.join(self.options)}")
        return value


class _Tenant(Query):
    def read(self, name: str) -> str | None:
        return tenant_filter()


def page_size(default: int, most: int = MAX_PAGE) -> Number:
    """The parameter `limit`."""
    schema = {"type": "integer", "minimum": 1, "maximum": most}
    return Number("Most entries of a page.", schema, default, low=1, high=lambda: most, kind=int)


def choice(text: str, *options: str) -> Choice:
    """One of some words, by default the first of them."""
    return Choice(text, {"enum": list(options)}, options[0], options=options)


Wait = Annotated[
    float,
    Number(
        "Seconds to wait for an answer (long-poll).",
        {"type": "number", "minimum": 0},
        default=0.0,
        high=lambda: gateway().settings.max_wait_s,
    ),
]
Limit = Annotated[int, page_size(100)]
Include = Annotated[str, choice("Whether trajectories come along.", "trajectory", "summary")]
Tag = Annotated[str | None, Query("Only rollouts with this tag.")]
Cursor = Annotated[str, Query("Where the last page ended.", default="0")]
Tenant = Annotated[
    str | None, _Tenant("Another tenant than the key's own, or * for all: needs the scope admin.")
]
"""Whose rollouts the call is about; None = everybody's."""


@dataclass(frozen=True)
class Operation:
    """What a view takes and gives."""

    summary: str
    problems: tuple[int, ...]
    query: Mapping[str, Query]
    body: tuple[type[BaseModel], ...]
    """The first whose required fields are there is meant, else the last; () = no body is read."""
    prepare: Callable[[Any], Any] | None
    """Looks at a body before it is made a model."""
    empty: Any
    """What no body stands for; None = there must be one."""
    status: int
    answers: Mapping[int, Schema]
    media: str
    arrays: bool

    def arguments(self, path: str) -> dict[str, Any]:
        """Arguments of the view, from the request under way.

        Raises:
            ApiProblem: They do not fit.
        """
        known = [name for name, query in self.query.items() if not query.header]
        unknown = [name for name in request.args if name not in known]
        if unknown and path.startswith("/v1/"):
            raise invalid(unknown[0], f"unknown parameter; there are: {', '.join(known) or 'none'}")
        values = {name: query.read(name) for name, query in self.query.items()}
        if self.body:
            # A request that was parked is dispatched again, when its body has been read.
            values["body"] = waiter().remember("body", self._read_body)
        return values

    def _read_body(self) -> BaseModel:
        value = body_json(empty=self.empty)
        if self.prepare is not None:
            value = self.prepare(value)
        model = next((model for model in self.body[:-1] if _has_required(model, value)), self.body[-1])
        try:
            return model.model_validate(value)
        except ValidationError as error:
            raise from_validation(error) from None


def _has_required(model: type[BaseModel], value: Any) -> bool:
    return isinstance(value, dict) and all(
        name in value for name, info in model.model_fields.items() if info.is_required()
    )


def operation(
    *problems: int,
    status: int = 200,
    answers: Mapping[int, Schema] | None = None,
    media: str = JSON,
    arrays: bool = False,
) -> Callable[[F], F]:
    """Have a view called with what its signature names.

    Args:
        problems: Statuses of refusals, beside those that its inputs imply.
        status: The status of what it returns, whose model is its return annotation.
        answers: Instead of that annotation, models by status.
        media: Media type of the answer.
        arrays: The answer comes as msgpack with typed arrays as well.
    """

    def declare(view: F) -> F:
        hints = get_type_hints(view, include_extras=True)
        marks = {name: get_args(hint)[-1] for name, hint in hints.items() if get_origin(hint) is Annotated}
        body, given = hints.get("body"), hints.get("return")
        if "body" in marks:
            body = get_args(body)[0]
        default = inspect.signature(view).parameters.get("body")
        model = given if isinstance(given, type) and issubclass(given, BaseModel) else OBJECT
        declared = Operation(
            summary=(view.__doc__ or "").partition("\n")[0].rstrip("."),
            problems=problems,
            query={name: mark for name, mark in marks.items() if isinstance(mark, Query)},
            body=() if body is None else get_args(body) or (body,),
            prepare=marks.get("body"),
            empty={} if default is not None and default.default is not inspect.Parameter.empty else None,
            status=status,
            answers=answers or {status: model},
            media=media,
            arrays=arrays,
        )

        @wraps(view)
        def call(**path: str) -> Any:
            made = view(**path, **call.operation.arguments(request.path))
            return reply(made, status) if isinstance(made, BaseModel) else made

        call.operation = declared  # type: ignore[attr-defined]
        return call  # type: ignore[return-value]

    return declare


def reply(model: BaseModel, status: int = 200) -> Response:
    """A model as an answer."""
    return Response(model.model_dump_json(), status=status, content_type=JSON)
