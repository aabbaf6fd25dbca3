"""A rollout or a group as one HTML file: what is in it, whose it may be, and that nothing gets out of it."""

from __future__ import annotations

import base64
import gzip
import json
import re

import pytest

from rollout import arrays
from rollout.schema import Stage, State
from rollout.trajectory import Message, Trajectory
from services.gateway.page import export, serving
from services.state import keys
from services.state.rollouts.store import Finish
from tests.helpers.rollouts import chain, sampled

EVIL = "</script><script>alert(1)</script><!--<script>"
DIGEST = "0123456789ab"


@pytest.fixture(autouse=True)
def page(tmp_path, monkeypatch):
    """A small page with imports of every form."""
    for name, text in {
        "index.html": '<!doctype html>\n<html>\n<head>\n<meta charset="utf-8">\n<title>rollout</title>\n'
        '<link rel="stylesheet" href="page/style.css">\n<script type="module" src="page/app.js"></script>\n'
        '</head>\n<body>\n<div id="app"></div>\n</body>\n</html>\n',
        "style.css": "body { color: red }\n",
        "app.js": 'import { a } from "./views/a.js";\nimport "./vendor/deep/b.js";\n',
        "unused.js": 'import "./no.js";\n',
        "views/a.js": 'export { c } from "../c.js";\nimport {\n  b,\n} from "../vendor/deep/b.js";\n',
        "vendor/deep/b.js": 'import{c as d}from"../../c.js";export const b=d;',
        "c.js": 'import "./app.js"; // a circle\nexport const c = 1;',
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(serving, "STATIC", tmp_path)
    return tmp_path


def finished(world, who="a", n=1, text="hello", ids=(3, 1, 4), **more):
    """Rollouts that ended with a trajectory."""
    made = world.submit(who, n=n, **more).json["rollouts"]
    store = world.gate.rollouts
    for item in made:
        trajectory = Trajectory(chains=[chain([2, 7], sampled(list(ids)))], tokenizer=f"qwen@{DIGEST}")
        trajectory.chains[0].segments[1].messages = [Message(role="assistant", content=text)]
        for stage, state in (
            (Stage.INIT, State.READY),
            (Stage.RUN, State.EVALUATING),
            (Stage.EVAL, State.COMPLETED),
        ):
            claim = store.claim(item["id"], 1, stage, "w")
            fields = {"reward": "1.0"} if stage is Stage.EVAL else {}
            assert (
                store.finish(claim, Finish(state, fields, trajectory if stage is Stage.RUN else None))
                == state
            )
    return [item["id"] for item in made], made[0]["group_id"]


def embedded(text: str) -> dict:
    (island,) = re.findall(r'<script type="application/json" id="embedded">(.*?)</script>', text, re.DOTALL)
    return json.loads(island)


def body(entry: dict) -> bytes:
    return base64.b64decode(entry["body"])


def test_a_rollout_comes_as_a_file_with_the_answers_that_its_view_asks_for(world):
    world.key("a")
    texts = ["t0", "t1", "t2", "t3", {"bytes": "e2"}, "t5", None, "t7", "t8"]
    world.redis.set(keys.vocabulary(DIGEST), gzip.compress(json.dumps({"texts": texts}).encode()))
    (name,), _ = finished(world, id="task:1")
    answer = world.get(f"/v1/rollouts/{name}/page", "a")
    assert answer.status_code == 200 and answer.content_type == "text/html; charset=utf-8"
    assert answer.headers["Content-Disposition"] == 'attachment; filename="rollout-task_1.html"'
    held = embedded(answer.text)
    assert held.pop("#") == "#/rollouts/task%3A1"
    assert set(held) == {"/v1/rollouts/task%3A1", f"/v1/tokenizers/{DIGEST}"}
    mine = held["/v1/rollouts/task%3A1"]
    direct = world.get(f"/v1/rollouts/{name}", "a", headers={"Accept": "application/msgpack"})
    assert mine["type"] == "application/msgpack" and body(mine) == direct.data
    used = {"2": "t2", "7": "t7", "3": "t3", "1": "t1", "4": {"bytes": "e2"}}
    assert json.loads(body(held[f"/v1/tokenizers/{DIGEST}"])) == {"texts": used}, (
        "of what it has, and no more"
    )


def test_a_group_comes_with_all_its_rollouts_and_their_list(world):
    world.key("a")
    ids, group = finished(world, n=3)
    answer = world.get(f"/v1/groups/{group}/page", "a")
    held = embedded(answer.text)
    assert held.pop("#") == f"#/groups/{group}"
    listed = json.loads(body(held.pop("/v1/rollouts")))
    assert {item["id"] for item in listed["rollouts"]} == set(ids) and listed["cursor"] is None
    assert set(held) == {f"/v1/rollouts/{name}" for name in ids}, "no texts are known of its tokenizer"
    assert all(arrays.unpack_answer(body(entry))[1] for entry in held.values())


def test_one_that_has_not_ended_comes_as_far_as_it_is(world):
    world.key("a")
    (item,) = world.submit("a").json["rollouts"]
    held = embedded(world.get(f"/v1/rollouts/{item['id']}/page", "a").text)
    document, records = arrays.unpack_answer(body(held[f"/v1/rollouts/{item['id']}"]))
    assert json.loads(document)["state"] == "queued" and not records


def test_what_a_model_wrote_cannot_end_the_element_that_it_is_in(world):
    world.key("a")
    (name,), _ = finished(world, text=EVIL, task={"instruction": EVIL}, metadata={EVIL: EVIL})
    text = world.get(f"/v1/rollouts/{name}/page", "a").text
    assert "alert" not in text and text.count("<script") == 3 and text.count("</script>") == 3
    assert EVIL in arrays.unpack_answer(body(embedded(text)[f"/v1/rollouts/{name}"]))[0]


def test_its_policy_allows_its_own_modules_and_reaches_nobody(world):
    world.key("a")
    (name,), _ = finished(world)
    answer = world.get(f"/v1/rollouts/{name}/page", "a")
    header = answer.headers["Content-Security-Policy"]
    assert header.startswith(
        "sandbox allow-scripts allow-downloads; frame-ancestors 'none'; default-src 'none'"
    )
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]+)">', answer.text)
    assert (
        policy in header and "unsafe" not in policy and "connect-src" not in policy and "http" not in policy
    )
    inside = re.findall(r"<(?:style|script type=\"(?:importmap|module)\")>(.*?)</", answer.text, re.DOTALL)
    assert len(inside) == 3
    for text in inside:
        assert export._hash(text) in policy
    assert answer.text.index("Content-Security-Policy") < answer.text.index("<style>")
    assert answer.headers["Cache-Control"] == "no-store"
    assert not re.findall(r"(?:src|href)=", answer.text)


def test_modules_find_each_other_by_name_and_none_by_a_relative_address(world):
    made = export.modules()
    assert set(made) == {"app.js", "views/a.js", "vendor/deep/b.js", "c.js"}
    assert made["app.js"] == 'import { a } from "page/views/a.js";\nimport "page/vendor/deep/b.js";\n'
    assert 'from"page/c.js"' in made["vendor/deep/b.js"]
    world.key("a")
    (name,), _ = finished(world)
    text = world.get(f"/v1/rollouts/{name}/page", "a").text
    (names,) = re.findall(r'<script type="importmap">(.*?)</script>', text)
    for address, url in json.loads(names)["imports"].items():
        code = base64.b64decode(url.removeprefix("data:text/javascript;base64,")).decode()
        assert code == made[address.removeprefix("page/")]


def test_a_tenant_saves_its_own_and_needs_to_read(world):
    for who in "ab":
        world.key(who)
    (name,), group = finished(world)
    for path in (f"/v1/rollouts/{name}/page", f"/v1/groups/{group}/page"):
        assert world.get(path, "b").status_code == 404
        assert world.get(path).status_code == 401
        assert world.get(f"{path}?tenant=a", "b").status_code == 403
    assert world.get("/v1/rollouts/none/page", "a").status_code == 404
    assert world.get("/v1/groups/none/page", "a").status_code == 404


def test_what_is_too_large_for_a_file_is_refused_and_the_way_told(world, monkeypatch):
    world.key("a")
    ids, group = finished(world, n=3, text="x" * 100)
    monkeypatch.setattr(export, "MOST_ROLLOUTS", 2)
    answer = world.get(f"/v1/groups/{group}/page", "a")
    assert answer.status_code == 413 and "rollout export" in answer.json["detail"]
    monkeypatch.setattr(export, "MOST_ROLLOUTS", 64)
    monkeypatch.setattr(export, "MOST_BYTES", 3000)
    assert world.get(f"/v1/groups/{group}/page", "a").status_code == 413
    assert world.get(f"/v1/rollouts/{ids[0]}/page", "a").status_code == 200


def test_no_module_of_the_page_itself_keeps_a_relative_import(page, monkeypatch):
    monkeypatch.undo()
    made = export.modules()
    assert {"app.js", "api.js", "ui.js", "views/rollout.js", "views/group.js"} <= set(made)
    for path, code in made.items():
        assert not re.search(r"""(?:from|import)\s*\(?\s*["'`]\.""", code), path
        assert "import(" not in code, f"{path} imports while it runs"
    shell, _ = export._shell("x")
    assert 'id="embedded"' in shell and shell.count("<script") == 2 and 'href="page/' not in shell
