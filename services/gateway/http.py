"""What a route says of its call: `operation` reads the query and the body as the view's signature names them,
and `openapi` describes the same signature.

    @blueprint.get("/rollouts/<rollout_id>")
    @operation(429)
    def get(rollout_id: str, wait: Wait, tenant: Tenant) -> Rollout:

A parameter annotated with a `query` comes from the query string, and a misspelt one is an error; `body` is a
pydantic model of the JSON body. A view returns the model or the dictionary of its answer, or a response.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from types import EllipsisType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from flask import Response, request
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationError

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


def _short_enough(seconds: float) -> float:
    most = gateway().settings.max_wait_s
    if seconds > most:
        raise ValueError(f"{seconds:g} is more than {most:g}")
    return seconds


def query(text: str, default: Any = None, **limits: Any) -> Any:
    """What the annotation of a view's parameter says beside its type: it comes from the query string."""
    return Field(default=default, description=text, **limits)


def page_size(default: int, most: int = MAX_PAGE) -> Any:
    """The parameter `limit`."""
    return query("Most entries of a page.", default, ge=1, le=most)


def _one_of(tenant: str | None) -> str:
    if tenant is None:
        raise ValueError("name one tenant: these are each tenant's own")
    return tenant


Wait = Annotated[
    float,
    query("Seconds to wait for an answer (long-poll).", 0.0, ge=0, allow_inf_nan=False),
    AfterValidator(_short_enough),
]
Limit = Annotated[int, page_size(100)]
Include = Annotated[Literal["trajectory", "summary"], query("Whether trajectories come along.", "trajectory")]
Tag = Annotated[str | None, query("Only rollouts with this tag.")]
Cursor = Annotated[str, query("Where the last page ended.", "0")]
Tenant = Annotated[
    str | None,
    query("Another tenant than the key's own, or * for all: needs the scope admin.", validate_default=True),
    BeforeValidator(lambda _: tenant_filter()),
]
"""Whose rollouts the call is about; None = everybody's."""
OneTenant = Annotated[
    str,
    query("Another tenant than the key's own: needs the scope admin.", validate_default=True),
    BeforeValidator(lambda _: _one_of(tenant_filter())),
]
"""The same of what is each tenant's own."""


@dataclass(frozen=True)
class Operation:
    """What a view takes and gives."""

    summary: str
    problems: tuple[int, ...]
    query: type[BaseModel]
    """Its parameters of the query string; one with an alias is the header of that name."""
    body: tuple[type[BaseModel], ...]
    """The first whose required fields are there is meant, else the last; () = no body is read."""
    prepare: Callable[[Any], Any] | None
    """Looks at a body before it is made a model."""
    empty: Any
    """What no body stands for; None = there must be one."""
    answers: Mapping[int, Schema]
    media: str
    arrays: bool
    takes: str | None
    """Media type of a body that is no JSON, which the view reads itself."""

    def arguments(self, path: str) -> dict[str, Any]:
        """Arguments of the view, from the request under way.

        Raises:
            ApiProblem: They do not fit.
        """
        fields = self.query.model_fields
        known = [name for name, field in fields.items() if not field.alias]
        unknown = [name for name in request.args if name not in known]
        if unknown and path.startswith("/v1/"):
            raise invalid(unknown[0], f"unknown parameter; there are: {', '.join(known) or 'none'}")
        headers = {field.alias: request.headers.get(field.alias) for field in fields.values() if field.alias}
        values = dict(_validated(self.query, request.args.to_dict() | headers))
        if self.body:
            # A request that was parked is dispatched again, when its body has been read.
            values["body"] = waiter().remember("body", self._read_body)
        return values

    def _read_body(self) -> BaseModel:
        value = body_json(empty=self.empty)
        if self.prepare is not None:
            value = self.prepare(value)
        model = next((model for model in self.body[:-1] if _has_required(model, value)), self.body[-1])
        return _validated(model, value)


def _validated(model: type[BaseModel], value: Any) -> BaseModel:
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise from_validation(error) from None


def _has_required(model: type[BaseModel], value: Any) -> bool:
    return isinstance(value, dict) and all(
        (info.alias or name) in value for name, info in model.model_fields.items() if info.is_required()
    )


def operation(
    *problems: int,
    scope: str | tuple[str, ...] | EllipsisType | None = ...,
    status: int = 200,
    answers: Mapping[int, Schema] | None = None,
    media: str = JSON,
    arrays: bool = False,
    takes: str | None = None,
) -> Callable[[F], F]:
    """Have a view called with what its signature names.

    Args:
        problems: Statuses of refusals, beside those that its inputs imply.
        scope: What a key needs, or several of which one is enough; `{name}` stands for that part of the
            address. None = the route is open to everybody. By default `read` to read, and `admin` for
            anything else.
        status: The status of what it returns, whose model is its return annotation.
        answers: Instead of that annotation, models by status.
        media: Media type of the answer.
        arrays: The answer comes as msgpack with typed arrays as well.
        takes: Media type of a body that the view reads itself; None = JSON, if any.
    """

    def declare(view: F) -> F:
        hints = get_type_hints(view, include_extras=True)
        prepare = None
        body, given = hints.pop("body", None), hints.pop("return", None)
        if get_origin(body) is Annotated:
            body, prepare = get_args(body)
        marked = {name: hint for name, hint in hints.items() if get_origin(hint) is Annotated}
        default = inspect.signature(view).parameters.get("body")
        model = given if isinstance(given, type) and issubclass(given, BaseModel) else OBJECT
        declared = Operation(
            summary=(view.__doc__ or "").partition("\n")[0].rstrip("."),
            problems=problems,
            query=type("Parameters", (BaseModel,), {"__annotations__": marked, "__module__": __name__}),
            body=() if body is None else get_args(body) or (body,),
            prepare=prepare,
            empty={} if default is not None and default.default is not inspect.Parameter.empty else None,
            answers=answers or {status: model},
            media=media,
            arrays=arrays,
            takes=takes,
        )

        @wraps(view)
        def call(**path: str) -> Any:
            made = view(**path, **call.operation.arguments(request.path))
            return reply(made, status) if isinstance(made, BaseModel) else made

        call.operation = declared  # type: ignore[attr-defined]
        if scope is not ...:
            call.scope = scope  # type: ignore[attr-defined]
        return call  # type: ignore[return-value]

    return declare


def reply(model: BaseModel, status: int = 200) -> Response:
    """A model as an answer."""
    return Response(model.model_dump_json(), status=status, content_type=JSON)
