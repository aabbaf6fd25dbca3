"""The one settings object of a deployment, read from `ROLLOUT_*` environment variables."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SecretStr,
    ValidationError,
    field_validator,
)

from services import redis_address
from services.webhook_address import AllowedAddresses

ENV_PREFIX = "ROLLOUT_"
Port = Annotated[int, Field(ge=0, le=65535)]
Url = Annotated[str, Field(pattern=r"^(https?://\S+)?$")]


def _check_redis_url(url: str) -> str:
    redis_address.parse(url)
    return url


class SettingsError(ValueError):
    """An environment variable has a value that cannot be used; the message names it."""


class Settings(BaseModel):
    """Each field is set by `ROLLOUT_<FIELD IN CAPITALS>`; the table in docs/settings.md is made from here."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    redis_url: Annotated[str, AfterValidator(_check_redis_url)] = "redis://127.0.0.1:6379/0"
    """Broker and home of all state: `redis://`, `rediss://`, `unix://` or `sentinel://`."""
    redis_strict: bool = False
    """Refuse a Redis that may lose data (eviction, no append-only file) instead of warning."""
    redis_max_memory_mb: NonNegativeInt = 0
    """Memory (MiB) of the Redis that `rollout up` or the head of a Slurm service runs; 0 = half of what the
    machine, or the job, has."""
    redis_fsync: Literal["everysec", "always"] = "everysec"
    """When that Redis writes to disk what it acknowledged: `everysec` may lose the last second in a power
    cut, `always` nothing ([its cost](redis.md#what-a-power-cut-may-lose))."""
    gateway_host: str = "127.0.0.1"
    """Address the gateway listens on."""
    gateway_port: Port = 8080
    """Port of the gateway; 0 picks a free one."""
    gateway_names: str = ""
    """Further host names, separated by commas, by which callers reach a port that only this machine reaches,
    or the one without keys: a proxy's, for one."""
    gateway_address_connections: PositiveInt = 2000
    """Connections that one address may have; one more is closed."""
    compat_port: Port = 0
    """Port of the [compatible APIs](compatibility.md) that needs NO KEY; 0 = there is none."""
    compat_tenant: str = ""
    """Tenant that its callers are."""
    compat_host: str = "127.0.0.1"
    """Address that it listens on."""
    compat_servers: bool = True
    """Whether its callers may add LLM servers, which all tenants use."""
    gateway_threads: int = Field(64, ge=2)
    """Threads of the gateway: requests it works on at once; those that wait hold none."""
    gateway_waiters: NonNegativeInt = 2000
    """Long-polls and streams that wait at once; one more is answered 503."""
    gateway_tenant_share: float = Field(0.75, gt=0, le=1)
    """Share of these, and of the streams, that one tenant may have beside others; one more is answered
    429."""
    max_group_bytes: int = Field(128 << 20, ge=1024)
    """Most bytes of a request times its `n`: each of its rollouts shows it to readers."""
    max_body_bytes: int = Field(32 << 20, ge=1024)
    """Largest request body, in bytes."""
    max_wait_s: PositiveFloat = 60.0
    """Longest `?wait=` a long-poll may ask for, in seconds."""
    node: str = Field(
        default_factory=lambda: socket.gethostname().split(".")[0], pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$"
    )
    """Name of this node in queue names; the default is the host name."""
    worker_slots: PositiveInt = 64
    """Rollouts a worker process carries at once without `-c`."""
    lease_s: PositiveFloat = 30.0
    """A worker silent for so many seconds loses its rollouts."""
    reaper_interval_s: PositiveFloat = 1.0
    """Seconds between two looks for overdue rollouts."""
    requeue_s: PositiveFloat = 30.0
    """Seconds a rollout waits in a queue before its message is sent again (doubling)."""
    retry_delay_s: NonNegativeFloat = 1.0
    """Seconds before the second attempt after an infrastructure failure (doubling)."""
    handler_wait_s: NonNegativeFloat = 600.0
    """Seconds that a rollout goes from worker to worker while none knows its handler; then it fails."""
    shutdown_grace_s: NonNegativeFloat = 10.0
    """Seconds that a stopping worker gives its rollouts before it hands them back."""
    worker_max_memory_mb: NonNegativeInt = 0
    """Resident memory from which on a worker hands its rollouts back and starts anew: a handler may leak; 0 =
    any."""
    preload_tokenizers: bool = True
    """A RUN worker imports at its start what loading a tokenizer takes (seconds of CPU time, and memory): 0
    where handlers ask no model."""
    stop_patience_s: PositiveFloat = 60.0
    """Seconds a worker may hold on to a rollout past a cancel or its deadline, to clean up; then the rollout
    ends without it."""
    priority_step_s: PositiveFloat = 600.0
    """Seconds of waiting that lift a rollout as much as one step of `priority` does."""
    ready_ahead: NonNegativeInt = 0
    """Most rollouts on a node between the start of INIT and RUN, and of ready ones without a sandbox in all.
    0 = as many as RUN has slots there, at least 64."""
    node_min_free_disk_mb: NonNegativeInt = 2048
    """INIT stops on a node with less disk (MiB) left for its sandboxes, until a quarter more is free; 0 =
    never."""
    node_min_free_memory_mb: NonNegativeInt = 1024
    """The same for memory that the node, or the job's cgroup, can still give."""
    capture_url: Url = ""
    """Address of capture as programs reach it; empty = there is none."""
    capture_processes: NonNegativeInt = 1
    """Processes of capture that `rollout up`, or the head of a Slurm service, runs where
    `ROLLOUT_CAPTURE_URL` names none; 0 = no program can drive a rollout there."""
    bundles_mb: NonNegativeInt = 256
    """Most MiB of [bundles](harbor.md#bundles) that Redis keeps for one tenant."""
    bundle_cache: str = ""
    """Directory of a node's unpacked bundles, best a local one; none = `bundles/NODE` in ROLLOUT_HOME."""
    bundle_cache_mb: PositiveInt = 4096
    """MiB that it may hold; those used longest ago make room."""
    engine_keys: str = ""
    """Directories, separated by colons, of files that name what calls to an LLM server
    [carry](backends.md#keys); none = `engine-keys` in ROLLOUT_HOME."""
    backend_load: Literal["tokens", "rollouts"] = "tokens"
    """What a rollout weighs on its backend: its reserved context `tokens`, or 1 (`rollouts`)."""
    backend_wait_s: NonNegativeFloat = 120.0
    """Seconds a rollout waits while no LLM backend is usable before its attempt fails."""
    backend_probe_s: PositiveFloat = 5.0
    """Seconds between two probes of a healthy LLM backend; failing ones back off."""
    retention_s: PositiveFloat = 7 * 86400.0
    """Seconds a finished rollout is kept in Redis."""
    sse_streams: NonNegativeInt = 1000
    """Streams of results (SSE) at once, each of them also one that waits."""
    sse_heartbeat_s: PositiveFloat = 15.0
    """Seconds without news after which a stream of results sends a comment."""
    keep_acked_s: float = Field(-1.0, ge=-1)
    """Seconds that the trajectory of an acknowledged rollout is kept; -1 = like any other."""
    results_max_bytes: int = Field(-1, ge=-1)
    """Most bytes of ended rollouts' trajectories in Redis; beyond it the oldest are dropped, acknowledged
    ones first. -1 = half of Redis' memory; 0 = no limit."""
    webhook_url: Url = ""
    """Where a webhook goes when a rollout has ended that names none itself."""
    webhook_secret: SecretStr = SecretStr("")
    """Secret that signs webhooks (`whsec_` and base64, or any text); several, separated by commas, while
    receivers change over. None = no webhooks."""
    webhook_allow: str = "public"
    """Where webhooks may go: `public` addresses, host names, `.domains`, addresses and networks, separated by
    commas."""
    webhook_tries: PositiveInt = 50
    """Tries of one webhook before it is given up."""
    webhook_give_up_s: PositiveFloat = 86400.0
    """Seconds after which it is given up."""
    snapshot_dir: str = ""
    """Directory that every node sees: by it the files of sandboxes leave a node that ends, and their rollouts
    go on elsewhere. None = they begin anew."""
    archive_dir: str = ""
    """Directory that ended rollouts are archived in, best one that all workers share."""
    archive_file_bytes: PositiveInt = 256 << 20
    """Size at which a file of the archive is closed and the next one begun."""
    handlers: str = ""
    """Further handlers as `module:Class` (or a list of classes), separated by commas."""
    data_sources: str = ""
    """Further data sources of the [compatible APIs](compatibility.md) as `source=handler`, separated by
    commas."""
    prorl_timeout_s: PositiveFloat = 300.0
    """Seconds that each stage of a rollout may take that came by `POST /process`."""
    scorers: NonNegativeInt = 0
    """Most processes of a worker that score; 0 = one a core."""
    scorer_memory_mb: int = Field(2048, ge=128)
    """Address space that one of them may use, in MiB; beyond it the call fails."""
    scorer_calls: PositiveInt = 1000
    """Calls after which one of them is replaced."""
    environments: PositiveInt = 32
    """Most processes of [environments](environments.md) in use by a worker at once."""
    environment_memory_mb: int = Field(4096, ge=128)
    """Address space that each process of one may use, in MiB."""
    environment_network: str = ""
    """Kinds of them, separated by commas, whose processes keep the machine's network."""
    environment_servers: str = Field("", pattern=r"^(\s*[\w.-]+=https?://[^\s,]+\s*(,|$))*$")
    """Servers of environments that tasks may name, as `name=url`, separated by commas."""
    simulator_url: Url = ""
    """Endpoint of the OpenAI form (`http://host:8000/v1`) that plays users and opponents."""
    simulator_model: str = ""
    """Model that it is asked for."""
    simulator_key_file: str = ""
    """File with its key; none = it needs none."""
    search_tool: str = ""
    """Search that `stem_tools` offers: a name in `rollout.search_tools`, or `module:Class`."""
    task_egress: bool = False
    """Whether [tasks](harbor.md) that ask for a network get one, by a proxy of the worker: hosts that they
    list, or all public addresses; never the deployment's own network."""
    task_variables: str = ""
    """Names of variables of the workers, separated by commas, which tasks may ask for by `${NAME}`; their
    values enter the tasks' sandboxes."""
    sandbox_runtime: str = "auto"
    """`auto`, `apptainer`, `bubblewrap` or `local-unsafe` (no isolation at all)."""
    sandbox_image: str = "base"
    """Image of sandboxes whose handler names none."""
    sandbox_image_roots: str = ""
    """Directories, separated by colons, below which a task may name its image by a path; none = images have
    names. The sandbox host decides, the gateway refuses early."""
    image_builds: Literal["off", "offline", "network"] = "off"
    """Whether workers build a missing image of a task's [Dockerfile](images.md#dockerfiles): `off`,
    `offline`, or `network`, with which RUN reaches what the node reaches and FROM a registry."""
    stack_record: str = ""
    """Where `rollout up` notes how the parts of its stack fare, which `rollout status` shows; set by it."""
    flower_url: Url = ""
    """Where people reach Flower; `rollout status` and the API link to it. None = no links."""
    flower_auth_file: str = ""
    """File of mode 0600 with `user:password` a line, for Flower (deploy/flower)."""
    flower_db: str = ""
    """File in which Flower keeps what it has seen; none = in memory."""
    worker_metrics_port: Port = 0
    """Port of a worker's own metrics (its process, event loop, rollouts in hand); 0 = none."""
    worker_metrics_host: str = "127.0.0.1"
    """Address that they are served on."""
    autoscale_wait_s: PositiveFloat = 30.0
    """Wait in a stage's queue, in seconds, that the [autoscaler](scaling.md) aims at."""
    autoscale_hold_s: NonNegativeFloat = 300.0
    """How far back, in seconds, its need for capacity counts before it takes any away."""
    autoscale_interval_s: PositiveFloat = 10.0
    """Seconds between two of its decisions."""
    log_level: str = "INFO"
    """DEBUG, INFO, WARNING or ERROR."""
    log_format: Literal["console", "json"] = "console"
    """`console` or `json`."""

    @property
    def data_source_handlers(self) -> dict[str, str]:
        """Data source in lower case → handler, as `data_sources` has it."""
        pairs = (pair.split("=", 1) for pair in self.data_sources.split(",") if pair.strip())
        return {source.strip().lower(): handler.strip() for source, handler in pairs}

    @field_validator("data_sources")
    @classmethod
    def _pairs(cls, text: str) -> str:
        for pair in filter(str.strip, text.split(",")):
            source, _, handler = pair.partition("=")
            if not (source.strip() and handler.strip()):
                raise ValueError(f"{pair.strip()!r} is not of the form source=handler")
        return text

    @field_validator("webhook_allow")
    @classmethod
    def _readable(cls, allow: str) -> str:
        AllowedAddresses(allow)
        return allow

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Settings:
        """Read the environment; unknown `ROLLOUT_*` names are left alone (other programs use some).

        Raises:
            SettingsError: A value does not fit; the message names the variable.
        """
        values: dict[str, Any] = {
            name: environ[ENV_PREFIX + name.upper()]
            for name in cls.model_fields
            if environ.get(ENV_PREFIX + name.upper(), "") != ""
        }
        try:
            return cls(**values)
        except ValidationError as error:
            first = error.errors()[0]
            name = ENV_PREFIX + str(first["loc"][0]).upper()
            shown = redis_address.hide_password(str(first["input"]))
            raise SettingsError(f"{name}={shown!r}: {first['msg']}") from None


@lru_cache(maxsize=1)
def settings() -> Settings:
    """The settings of this process, read once."""
    return Settings.from_env()
