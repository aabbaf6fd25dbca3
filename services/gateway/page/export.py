"""One rollout, or one group, as a single HTML file that opens without a server.

The file has the page's own modules, as data: addresses in an import map, and the answers of the API that its
view asks for. These lie in it as base64, so that nothing a model wrote can end the element that it is in. A
policy of the file's own lets it run those modules and reach nobody.
"""

from __future__ import annotations

import gzip
import html
import json
import posixpath
import re
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from itertools import chain
from urllib.parse import quote

import redis
from flask import Blueprint, Response
from pydantic_core import from_json

from rollout import arrays
from rollout.schema import Rollout, RolloutPage
from services.gateway.answers import Answer
from services.gateway.context import gateway
from services.gateway.http import JSON, STRING, OneTenant, Tenant, operation
from services.gateway.page import serving
from services.gateway.problems import ApiProblem
from services.gateway.routes.rollouts import read
from services.state import keys
from services.state.rollouts import payloads

blueprint = Blueprint("export", __name__, url_prefix="/v1")

MOST_ROLLOUTS = 64
MOST_BYTES = 64 << 20
"""Of the answers in a file: browsers open it whole."""
ENTRY = "app.js"
ADDRESS = "page/"
"""How the names of modules begin in the import map, and addresses of files in `index.html`."""
IMPORT = re.compile(r"""(\b(?:from|import)\s*)(["'])(\.{1,2}/[^"'\n]+)\2""")
STYLE = re.compile(rf'<link rel="stylesheet" href="{ADDRESS}([^"]+)">')
SCRIPT = f'<script type="module" src="{ADDRESS}{ENTRY}"></script>'
BEGIN = f'import "{ADDRESS}{ENTRY}";'
TAIL = f'</script>\n<script type="module">{BEGIN}</script>\n</body>\n</html>\n'
NOTHING = "'none'"
SANDBOX = "sandbox allow-scripts allow-downloads; frame-ancestors 'none'"


Body = tuple[str, Iterable[bytes]]
"""Media type and pieces of an answer."""


@blueprint.get("/rollouts/<rollout_id>/page")
@operation(413, answers={200: STRING}, media=serving.HTML)
def rollout_page(rollout_id: str, tenant: Tenant) -> Response:
    """A rollout as one HTML file."""
    return _send("rollout", rollout_id, [rollout_id], tenant, {})


@blueprint.get("/groups/<group_id>/page")
@operation(413, answers={200: STRING}, media=serving.HTML)
def group_page(group_id: str, tenant: OneTenant) -> Response:
    """A group as one HTML file."""
    store = gateway().rollouts
    ids = store.ids(group_id=group_id, tenant=tenant, limit=MOST_ROLLOUTS + 1)
    if len(ids) > MOST_ROLLOUTS:
        raise _too_large(f"group {group_id!r} has more than {MOST_ROLLOUTS} rollouts")
    members = list(store.get_many(ids, trajectory=False, tenant=tenant))
    if not members:
        raise ApiProblem(404, "No such group", f"there is no group {group_id!r} that can be read")
    listed = JSON, [RolloutPage(rollouts=members).model_dump_json().encode()]
    return _send("group", group_id, [item.id for item in members], tenant, {"/v1/rollouts": listed})


def _too_large(what: str) -> ApiProblem:
    detail = f"{what}: save rollouts one by one, or as data with `rollout export ID --format atif`"
    return ApiProblem(413, "Too large for one file", detail)


def _send(noun: str, name: str, ids: list[str], tenant: str | None, bodies: dict[str, Body]) -> Response:
    """The file of some rollouts as an answer, which is made while it is sent."""
    size = 0
    for rollout_id in ids:
        answer = Answer(msgpack=True)
        packed = answer.pack(read(answer, rollout_id, tenant))
        bodies[f"/v1/rollouts/{_quoted(rollout_id)}"] = arrays.MEDIA_TYPE, packed
        size += packed.nbytes
        if size > MOST_BYTES:
            raise _too_large(f"{noun} {name!r} takes more than {MOST_BYTES >> 20} MiB")
    head, policy = _shell(f"{noun} {name}")
    answers = _answers(f"#/{noun}s/{_quoted(name)}", bodies, gateway().redis)
    response = Response(chain([head], answers, [TAIL]), content_type=f"{serving.HTML}; charset=utf-8")
    file = re.sub(r"[^\w.-]", "_", name, flags=re.ASCII)
    response.headers.update(serving.HEADERS)
    response.headers["Content-Disposition"] = f'attachment; filename="{noun}-{file}.html"'
    response.headers["Cache-Control"] = "no-store"
    # Where somebody opens it in place all the same, it is nobody's page: it cannot touch a session.
    response.headers["Content-Security-Policy"] = f"{SANDBOX}; {policy}"
    return response


# -- what the API answers ----------------------------------------------------------------------


def _quoted(text: str) -> str:
    """A part of an address, as the `encodeURIComponent` of browsers has it."""
    return quote(text, safe="!~*'()")


def _answers(view: str, bodies: Mapping[str, Body], client: redis.Redis) -> Iterator[str]:
    """The object of answers by address, in pieces: one answer is in memory at a time."""
    yield f'{{"#":{json.dumps(view)}'
    used: dict[str, set[int]] = {}
    for path, (kind, pieces) in bodies.items():
        body = b"".join(pieces)
        yield _entry(path, kind, body)
        if kind == arrays.MEDIA_TYPE:
            for tokenizer, ids in _tokens(body):
                used.setdefault((tokenizer or "").rpartition("@")[2], set()).update(ids)
    for digest, ids in used.items():
        if (stored := payloads.get(client, keys.vocabulary(digest))) is not None:
            every = from_json(gzip.decompress(stored))["texts"]
            # A vocabulary has a hundred thousand of them, and more.
            texts = {token: every[token] for token in sorted(ids) if token < len(every)}
            yield _entry(f"/v1/tokenizers/{_quoted(digest)}", JSON, json.dumps({"texts": texts}).encode())
    yield "}"


def _entry(path: str, kind: str, body: bytes) -> str:
    return f',{json.dumps(path)}:{{"type":"{kind}","body":"{b64encode(body).decode()}"}}'


def _tokens(body: bytes) -> Iterator[tuple[str | None, list[int]]]:
    """The token ids in an answer, and the name of their tokenizer."""
    document, records = arrays.unpack_answer(body)
    for record in records.values():
        pairs = zip(record.tokenizers(), record.chains, strict=True)
        yield from ((name, arrays.unpack_ids(part.ids)) for name, part in pairs)
    if not records and (trajectory := Rollout.model_validate_json(document).trajectory) is not None:
        yield from ((part.tokenizer or trajectory.tokenizer, part.token_ids) for part in trajectory.chains)


# -- the page ----------------------------------------------------------------------------------


def modules() -> dict[str, str]:
    """The modules of the page by path: the entry and what it needs, with each import as `page/<path>`."""
    made: dict[str, str] = {}
    wanted = [ENTRY]
    while wanted:
        path = wanted.pop()
        if path in made:
            continue
        folder = posixpath.dirname(path)

        def name(match: re.Match[str], folder: str = folder) -> str:
            target = posixpath.normpath(posixpath.join(folder, match[3]))
            wanted.append(target)
            return f"{match[1]}{match[2]}{ADDRESS}{target}{match[2]}"

        made[path] = IMPORT.sub(name, _text(path))
    return made


def _text(path: str) -> str:
    return (serving.STATIC / path).read_text()


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def _shell(title: str) -> tuple[str, str]:
    """All of the file before the answers, and its policy."""
    addresses = {
        ADDRESS + path: f"data:text/javascript;base64,{b64encode(code.encode()).decode()}"
        for path, code in modules().items()
    }
    names = json.dumps({"imports": addresses})
    page, _, _ = _text(serving.INDEX).partition("</body>")
    styles = [_text(path) for path in STYLE.findall(page)]
    policy = (
        f"default-src 'none'; script-src {_hash(names)} {_hash(BEGIN)} data:; img-src data:; "
        f"style-src {' '.join(map(_hash, styles)) or NOTHING}; base-uri 'none'; form-action 'none'"
    )
    page = STYLE.sub(lambda match: f"<style>{_text(match[1])}</style>", page)
    page = page.replace(SCRIPT, f'<script type="importmap">{names}</script>')
    page = re.sub("<title>.*?</title>", lambda _: f"<title>{html.escape(title)}</title>", page)
    meta = f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{policy}">'
    page = page.replace('<meta charset="utf-8">', meta, 1)
    return f'{page}<script type="application/json" id="embedded">', policy
