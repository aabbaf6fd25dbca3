"""A trainer's side: pausing in three ways, swapping weights, labelling tokens."""

from __future__ import annotations

import asyncio
import json
import shutil

import pytest

from tests.helpers import llm_client, llm_reference
from tests.helpers.lazy import Lazy
from tests.helpers.llm_servers import DEMO_MODEL

safetensors = Lazy("safetensors.torch")

LONG = {"max_tokens": 1000, "ignore_eos": True}
"""Of a request that still runs when something is done to it: seconds on any machine here."""


def reload_body(directory):
    return {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}


def test_a_swap_in_the_middle_of_a_generation_shows_in_its_version_spans(restored, other_weights):
    async def ask(client):
        before = await llm_client.metric(client, "vllm:generation_tokens_total")
        # Together: the first might be through when the last one arrives.
        await llm_client.post(client, "/pause", mode="keep")
        tasks = [asyncio.create_task(llm_client.generate(client, [1, 2, i], **LONG)) for i in range(4)]
        while await llm_client.metric(client, "vllm:num_requests_waiting") < len(tasks):
            await asyncio.sleep(0.01)
        await llm_client.post(client, "/resume")
        # They are served in turn, so each has some tokens by then.
        while await llm_client.metric(client, "vllm:generation_tokens_total") < before + 4 * len(tasks):
            await asyncio.sleep(0.01)
        await llm_client.post(client, "/pause", mode="keep")
        assert await llm_client.get(client, "/is_paused") == {"is_paused": True}
        frozen = await llm_client.metric(client, "vllm:generation_tokens_total")
        await asyncio.sleep(0.1)
        assert await llm_client.metric(client, "vllm:generation_tokens_total") == frozen
        await llm_client.post(client, "/collective_rpc", reload_body(other_weights))
        await llm_client.post(client, "/update_weight_version", {"new_version": "step-1"})
        await llm_client.post(client, "/resume")
        return await asyncio.gather(*tasks)

    for i, reply in enumerate(restored.run(ask)):
        choice = reply["choices"][0]
        first, second = choice["weight_versions"]
        assert (first["version"], first["start"]) == ("default", 0)
        assert (second["version"], second["start"], second["end"]) == ("step-1", first["end"], 1000)
        # The span says truly which tokens the old weights sampled.
        old = llm_reference.logprobs(DEMO_MODEL, [1, 2, i], choice["token_ids"])
        sampled = llm_client.sampled_logprobs(choice)
        assert sampled[: first["end"]] == pytest.approx(old[: first["end"]], abs=1e-4)
        assert (
            max(abs(a - b) for a, b in zip(sampled[first["end"] :], old[first["end"] :], strict=True)) > 0.1
        )


def test_a_client_that_goes_away_while_it_waits_for_a_pause_does_not_end_the_engine(restored):
    async def ask(client):
        task = asyncio.create_task(llm_client.generate(client, [1, 2, 3], **LONG))
        while not await llm_client.metric(client, "vllm:num_requests_running"):
            assert not task.done()
            await asyncio.sleep(0.01)
        pause = asyncio.create_task(llm_client.post(client, "/pause", mode="wait"))
        while not (await llm_client.get(client, "/is_paused"))["is_paused"]:
            await asyncio.sleep(0.01)
        pause.cancel()
        await task
        await llm_client.post(client, "/resume")
        return await llm_client.generate(client, [1, 2, 3], max_tokens=2, ignore_eos=True)

    assert len(restored.run(ask)["choices"][0]["token_ids"]) == 2


def damaged(tmp_path, damage):
    """A copy of the demo checkpoint after `damage(tensors, config)`."""
    target = tmp_path / "damaged"
    shutil.copytree(DEMO_MODEL, target)
    tensors, config = (
        safetensors.load_file(target / "model.safetensors"),
        json.loads((target / "config.json").read_text()),
    )
    damage(tensors, config)
    safetensors.save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(config))
    return target


DAMAGES = {
    "shape": (
        lambda t, c: t.update({"model.norm.weight": t["model.norm.weight"][:64].clone()}),
        "model.norm.weight",
    ),
    "missing": (lambda t, c: t.pop("lm_head.weight"), "lm_head.weight"),
    "surplus": (lambda t, c: t.update({"extra": t["model.norm.weight"].clone()}), "extra"),
    "heads": (lambda t, c: c.update(num_attention_heads=8, head_dim=16), "num_attention_heads"),
}


def refused(backend, directory):
    """Why these weights are not taken."""
    status, error = backend.refusal("/collective_rpc", json=reload_body(directory))
    assert status == 400
    return error["message"]


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_checkpoint_that_does_not_fit_is_refused_and_changes_nothing(backend, tmp_path, kind):
    damage, fault = DAMAGES[kind]
    assert fault in refused(backend, damaged(tmp_path, damage))
    choice = backend.generate([1, 2, 3], max_tokens=20, ignore_eos=True)
    expected = llm_reference.logprobs(DEMO_MODEL, [1, 2, 3], choice["token_ids"])
    assert llm_client.sampled_logprobs(choice) == pytest.approx(expected, abs=1e-4)


def test_a_directory_that_is_not_there_is_refused(backend, tmp_path):
    assert "nowhere" in refused(backend, tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_cut_short_is_refused_by_name(backend, tmp_path, name):
    target = damaged(tmp_path, lambda tensors, config: None)
    (target / name).write_bytes((target / name).read_bytes()[:100])
    assert name in refused(backend, target)
