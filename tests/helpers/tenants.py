"""A gateway with a real Redis, its keys, and calls in the name of tenants."""

from __future__ import annotations

from click.testing import CliRunner

from rollout.schema import HandlerInfo
from services.gateway.app import create_app
from services.gateway.context import EXTENSION
from services.settings import Settings
from services.state.api_keys import KeyStore, Scope
from services.state.fleet import FleetStore
from services.state.redis import connect
from services.state.tenants import TenantStore

BOXED = {"uses_sandbox": True, "uses_model": False}
HANDLERS = [
    HandlerInfo(name="noop"),
    HandlerInfo(name="boxed", image="special", **BOXED),
    HandlerInfo(name="chooses", task_schema={"properties": {"image": {"type": "string"}}}, **BOXED),
]


class World:
    """A gateway in this process, its keys, and calls in the name of tenants."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.redis = connect(url)
        self.redis.flushall()
        FleetStore(self.redis).put_handlers(HANDLERS)
        self.keys = KeyStore(self.redis)
        self.tenants = TenantStore(self.redis)
        self.app = self.start()
        self.gate = self.app.extensions[EXTENSION]
        self.texts: dict[str, str] = {}

    def start(self, **settings):
        return create_app(Settings(redis_url=self.url, **settings))

    def key(self, tenant: str, *scopes: Scope) -> str:
        _, text = self.keys.create(tenant, scopes or (Scope.SUBMIT, Scope.READ))
        self.texts[tenant] = text
        return text

    def call(self, method: str, path: str, who: str | None = None, **more):
        """A call with the key of a tenant, or with a key's own text."""
        headers = more.pop("headers", {})
        if who is not None:
            headers["Authorization"] = f"Bearer {self.texts.get(who, who)}"
        return self.app.test_client().open(path, method=method, headers=headers, **more)

    def get(self, path: str, who: str | None = None, **more):
        return self.call("GET", path, who, **more)

    def post(self, path: str, who: str | None = None, body=None, **more):
        return self.call("POST", path, who, json={} if body is None else body, **more)

    def submit(self, who: str | None, **body):
        return self.post("/v1/rollouts", who, {"handler": "noop", **body})


def run(command, *args, url, code=0, env=None):
    """A command against that Redis, which ends with `code`."""
    result = CliRunner().invoke(command, [*args, "--redis", url], env=env)
    assert result.exit_code == code, result.output
    return result
