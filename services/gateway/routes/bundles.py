"""`/v1/bundles`: task directories that rollouts name by their digest."""

from __future__ import annotations

from typing import Any

from flask import Blueprint, Response, request

from rollout.suites import SuiteError
from rollout.suites.bundles import DIGEST, MEDIA_TYPE, verify
from services.gateway.auth import caller
from services.gateway.context import gateway
from services.gateway.http import OBJECT, operation
from services.gateway.problems import ApiProblem, invalid
from services.state.api_keys import Scope
from services.state.bundles import BundlesFull

blueprint = Blueprint("bundles", __name__, url_prefix="/v1")


def _digest(digest: str) -> str:
    if not DIGEST.fullmatch(digest):
        raise invalid("digest", "no SHA-256 in 64 lower-case hexadecimal digits")
    return digest


@blueprint.put("/bundles/<digest>")
@operation(answers={200: OBJECT, 201: OBJECT}, scope=Scope.SUBMIT, takes=MEDIA_TYPE)
def put(digest: str) -> tuple[dict[str, Any], int]:
    """Keep a bundle (`rollout.suites.bundles.pack`) for rollouts; 200 where it was there already."""
    content, tenant = request.get_data(cache=False), caller().tenant.name
    try:
        verify(content, _digest(digest))
        new = gateway().bundles.put(tenant, digest, content)
    except SuiteError as error:
        raise invalid("(body)", str(error)) from None
    except BundlesFull as error:
        raise ApiProblem(403, "Larger than the quota", str(error)) from None
    return {"digest": digest, "bytes": len(content), "created": new}, 201 if new else 200


@blueprint.route("/bundles/<digest>", methods=["HEAD"])
@operation(answers={200: None}, scope=Scope.SUBMIT)
def head(digest: str) -> Response:
    """Whether the caller's tenant has a bundle here, which is kept longer then."""
    if not gateway().bundles.use(caller().tenant.name, _digest(digest)):
        raise ApiProblem(404, "No such bundle", f"tenant {caller().tenant.name!r} has no bundle {digest}")
    return Response()
