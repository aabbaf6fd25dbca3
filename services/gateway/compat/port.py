"""The port that needs no key, as the settings have it. This file imports no web framework."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from services.settings import Settings, SettingsError
from services.state.tenants import check_name

EXTENSION = "rollout.compat"
"""The name under which the gateway's application has its `Compat`, where there is one."""


@dataclass(frozen=True)
class Compat:
    """A port that needs no key: its address, and the tenant that its callers are."""

    host: str
    port: int
    tenant: str
    servers: bool
    """Whether its callers may add LLM servers, which all tenants use, and remove those again."""

    @classmethod
    def of(cls, settings: Settings) -> Compat | None:
        """As the settings have it; None = there is none.

        Raises:
            SettingsError: It is not said whose it is, or it is the ordinary port.
        """
        port, tenant = settings.compat_port, settings.compat_tenant
        if not port:
            if tenant:
                raise SettingsError(
                    f"ROLLOUT_COMPAT_TENANT={tenant!r} has no port: set ROLLOUT_COMPAT_PORT or --compat-port"
                )
            return None
        if not tenant:
            raise SettingsError(
                f"ROLLOUT_COMPAT_PORT={port} needs no key, so say whose it is: set ROLLOUT_COMPAT_TENANT "
                "or --compat-tenant"
            )
        try:
            check_name(tenant)
        except ValueError as error:
            raise SettingsError(f"ROLLOUT_COMPAT_TENANT: {error}") from None
        if port == settings.gateway_port:
            raise SettingsError(f"ROLLOUT_COMPAT_PORT={port} is the gateway's own port: choose another one")
        return cls(settings.compat_host, port, tenant, settings.compat_servers)

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        servers = "may add LLM servers that all tenants use" if self.servers else "adds no LLM servers"
        return (
            f"NO KEY IS NEEDED AT {self.address}: whoever reaches it submits rollouts as the tenant "
            f"{self.tenant!r} and {servers}"
        )

    def to_json(self) -> dict[str, Any]:
        return {"address": self.address, "tenant": self.tenant, "servers": self.servers}
