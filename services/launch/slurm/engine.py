"""A node that carries LLM servers, one for each set of its GPUs, registered with the gateway while they
serve."""

from __future__ import annotations

import os
import shlex
import sys
import time
from pathlib import Path

import structlog

from rollout.client import Client, RolloutError
from rollout.schema.base import DEFAULT_POLICY
from services.guard import engine_token as guard
from services.launch import SlurmError
from services.launch.parts import answers, pick_port
from services.launch.slurm import place as places
from services.launch.slurm.job import MemberJob
from services.launch.slurm.place import Place
from services.launch.slurm.plan import ENGINE
from services.launch.slurm.rundir import ENGINE_KEY, UP, Head, RunDir
from services.launch.supervisor import LOOK_S, Interrupted, Part

log = structlog.get_logger("slurm")

VLLM = (
    "vllm serve {model} --host {host} --port {port} --tensor-parallel-size {gpus} --enable-scale-out "
    "--logprobs-mode processed_logprobs --enable-prompt-tokens-details"
)
GUARD = " --middleware engine_token.RequireToken"
"""Has vLLM ask for a token before all that its dev mode opens: who reaches that may run anything."""
TRAINABLE = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
START_S = 1800.0
"""For a server to answer: a large model is read from a parallel file system."""
CHECK_EVERY_S = 15.0
"""Between two looks whether the gateway still knows our servers."""
CALL_S, LAST_CALL_S = 30.0, 4.0
"""For a call to the gateway; the second once TERM came."""
STOP_S = 20.0
"""For servers to end; Slurm kills after KillWait (30 s)."""


class EngineJob(MemberJob):
    """An engine job's life."""

    def __init__(self, run: RunDir, place: Place) -> None:
        super().__init__(run, place, ENGINE)
        self._urls: dict[str, str] = {}
        self._checked = float("-inf")
        self._key: str | None = None

    def _start_programs(self) -> None:
        address = places.address(self.place.node)
        env = self._environment("ROLLOUT_URL", "ROLLOUT_API_KEY", "ROLLOUT_REDIS_URL")
        # torch would make one in /tmp and leave it there.
        env.setdefault("TORCHINDUCTOR_CACHE_DIR", str(self.scratch.path / "torchinductor"))
        token = self.run_dir.engine_keys / ENGINE_KEY
        if token.exists():  # not where an older release began the service
            self._key = ENGINE_KEY
            env[guard.VARIABLE] = str(token)
            env["PYTHONPATH"] = f"{Path(guard.__file__).parent}{os.pathsep}{env.get('PYTHONPATH', '')}"
        patience_s = float(os.environ.get("ROLLOUT_SLURM_ENGINE_START_S") or START_S)
        taken: set[int] = set()
        servers = []
        for number, devices in enumerate(device_sets(os.environ)):
            port = pick_port([], taken, address)
            name = f"engine-{number}"
            command = server_command(env, address, port, len(devices))
            if GUARD.split()[-1] in command:
                env |= TRAINABLE
            visible = {"CUDA_VISIBLE_DEVICES": ",".join(devices)} if devices else {}
            servers.append(self._spawn(Part(name, command), env | visible))
            self._urls[f"{self.place.name}-{number}"] = f"http://{address}:{port}"
        for server, url in zip(servers, self._urls.values(), strict=True):
            self.supervisor.wait_for(server, lambda url=url: self._why_not(url), patience_s)
            if answers(f"{url}/v1/models") is None:
                log.warning("it answers without a token, so whoever reaches it may use it", url=url)
        self._publish()

    def _why_not(self, url: str) -> str | None:
        """Why a server cannot be used yet; None = it can. Interrupted when the job is to end."""
        if not self._is_wanted():
            raise Interrupted
        return answers(f"{url}/health")

    def _tend(self) -> None:
        super()._tend()
        if time.monotonic() - self._checked > (CHECK_EVERY_S if self.member.backends else LOOK_S):
            self._register()
            self._checked = time.monotonic()

    def _register(self) -> None:
        """Have the gateway know every server of ours; again when a head came back without its data."""
        if (head := self._head()) is None:
            return
        policy = os.environ.get("ROLLOUT_SLURM_ENGINE_POLICY") or DEFAULT_POLICY
        policies = None if policy == DEFAULT_POLICY else {policy: None}
        try:
            with self._client(head) as client:
                known = {backend.id: backend.url for backend in client.backends()}
                for name in known:
                    if self._is_of_an_earlier_life(name):
                        client.remove_backend(name)
                        log.info("took a server of the job's earlier life off the list", backend=name)
                for name, url in self._urls.items():
                    if known.get(name) != url:
                        client.add_backend(url, id=name, key=self._key, policies=policies)
                        log.info("registered", backend=name, url=url)
        except RolloutError as error:
            log.warning("not registered yet", error=str(error))
            return
        if self.member.backends != self._urls:
            self.member.backends = dict(self._urls)
            self._publish()

    def _is_of_an_earlier_life(self, backend: str) -> bool:
        """Whether it is a server of this job from before it was requeued, on the node that was lost."""
        number = backend.rpartition("-")[2]
        ours = backend.endswith(f"-job{self.place.job}-{number}") and number.isdecimal()
        return ours and backend not in self._urls and not self.place.step

    def _is_drained(self) -> bool:
        """No new rollouts on our servers, and none left that has its calls here."""
        if (head := self._head()) is None:
            return True
        try:
            with self._client(head) as client:
                ours = [backend for backend in client.backends() if backend.id in self._urls]
                for backend in ours:
                    if not backend.draining:
                        client.drain_backend(backend.id)
        except RolloutError as error:
            log.warning("the gateway does not answer; the drain goes on", error=str(error))
            return False
        return not any(backend.live_rollouts for backend in ours)

    def _stop(self) -> None:
        """Off the list, so that no rollout begins a call here; those under way move at their next call."""
        if self.member.backends:
            with self._going_on():
                if head := self._head():
                    self._unregister(head)
        self.supervisor.stop_all(STOP_S)

    def _unregister(self, head: Head) -> None:
        with self._client(head) as client:
            for name in self._urls:
                try:
                    client.remove_backend(name)
                except RolloutError as error:
                    log.warning("not taken off the list", backend=name, error=str(error))
                    if self.supervisor.ends_now:  # little time, and the others would fare no better
                        return

    def _head(self) -> Head | None:
        head = self.run_dir.head()
        return head if head is not None and head.state == UP else None

    def _client(self, head: Head) -> Client:
        timeout_s = LAST_CALL_S if self.supervisor.ends_now else CALL_S
        return Client(head.url, api_key=self.run_dir.api_key(), timeout=timeout_s, retry_for=2.0)


def device_sets(environ: os._Environ[str] | dict[str, str]) -> list[list[str]]:
    """The GPUs of each server; one set without any where the job has none.

    Raises:
        SlurmError: They cannot be divided so.
    """
    devices = [name for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    gpus = int(environ.get("ROLLOUT_SLURM_ENGINE_GPUS") or 1)
    if not devices or gpus == 0:
        return [devices]
    if len(devices) % gpus:
        raise SlurmError(
            f"{len(devices)} GPUs cannot be divided among servers of {gpus} each: change --engine-gpus, or "
            "--gres in [sbatch.engine]"
        )
    return [devices[first : first + gpus] for first in range(0, len(devices), gpus)]


def server_command(environ: os._Environ[str] | dict[str, str], host: str, port: int, gpus: int) -> list[str]:
    """The command of one server, word by word.

    Raises:
        SlurmError: It names something that we do not know, or no model is given.
    """
    guarded = VLLM + GUARD if environ.get(guard.VARIABLE) else VLLM
    template = environ.get("ROLLOUT_SLURM_ENGINE_COMMAND") or guarded
    policy = environ.get("ROLLOUT_SLURM_ENGINE_POLICY") or DEFAULT_POLICY
    model = environ.get("ROLLOUT_SLURM_ENGINE_MODEL", "").replace("{policy}", policy)
    if "{model}" in template and not model:
        raise SlurmError("ROLLOUT_SLURM_ENGINE_MODEL is not set: name a model to serve (--engine-model)")
    values = {"model": model, "host": host, "port": port, "gpus": max(1, gpus), "python": sys.executable}
    values["policy"] = policy
    try:
        return [word.format(**values) for word in shlex.split(template)]
    except (KeyError, IndexError, ValueError) as error:
        raise SlurmError(
            f"ROLLOUT_SLURM_ENGINE_COMMAND={template!r}: {error}; the names are {', '.join(values)} in braces"
        ) from None
