"""Tenants do not see each other, and use what they are allowed to."""

from __future__ import annotations

import threading

from services.state.api_keys import Scope
from services.state.tenants import Tenant
from tests.helpers.stack import wait_until


def test_another_tenant_s_rollouts_do_not_exist(world):
    world.key("a")
    world.key("b")
    mine = [rollout["id"] for rollout in world.submit("a", n=2, group_id="g", tags=["t"]).json["rollouts"]]
    assert [world.get(f"/v1/rollouts/{id_}", "a").json["tenant"] for id_ in mine] == ["a", "a"]

    absent = world.get("/v1/rollouts/no-such", "b").json["detail"]
    for path in (f"/v1/rollouts/{mine[0]}", f"/v1/rollouts/{mine[0]}?wait=50"):
        answer = world.get(path, "b")
        assert answer.status_code == 404
        assert answer.json["detail"] == absent.replace("no-such", mine[0])
    assert world.post(f"/v1/rollouts/{mine[0]}/cancel", "b").status_code == 404
    for body in ({"ids": mine}, {"group_id": "g"}, {"tag": "t"}):
        done = world.post("/v1/rollouts/cancel", "b", body).json
        assert done["cancelled"] == 0 and done["unknown"] == len(body.get("ids", ()))
        assert done["unknown_ids"] == body.get("ids", [])
    for query in ("", "?group_id=g", "?tag=t", "?state=queued"):
        assert world.get(f"/v1/rollouts{query}", "b").json == {"rollouts": [], "cursor": None}
        assert len(world.get(f"/v1/rollouts{query}", "a").json["rollouts"]) == 2

    # The same words mean another group and another tag in another tenant's mouth.
    world.submit("b", group_id="g", tags=["t"])
    assert len(world.get("/v1/rollouts?group_id=g", "a").json["rollouts"]) == 2
    assert world.post("/v1/rollouts/cancel", "a", {"tag": "t"}).json["cancelled"] == 2
    assert [rollout["tenant"] for rollout in world.get("/v1/results", "a").json["rollouts"]] == ["a", "a"]
    assert world.get("/v1/results", "b").json["rollouts"] == []
    acked = world.post("/v1/rollouts/ack", "b", {"ids": mine}).json
    assert acked["unknown"] == 2 and acked["acknowledged"] == 0
    assert world.get("/v1/rollouts?state=queued", "b").json["rollouts"][0]["group_id"] == "g"
    assert world.post("/v1/rollouts/cancel", "b", {"group_id": "g"}).json["cancelled"] == 1


def test_a_page_of_completions_is_full_however_many_others_ended(world):
    for who in ("a", "b"):
        world.key(who)
    for number in range(30):
        world.submit("b" if number % 10 else "a", tags=["t"])
    for who in ("a", "b"):
        world.post("/v1/rollouts/cancel", who, {"tag": "t"})
    page = world.get("/v1/results?limit=2", "a").json
    rest = world.get(f"/v1/results?limit=2&cursor={page['cursor']}", "a").json
    assert [len(page["rollouts"]), len(rest["rollouts"])] == [2, 1]


def test_an_admin_may_name_another_tenant_or_all(world):
    world.key("a")
    world.key("chief", Scope.ADMIN)
    (made,) = world.submit("a", tags=["t"]).json["rollouts"]
    path = f"/v1/rollouts/{made['id']}"
    assert [world.get(path + query, "chief").status_code for query in ("", "?tenant=a", "?tenant=*")] == [
        404,
        200,
        200,
    ]
    assert len(world.get("/v1/rollouts?tenant=*&tag=t", "chief").json["rollouts"]) == 1
    assert world.get("/v1/rollouts?tenant=*&tag=other", "chief").json["rollouts"] == []
    assert world.post("/v1/rollouts/cancel?tenant=*", "chief", {"tag": "t"}).status_code == 400
    assert world.post("/v1/rollouts/cancel?tenant=a", "chief", {"tag": "t"}).json["cancelled"] == 1
    for what in ("rollouts", "results", "results/stream", "batches", f"rollouts/{made['id']}"):
        for name in ("chief", "*"):
            refused = world.get(f"/v1/{what}?tenant={name}", "a")
            assert refused.status_code == 403 and refused.json["errors"][0]["field"] == "tenant"


def test_an_id_of_another_tenant_is_taken_and_says_no_more_than_that(world):
    world.key("a")
    world.key("b")
    assert world.submit("a", id="step-1").status_code == 202
    same, different = world.submit("b", id="step-1"), world.submit("a", id="step-1", n=1, metadata={"x": 1})
    assert same.status_code == different.status_code == 409
    assert same.json == different.json
    assert world.submit("a", id="step-1").json["rollouts"][0]["created"] is False


def test_handlers_images_and_runtimes_are_checked_before_anything_is_enqueued(world):
    world.key("a")
    world.tenants.set(Tenant(name="a", handlers=("boxed", "chooses", "noop"), images=("special", "swe-*")))

    def refused(**body):
        answer = world.post("/v1/rollouts", "a", body)
        assert answer.status_code == 403, answer.text
        return [error["field"] for error in answer.json["errors"]]

    assert refused(handler="nobody-s") == ["handler"]
    assert refused(handler="chooses") == ["handler"]  # the deployment's default image
    assert refused(handler="chooses", task={"image": "/etc"}) == ["task.image"]
    assert refused(handler="noop", sandbox_runtime="local-unsafe") == ["sandbox_runtime"]
    many = {"requests": [{"handler": "noop"}, {"handler": "other"}]}
    assert refused(**many) == ["requests.1.handler"]
    assert world.gate.rollouts.counts()["queued"] == 0
    for fine in ({"handler": "boxed"}, {"handler": "chooses", "task": {"image": "swe-1"}}):
        assert world.post("/v1/rollouts", "a", fine).status_code == 202
    world.tenants.set(Tenant(name="a"))
    for runtime in ("local-unsafe", "bubblewrap"):  # the deployment's own is `auto`
        assert refused(handler="noop", sandbox_runtime=runtime) == ["sandbox_runtime"]
    assert world.submit("a", sandbox_runtime="apptainer").status_code == 202
    world.tenants.set(Tenant(name="a", handlers=("noop",), runtimes=("local-unsafe",)))
    assert world.submit("a", sandbox_runtime="local-unsafe").status_code == 202
    assert refused(handler="noop", sandbox_runtime="apptainer") == ["sandbox_runtime"]
    assert [handler["name"] for handler in world.get("/v1/handlers", "a").json["handlers"]] == ["noop"]


def test_every_field_of_a_task_that_names_an_image_is_checked(world):
    key = world.key("a", Scope.SUBMIT, Scope.ADMIN)

    def refused(task, status=403, handler="chooses"):
        answer = world.post("/v1/rollouts", key, {"handler": handler, "task": task})
        assert answer.status_code == status, answer.text
        return [error["field"] for error in answer.json.get("errors", [])]

    for field in ("image", "image_name", "docker_image"):
        for path in ("/", "/etc", "../x", "a/../../etc", "./x.sif", "~/x"):
            assert refused({field: path}) == [f"task.{field}"], path
        # Of a handler whose schema does not name the field, too: it may read it all the same.
        assert refused({field: "/etc"}, handler="boxed") == [f"task.{field}"]
        refused({field: "swebench/sweb.eval:latest"}, 202)
    assert refused({"image": "fine", "docker_image": "/etc"}) == ["task.docker_image"]
    world.tenants.set(Tenant(name="a", images=("swebench-*",)))
    refused({"docker_image": "docker://swebench/sweb.eval:latest"}, 202)
    assert refused({"docker_image": "other/x"}) == ["task.docker_image"]


def test_below_roots_that_the_operator_set_an_image_may_be_a_path(world):
    app = world.start(sandbox_image_roots="/images:/more/")

    key = world.key("a")

    def status(image):
        body, headers = {"handler": "chooses", "task": {"image": image}}, {"Authorization": f"Bearer {key}"}
        return app.test_client().post("/v1/rollouts", json=body, headers=headers).status_code

    assert [status(image) for image in ("/images/a.sif", "/more/a/b", "name")] == [202] * 3
    assert [status(image) for image in ("/images", "/images/../etc", "/images2/a", "/")] == [403] * 4


def test_the_compatible_routes_keep_tenants_apart(world):
    world.key("a")
    world.key("b")
    body = {"instance": {"data_source": "noop", "instance_id": "i"}, "job_id": "j"}
    answers = []
    job = threading.Thread(target=lambda: answers.append(world.post("/process", "a", body)), daemon=True)
    job.start()
    wait_until(lambda: world.get("/status", "a").json["pending_jobs"] == 1, 120, "the job")
    assert world.get("/status", "b").json["pending_jobs"] == 0
    assert world.post("/cancel", "b", {"job_id": "j"}).json["status"] == "unknown"
    assert world.post("/stop", "b").json["cancelled"] == 0
    assert world.post("/cancel", "a", {"job_id": "j"}).json["status"] == "cancelled"
    job.join(60)
    assert (answers[0].status_code, answers[0].json["filter"]) == (200, True)
    world.tenants.set(Tenant(name="a", handlers=("boxed",)))
    answer = world.post("/process", "a", {"instance": {"data_source": "noop"}})
    assert answer.status_code == 400 and "boxed" in answer.text and "chooses" not in answer.text
    body["instance"] = {"data_source": "apps", "prompt": "?", "tests": []}
    answer = world.post("/process", "a", body)
    assert answer.status_code == 403 and answer.json["errors"][0]["field"] == "instance.data_source"
    row = {"responses_create_params": {"input": "?"}, "agent_ref": {"name": "apps"}, "tests": []}
    answer = world.post("/run", "a", row)
    assert answer.status_code == 200 and answer.json["_ng_failure_class"] == "task"
