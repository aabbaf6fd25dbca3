"""A service to attack over HTTP, in this process: a victim's tenant, an attacker's, and an operator."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from services.gateway.context import EXTENSION
from services.state.api_keys import Scope
from tests.helpers.tenants import World

VICTIM, ATTACKER, OPERATOR = "victim", "attacker", "operator"


@dataclass
class ServiceTarget:
    """A gateway with its Redis. With `control` an attack takes the one wall down that it is about."""

    control: bool
    world: World
    patch: pytest.MonkeyPatch
    place: str = "service"

    @property
    def gate(self):
        return self.world.app.extensions[EXTENSION]

    def without(self, owner, name: str, value) -> None:
        """Take a wall down, in the control alone."""
        if self.control:
            self.patch.setattr(owner, name, value)

    def restart(self, **settings) -> None:
        """A gateway with other settings."""
        self.world.app = self.world.start(**settings)

    def submit(self, who: str, **body) -> list[str]:
        """An accepted submission; the ids."""
        answer = self.world.submit(who, **body)
        assert answer.status_code == 202, answer.text
        return [rollout["id"] for rollout in answer.json["rollouts"]]

    def raw(self, who: str, path: str, body: bytes, **more):
        """A body as it is."""
        return self.world.call("POST", path, who, data=body, content_type="application/json", **more)

    def end(self, who: str) -> None:
        """End what a tenant has under way, so that it is among the completions."""
        self.gate.rollouts.cancel_many(self.gate.rollouts.ids(tenant=who, limit=1000), who)


def service(url: str, control: bool, patch: pytest.MonkeyPatch) -> ServiceTarget:
    """A fresh one on the Redis at that address."""
    world = World(url)
    for who in (VICTIM, ATTACKER):
        world.key(who, Scope.SUBMIT, Scope.READ)
    world.key(OPERATOR, Scope.ADMIN)
    return ServiceTarget(control, world, patch)
