"""What a Harbor task's `task.toml` says, by the names that it has there (schema 1.4, and older ones)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from ipaddress import ip_address, ip_network
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from rollout.suites import SuiteError

MOST_STEPS = 100
NetworkMode = Literal["public", "no-network", "allowlist"]
User = Annotated[str, Field(min_length=1, max_length=64)] | Annotated[int, Field(ge=0)] | None
"""A name, or a uid; None = the image's own."""
Seconds = Annotated[float, Field(gt=0)]
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_REFERENCE = re.compile(r"\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\}")
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMG])B?\s*", re.IGNORECASE)
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


def _variables(env: dict[str, str]) -> dict[str, str]:
    for name, value in env.items():
        if not _VARIABLE.fullmatch(name) or "\0" in value:
            raise ValueError(f"{name!r} cannot be a variable of this value")
    return env


def _fits(pattern: str, words: str) -> AfterValidator:
    """Texts that fit a pattern; others are refused with these words."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text, re.DOTALL):
            raise ValueError(f"{text!r} {words}")
        return text

    return AfterValidator(check)


def _host(text: str) -> str:
    """A name, `*.name`, an address or a network as allow-lists have them."""
    host = text.strip().lower().rstrip(".")
    try:
        return str(ip_network(host) if "/" in host else ip_address(host))
    except ValueError:
        if all(_LABEL.fullmatch(label) for label in host.removeprefix("*.").split(".")):
            return host
    raise ValueError(f"{text!r} is no host name, *.name, address or network; ports and URLs are none")


Env = Annotated[dict[str, str], AfterValidator(_variables)]
"""Variables; a value may be, or hold, `${NAME}` or `${NAME:-default}` (see `resolved`)."""
_UP = r"(?!(.*/)?\.\.(/|$))"
InsidePath = Annotated[str, _fits(_UP + r"[^\0]+", "leads out of where it begins: name a path without ..")]
AbsolutePath = Annotated[str, _fits(_UP + r"/[^\0]*", "is no absolute path without ..")]
Text = Annotated[str, Field(min_length=1)]


class Part(BaseModel):
    """A table of the file. Keys that are not known stay in `model_extra`, and `unknown` tells them."""

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)


class Author(Part):
    """Who wrote a task."""

    name: str
    email: str | None = None


class PackageInfo(Part):
    """`[task]`: what the task is called."""

    name: Annotated[str, _fits(r"(?!.*\.\.)\w[\w.-]{0,199}/\w[\w.-]{0,199}", "is not of the form org/name")]
    version: str | None = None
    description: str = ""
    authors: tuple[Author, ...] = ()
    keywords: tuple[str, ...] = ()


class _Networked(Part):
    network_mode: NetworkMode | None = None
    """None = as the environment's."""
    allowed_hosts: tuple[Annotated[str, AfterValidator(_host)], ...] | None = None
    """Names, `*.names`, addresses and networks; for `allowlist`."""

    @model_validator(mode="after")
    def _hosts_of_a_list(self) -> _Networked:
        if self.allowed_hosts and self.network_mode != "allowlist":
            raise ValueError("allowed_hosts goes with network_mode = 'allowlist'")
        return self


class AgentConfig(_Networked):
    """`[agent]`, of the task or of a step."""

    timeout_sec: Seconds | None = None
    """None = no limit of its own."""
    user: User = None


class HealthcheckConfig(Part):
    """A command that succeeds when the sandbox is ready, as Docker's HEALTHCHECK."""

    command: Text
    interval_sec: Seconds = 5.0
    timeout_sec: Seconds = 30.0
    start_period_sec: Annotated[float, Field(ge=0)] = 0.0
    """Seconds at the start in which failures do not count."""
    start_interval_sec: Seconds = 5.0
    retries: Annotated[int, Field(ge=1)] = 3


class MCPServerConfig(Part):
    """A server of tools for the agent."""

    name: Text
    transport: Literal["stdio", "sse", "streamable-http"] = "sse"
    url: str | None = None
    command: str | None = None
    args: tuple[str, ...] = ()
    headers: dict[str, str] = Field(default_factory=dict)
    """For the transports over HTTP; values may hold `${NAME}`."""

    @field_validator("transport", mode="before")
    @classmethod
    def _http(cls, transport: Any) -> Any:
        return "streamable-http" if transport == "http" else transport

    @model_validator(mode="after")
    def _reachable(self) -> MCPServerConfig:
        needed = "command" if self.transport == "stdio" else "url"
        if not getattr(self, needed):
            raise ValueError(f"transport {self.transport!r} needs {needed}")
        if self.headers and self.transport == "stdio":
            raise ValueError("headers go with a transport over HTTP")
        for name, value in self.headers.items():
            if not _HEADER.fullmatch(name) or any(mark in value for mark in "\r\n\0"):
                raise ValueError(f"header {name!r} cannot be sent")
        return self


class TpuSpec(Part):
    """A slice of a TPU, which no sandbox here has."""

    type: str
    topology: str


class EnvironmentConfig(_Networked):
    """`[environment]`: the sandbox that the agent, or a verifier of its own, works in."""

    build_timeout_sec: Seconds = 600.0
    docker_image: Text | None = None
    os: Literal["linux", "windows"] = "linux"
    cpus: Annotated[float, Field(gt=0)] | None = None
    memory_mb: Annotated[int, Field(gt=0)] | None = None
    storage_mb: Annotated[int, Field(gt=0)] | None = None
    gpus: Annotated[int, Field(ge=0)] | None = None
    gpu_types: tuple[str, ...] | None = None
    tpu: TpuSpec | None = None
    mcp_servers: tuple[MCPServerConfig, ...] = ()
    env: Env = Field(default_factory=dict)
    skills_dir: str | None = None
    """A directory of the image."""
    healthcheck: HealthcheckConfig | None = None
    workdir: AbsolutePath | None = None
    """None = the image's."""

    @model_validator(mode="before")
    @classmethod
    def _older_names(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        data = dict(data)
        for old, new in (("memory", "memory_mb"), ("storage", "storage_mb")):
            if (size := data.pop(old, None)) is not None:
                megabytes = _megabytes(old, size)
                if data.setdefault(new, megabytes) != megabytes:
                    raise ValueError(f"{old} = {size!r} and {new} = {data[new]!r} do not agree")
        internet = data.pop("allow_internet", None)
        if internet is not None and not isinstance(internet, bool):
            raise ValueError(f"allow_internet = {internet!r} is neither true nor false")
        if internet is not None and data.get("allowed_hosts") is None:
            data.setdefault("network_mode", "public" if internet else "no-network")
        if isinstance(data.get("os"), str):
            data["os"] = data["os"].lower()
        return data

    @model_validator(mode="after")
    def _names_once(self) -> EnvironmentConfig:
        names = [server.name for server in self.mcp_servers]
        if len(names) > len({*names}):
            raise ValueError("mcp_servers: two have the same name")
        return self


def _megabytes(name: str, size: Any) -> int:
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if match is None:
        raise ValueError(f"{name} = {size!r} is no size such as '2G' or '512M'")
    return int(float(match[1]) * {"K": 1 / 1024, "M": 1, "G": 1024}[match[2].upper()])


class CollectConfig(Part):
    """`[[verifier.collect]]`: a command that runs after the agent, before the artifacts are taken."""

    command: Text
    service: str = "main"
    timeout_sec: Seconds = 60.0
    user: User = None


class VerifierConfig(_Networked):
    """`[verifier]`, of the task or of a step."""

    timeout_sec: Seconds = 600.0
    env: Env = Field(default_factory=dict)
    user: User = None
    environment_mode: Literal["shared", "separate"] | None = None
    """None = `separate` where `environment` is given, else `shared`."""
    environment: EnvironmentConfig | None = None
    """That of a separate verifier; None = as the task's."""
    collect: tuple[CollectConfig, ...] = ()

    @model_validator(mode="after")
    def _shares_none(self) -> VerifierConfig:
        if self.environment_mode == "shared" and self.environment is not None:
            raise ValueError("environment_mode = 'shared' has no [verifier.environment]")
        return self

    @property
    def separate(self) -> bool:
        """Whether the verifier sees nothing of the agent's but the artifacts."""
        return (self.environment_mode or ("separate" if self.environment else "shared")) == "separate"


class ArtifactConfig(Part):
    """Files that are taken out of the sandbox."""

    source: InsidePath
    destination: Annotated[str, _fits(_UP + r"(?!/)[^\0\\]*", "is no relative path without ..")] | None = None
    exclude: tuple[str, ...] = ()
    service: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _source_alone(cls, data: Any) -> Any:
        return {"source": data} if isinstance(data, str) else data


class StepConfig(Part):
    """`[[steps]]`: one of several turns in one sandbox, each with an instruction and a verifier."""

    name: Annotated[
        str,
        _fits(r"(?!.*[. ]$)[^<>:\"/\\|?*\x00-\x1f\x7f]{1,255}", "cannot be a directory's name under steps/"),
    ]
    agent: AgentConfig = AgentConfig()
    verifier: VerifierConfig = VerifierConfig()
    min_reward: float | dict[str, float] | None = None
    """What the step must earn for the next ones to be played; by name where the verifier gives several."""
    healthcheck: HealthcheckConfig | None = None
    artifacts: tuple[ArtifactConfig, ...] = ()


class SolutionConfig(Part):
    """`[solution]`."""

    env: Env = Field(default_factory=dict)


class TaskConfig(Part):
    """The whole file."""

    schema_version: Annotated[str, _fits(r"1(\.\d+)*", "is no schema 1.x, which are read")] = "1.4"
    task: PackageInfo | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    agent: AgentConfig = AgentConfig()
    verifier: VerifierConfig = VerifierConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    solution: SolutionConfig = SolutionConfig()
    steps: tuple[StepConfig, ...] = ()
    multi_step_reward_strategy: Literal["mean", "final"] | None = None
    """None = `mean`."""
    artifacts: tuple[ArtifactConfig, ...] = ()
    source: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _older_name(cls, data: Any) -> Any:
        if isinstance(data, dict) and "version" in data:
            data = dict(data)
            data.setdefault("schema_version", data.pop("version"))
        return data

    @field_validator("steps")
    @classmethod
    def _steps_once(cls, steps: tuple[StepConfig, ...]) -> tuple[StepConfig, ...]:
        if len(steps) > MOST_STEPS:
            raise ValueError(f"{len(steps)} steps; at most {MOST_STEPS} are played")
        names = [step.name.casefold() for step in steps]
        if len(names) > len({*names}):
            raise ValueError("two steps have the same name")
        return steps


def unknown(part: Part, where: str = "") -> list[str]:
    """Keys of a part, and of those in it, that this reader does not know: `environment.colour`."""
    found = [where + name for name in part.model_extra or ()]
    for name in type(part).model_fields:
        value = getattr(part, name)
        for index, item in enumerate(value if isinstance(value, tuple) else (value,)):
            if isinstance(item, Part):
                place = f"{name}.{index}" if isinstance(value, tuple) else name
                found += unknown(item, f"{where}{place}.")
    return found


def merged(of_task: Any, of_step: Any) -> Any:
    """What holds in a step: its own settings, then the task's.

    Network mode and hosts go together, variables are added up, hooks of both run; a verifier's time limit is
    the step's own, as in Harbor.
    """
    own = {name: getattr(of_step, name) for name in of_step.model_fields_set}
    if own.get("network_mode"):
        own.setdefault("allowed_hosts", None)
    if isinstance(of_step, VerifierConfig):
        own |= {"timeout_sec": of_step.timeout_sec, "env": of_task.env | of_step.env}
        own["collect"] = (*of_task.collect, *of_step.collect)
        if of_step.environment is not None:
            own.setdefault("environment_mode", "separate")
        elif of_step.environment_mode == "shared":
            own["environment"] = None
    own = {name: value for name, value in own.items() if name != "user" or value is not None}
    return of_task.model_copy(update=own)


def resolved(env: Mapping[str, str], given: Mapping[str, str], where: str = "env") -> dict[str, str]:
    """Variables with what they refer to put in.

    Args:
        given: What `${NAME}` may be. Not a process' environment: tasks come from tenants.
        where: The field, for the message.

    Raises:
        SuiteError: One refers to a name that is not given, without a default.
    """

    def value(match: re.Match[str]) -> str:
        found = given.get(match["name"], match["default"])
        if found is None:
            raise SuiteError(f"{where}: ${{{match['name']}}} is not given here, and has no default")
        return found

    found = {}
    for name, text in env.items():
        end = text.rfind("}") + 1  # beyond it nothing is referred to, and a search would go there each time
        found[name] = _REFERENCE.sub(value, text[:end]) + text[end:]
    return found
