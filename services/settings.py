"""The one settings object of a deployment, read from `ROLLOUT_*` environment variables."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator

from services import redis_address
from services.webhook_address import AllowedAddresses

ENV_PREFIX = "ROLLOUT_"


def _check_redis_url(url: str) -> str:
    redis_address.parse(url)
    return url


class SettingsError(ValueError):
    """An environment variable has a value that cannot be used; the message names it."""


class Settings(BaseModel):
    """Each field is set by `ROLLOUT_<FIELD IN CAPITALS>`; the table in docs/settings.md is made from here."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    redis_url: Annotated[str, AfterValidator(_check_redis_url)] = Field(
        "redis://127.0.0.1:6379/0",
        description="Broker and home of all state: `redis://`, `rediss://`, `unix://` or `sentinel://`.",
    )
    redis_strict: bool = Field(
        False,
        description="Refuse a Redis that may lose data (eviction, no append-only file) instead of warning.",
    )
    redis_max_memory_mb: int = Field(
        0,
        ge=0,
        description="Memory (MiB) of the Redis that `rollout up` or the head of a Slurm service runs; "
        "0 = half of what the machine, or the job, has.",
    )
    redis_fsync: str = Field(
        "everysec",
        pattern="^(everysec|always)$",
        description="When that Redis writes to disk what it acknowledged: `everysec` may lose the last "
        "second in a power cut, `always` nothing ([its cost](redis.md#what-a-power-cut-may-lose)).",
    )
    gateway_host: str = Field("127.0.0.1", description="Address the gateway listens on.")
    gateway_port: int = Field(8080, ge=0, le=65535, description="Port of the gateway; 0 picks a free one.")
    gateway_names: str = Field(
        "",
        description="Further host names, separated by commas, by which callers reach a port that only this "
        "machine reaches, or the one without keys: a proxy's, for one.",
    )
    gateway_address_connections: int = Field(
        2000, ge=1, description="Connections that one address may have; one more is closed."
    )
    compat_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="Port of the [compatible APIs](compatibility.md) that needs NO KEY; 0 = there is none.",
    )
    compat_tenant: str = Field("", description="Tenant that its callers are.")
    compat_host: str = Field("127.0.0.1", description="Address that it listens on.")
    compat_servers: bool = Field(
        True, description="Whether its callers may add LLM servers, which all tenants use."
    )
    gateway_threads: int = Field(
        64,
        ge=2,
        description="Threads of the gateway: requests it works on at once; those that wait hold none.",
    )
    gateway_waiters: int = Field(
        2000, ge=0, description="Long-polls and streams that wait at once; one more is answered 503."
    )
    gateway_tenant_share: float = Field(
        0.75,
        gt=0,
        le=1,
        description="Share of these, and of the streams, that one tenant may have beside others; one more "
        "is answered 429.",
    )
    max_group_bytes: int = Field(
        128 << 20,
        ge=1024,
        description="Most bytes of a request times its `n`: each of its rollouts shows it to readers.",
    )
    max_body_bytes: int = Field(32 << 20, ge=1024, description="Largest request body, in bytes.")
    max_wait_s: float = Field(60.0, gt=0, description="Longest `?wait=` a long-poll may ask for, in seconds.")
    node: str = Field(
        default_factory=lambda: socket.gethostname().split(".")[0],
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$",
        description="Name of this node in queue names; the default is the host name.",
    )
    worker_slots: int = Field(64, ge=1, description="Rollouts a worker process carries at once without `-c`.")
    lease_s: float = Field(30.0, gt=0, description="A worker silent for so many seconds loses its rollouts.")
    reaper_interval_s: float = Field(1.0, gt=0, description="Seconds between two looks for overdue rollouts.")
    requeue_s: float = Field(
        30.0,
        gt=0,
        description="Seconds a rollout waits in a queue before its message is sent again (doubling).",
    )
    retry_delay_s: float = Field(
        1.0, ge=0, description="Seconds before the second attempt after an infrastructure failure (doubling)."
    )
    handler_wait_s: float = Field(
        600.0,
        ge=0,
        description="Seconds that a rollout goes from worker to worker while none knows its handler; then it "
        "fails.",
    )
    shutdown_grace_s: float = Field(
        10.0, ge=0, description="Seconds that a stopping worker gives its rollouts before it hands them back."
    )
    worker_max_memory_mb: int = Field(
        0,
        ge=0,
        description="Resident memory from which on a worker hands its rollouts back and starts anew: "
        "a handler may leak; 0 = any.",
    )
    preload_tokenizers: bool = Field(
        True,
        description="A RUN worker imports at its start what loading a tokenizer takes (seconds of CPU "
        "time, and memory): 0 where handlers ask no model.",
    )
    stop_patience_s: float = Field(
        60.0,
        gt=0,
        description="Seconds a worker may hold on to a rollout past a cancel or its deadline, to clean up; "
        "then the rollout ends without it.",
    )
    priority_step_s: float = Field(
        600.0,
        gt=0,
        description="Seconds of waiting that lift a rollout as much as one step of `priority` does.",
    )
    ready_ahead: int = Field(
        0,
        ge=0,
        description="Most rollouts on a node between the start of INIT and RUN, and of ready ones without a "
        "sandbox in all. 0 = as many as RUN has slots there, at least 64.",
    )
    node_min_free_disk_mb: int = Field(
        2048,
        ge=0,
        description="INIT stops on a node with less disk (MiB) left for its sandboxes, until a quarter more "
        "is free; 0 = never.",
    )
    node_min_free_memory_mb: int = Field(
        1024, ge=0, description="The same for memory that the node, or the job's cgroup, can still give."
    )
    capture_url: str = Field(
        "",
        pattern=r"^(https?://\S+)?$",
        description="Address of capture as programs reach it; empty = there is none.",
    )
    capture_processes: int = Field(
        1,
        ge=0,
        description="Processes of capture that `rollout up`, or the head of a Slurm service, runs where "
        "`ROLLOUT_CAPTURE_URL` names none; 0 = no program can drive a rollout there.",
    )
    bundles_mb: int = Field(
        256,
        ge=0,
        description="Most MiB of [bundles](harbor.md#bundles) that Redis keeps for one tenant.",
    )
    bundle_cache: str = Field(
        "",
        description="Directory of a node's unpacked bundles, best a local one; none = `bundles/NODE` in "
        "ROLLOUT_HOME.",
    )
    bundle_cache_mb: int = Field(
        4096, ge=1, description="MiB that it may hold; those used longest ago make room."
    )
    engine_keys: str = Field(
        "",
        description="Directories, separated by colons, of files that name what calls to an LLM server "
        "[carry](backends.md#keys); none = `engine-keys` in ROLLOUT_HOME.",
    )
    backend_load: str = Field(
        "tokens",
        pattern="^(tokens|rollouts)$",
        description="What a rollout weighs on its backend: its reserved context `tokens`, or 1 (`rollouts`).",
    )
    backend_wait_s: float = Field(
        120.0,
        ge=0,
        description="Seconds a rollout waits while no LLM backend is usable before its attempt fails.",
    )
    backend_probe_s: float = Field(
        5.0, gt=0, description="Seconds between two probes of a healthy LLM backend; failing ones back off."
    )
    retention_s: float = Field(7 * 86400.0, gt=0, description="Seconds a finished rollout is kept in Redis.")
    sse_streams: int = Field(
        1000, ge=0, description="Streams of results (SSE) at once, each of them also one that waits."
    )
    sse_heartbeat_s: float = Field(
        15.0, gt=0, description="Seconds without news after which a stream of results sends a comment."
    )
    keep_acked_s: float = Field(
        -1.0,
        ge=-1,
        description="Seconds that the trajectory of an acknowledged rollout is kept; -1 = like any other.",
    )
    results_max_bytes: int = Field(
        -1,
        ge=-1,
        description="Most bytes of ended rollouts' trajectories in Redis; beyond it the oldest are dropped, "
        "acknowledged ones first. -1 = half of Redis' memory; 0 = no limit.",
    )
    webhook_url: str = Field(
        "",
        pattern=r"^(https?://\S+)?$",
        description="Where a webhook goes when a rollout has ended that names none itself.",
    )
    webhook_secret: SecretStr = Field(
        SecretStr(""),
        description="Secret that signs webhooks (`whsec_` and base64, or any text); several, separated by "
        "commas, while receivers change over. None = no webhooks.",
    )
    webhook_allow: str = Field(
        "public",
        description="Where webhooks may go: `public` addresses, host names, `.domains`, addresses and "
        "networks, separated by commas.",
    )
    webhook_tries: int = Field(50, ge=1, description="Tries of one webhook before it is given up.")
    webhook_give_up_s: float = Field(86400.0, gt=0, description="Seconds after which it is given up.")
    snapshot_dir: str = Field(
        "",
        description="Directory that every node sees: by it the files of sandboxes leave a node that ends, "
        "and their rollouts go on elsewhere. None = they begin anew.",
    )
    archive_dir: str = Field(
        "", description="Directory that ended rollouts are archived in, best one that all workers share."
    )
    archive_file_bytes: int = Field(
        256 << 20, ge=1, description="Size at which a file of the archive is closed and the next one begun."
    )
    handlers: str = Field(
        "", description="Further handlers as `module:Class` (or a list of classes), separated by commas."
    )
    data_sources: str = Field(
        "",
        description="Further data sources of the [compatible APIs](compatibility.md) as `source=handler`, "
        "separated by commas.",
    )
    prorl_timeout_s: float = Field(
        300.0, gt=0, description="Seconds that each stage of a rollout may take that came by `POST /process`."
    )
    scorers: int = Field(0, ge=0, description="Most processes of a worker that score; 0 = one a core.")
    scorer_memory_mb: int = Field(
        2048, ge=128, description="Address space that one of them may use, in MiB; beyond it the call fails."
    )
    scorer_calls: int = Field(1000, ge=1, description="Calls after which one of them is replaced.")
    environments: int = Field(
        32,
        ge=1,
        description="Most processes of [environments](environments.md) in use by a worker at once.",
    )
    environment_memory_mb: int = Field(
        4096, ge=128, description="Address space that each process of one may use, in MiB."
    )
    environment_network: str = Field(
        "", description="Kinds of them, separated by commas, whose processes keep the machine's network."
    )
    environment_servers: str = Field(
        "",
        pattern=r"^(\s*[\w.-]+=https?://[^\s,]+\s*(,|$))*$",
        description="Servers of environments that tasks may name, as `name=url`, separated by commas.",
    )
    simulator_url: str = Field(
        "",
        pattern=r"^(https?://\S+)?$",
        description="Endpoint of the OpenAI form (`http://host:8000/v1`) that plays users and opponents.",
    )
    simulator_model: str = Field("", description="Model that it is asked for.")
    simulator_key_file: str = Field("", description="File with its key; none = it needs none.")
    search_tool: str = Field(
        "",
        description="Search that `stem_tools` offers: a name in `rollout.search_tools`, or `module:Class`.",
    )
    task_egress: bool = Field(
        False,
        description="Whether [tasks](harbor.md) that ask for a network get one, by a proxy of the worker: "
        "hosts that they list, or all public addresses; never the deployment's own network.",
    )
    task_variables: str = Field(
        "",
        description="Names of variables of the workers, separated by commas, which tasks may ask for by "
        "`${NAME}`; their values enter the tasks' sandboxes.",
    )
    sandbox_runtime: str = Field(
        "auto", description="`auto`, `apptainer`, `bubblewrap` or `local-unsafe` (no isolation at all)."
    )
    sandbox_image: str = Field("base", description="Image of sandboxes whose handler names none.")
    sandbox_image_roots: str = Field(
        "",
        description="Directories, separated by colons, below which a task may name its image by a path; "
        "none = images have names. The sandbox host decides, the gateway refuses early.",
    )
    image_builds: str = Field(
        "off",
        pattern="^(off|offline|network)$",
        description="Whether workers build a missing image of a task's [Dockerfile](images.md#dockerfiles): "
        "`off`, `offline`, or `network`, with which RUN reaches what the node reaches and FROM a registry.",
    )
    stack_record: str = Field(
        "",
        description="Where `rollout up` notes how the parts of its stack fare, which `rollout status` shows; "
        "set by it.",
    )
    flower_url: str = Field(
        "",
        pattern=r"^(https?://\S+)?$",
        description="Where people reach Flower; `rollout status` and the API link to it. None = no links.",
    )
    flower_auth_file: str = Field(
        "", description="File of mode 0600 with `user:password` a line, for Flower (deploy/flower)."
    )
    flower_db: str = Field("", description="File in which Flower keeps what it has seen; none = in memory.")
    worker_metrics_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="Port of a worker's own metrics (its process, event loop, rollouts in hand); 0 = none.",
    )
    worker_metrics_host: str = Field("127.0.0.1", description="Address that they are served on.")
    autoscale_wait_s: float = Field(
        30.0,
        gt=0,
        description="Wait in a stage's queue, in seconds, that the [autoscaler](scaling.md) aims at.",
    )
    autoscale_hold_s: float = Field(
        300.0,
        ge=0,
        description="How far back, in seconds, its need for capacity counts before it takes any away.",
    )
    autoscale_interval_s: float = Field(10.0, gt=0, description="Seconds between two of its decisions.")
    log_level: str = Field("INFO", description="DEBUG, INFO, WARNING or ERROR.")
    log_format: str = Field("console", pattern="^(console|json)$", description="`console` or `json`.")

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
