"""Every Redis key of the service. Scripts have them from here, as `KEY.DUE` and `KEY.record(id)`.

A rollout's own keys carry its id as the hash tag, so that they stay together on any layout.
"""

from __future__ import annotations

import re

from rollout.schema.base import DEFAULT_POLICY


class Key:
    """A key with places to be filled in, each named between `<` and `>`: `record("r1")`."""

    def __init__(self, form: str) -> None:
        self.names = re.findall(r"<(\w+)>", form)
        """Those of the places, in order."""
        self._form = re.sub(r"<\w+>", "%s", form)

    def __call__(self, *parts: str | int) -> str:
        return self._form % parts


def of(policy: str) -> str:
    """What names a policy in keys: nothing for `default`, whose keys are older than names."""
    return "" if policy == DEFAULT_POLICY else f"/{policy}"


record = Key("rollout:{<rollout_id>}")
"""Hash: the record of a rollout."""
timeline = Key("rollout:{<rollout_id>}:timeline")
"""List: its changes of state, oldest first."""
trajectory = Key("rollout:{<rollout_id>}:trajectory")
"""String: its trajectory, in the form that `payloads.py` says."""
turns = Key("rollout:{<rollout_id>}:turns:<attempt>")
"""List: the turn log of an attempt in RUN, in the form that `turns/entries.py` says. At RUN's end the
trajectory takes its place; else it expires some time after the rollout's deadline."""
checkpoints = Key("rollout:{<rollout_id>}:checkpoints")
"""Hash: turn → what forks from there need (JSON, `services/state/checkpoints.py`). It expires with the
record, and so do the turn logs of a rollout that has one."""
capture = Key("rollout:{<rollout_id>}:capture:<attempt>")
"""Hash: the session of an attempt that a program drives: what it may, counts, who answers which call now, the
reward. It and the next two end as the turn log does."""
capture_calls = Key("rollout:{<rollout_id>}:capture:<attempt>:calls")
"""Hash: `call:<id>` → how far it is (see `capture.lua`); `body:<digest>` → the latest call with that body."""
capture_nodes = Key("rollout:{<rollout_id>}:capture:<attempt>:nodes")
"""List: the calls that were answered, in the form that `capture/nodes.py` says."""
capture_alive = Key("capture:alive:<process>")
"""String: a process that answers model calls lives; expires with it."""
CAPTURE_SECRET = "capture:secret"
"""String: what the keys of attempts are made of. Without it none of them holds any more."""
request = Key("request:{<tenant>/<digest>}")
"""Hash: a request of the tenant by the digest of its body: the `body` (JSON), kept once for all rollouts
that were submitted with it, and how many of them are `live`."""
requests_of = Key("requests:tenant:<tenant>")
"""Sorted set: `<digest> <bytes>` of the tenant's requests, by when they expire (ms; `inf` while in
use)."""
group = Key("group:{<tenant>/<group_id>}")
"""Set: ids of the group's rollouts. Each tenant has its own groups and tags."""
by_state = Key("rollouts:state:<state>")
"""Sorted set: ids in that state by time of creation (ms)."""
by_tag = Key("rollouts:tag:<tenant>:<tag>")
"""Sorted set: ids of the tenant with that tag by time of creation (ms)."""
by_tenant = Key("rollouts:tenant:<tenant>")
"""Sorted set: ids of the tenant by time of creation (ms)."""
STAMP = "stamp"
"""String: the highest stamp of any process that has used this Redis; see `services/version.py`."""
CREATED = "rollouts:created"
"""Sorted set: every id by time of creation (ms)."""
DUE = "rollouts:due"
"""Sorted set: when somebody must look at a rollout (ms)."""
SUSPECTS = "rollouts:suspects"
"""Hash: worker → the rollout that it carries alone among those that saw several workers end."""
unproven = Key("rollouts:unproven:<worker>")
"""Set: rollouts that a worker claimed which had seen another worker end since their last turn."""
JUMP = "rollouts:jump"
"""Hash: the last jump of Redis' clock by which times were moved (token, ms, since when submissions are
right already, whether it is done), and the ms of all of them."""
HISTOGRAMS = "rollouts:histograms"
"""Hash: `<name>:<bucket>` → times that ended in that bucket, `<name>:sum` → their sum (ms); rewards and turns
by handler in thousandths."""
COUNTS = "rollouts:counts"
"""Hash: number of rollouts in each state; those of terminal states only grow."""
RESULTS = "results"
"""Stream: rollouts that ended, in that order; trimmed by age with their records."""
RESULTS_TRIMMED = "results:trimmed"
"""String: time (ms) of the last result that is forgotten; absent = none is."""
RESULTS_ENDED = "results:ended"
"""Sorted set: ended rollouts whose trajectory is kept, by when their keys expire (ms)."""
RESULTS_ACKED = "results:acked"
"""Sorted set: those of them that were acknowledged, by when (ms)."""
RESULTS_SIZES = "results:sizes"
"""Hash: rollout id → bytes of its trajectory as stored."""
RESULTS_BYTES = "results:bytes"
"""String: the sum of them."""
WEBHOOKS = "webhooks"
"""Hash: rollout id → its webhook on the way (JSON)."""
WEBHOOKS_DUE = "webhooks:due"
"""Sorted set: rollout id by when the next try is due (s)."""
WEBHOOKS_CURSOR = "webhooks:cursor"
"""String: the result up to which webhooks were made."""
WEBHOOKS_FAILED = "webhooks:failed"
"""Stream: webhooks that were given up (trimmed)."""
WEBHOOKS_LOCK = "webhooks:lock"
"""String: the worker that delivers webhooks; expires with it."""
ARCHIVE_CURSOR = "archive:cursor"
"""String: the result up to which the archive has everything; absent = nobody archives."""
ARCHIVE_LOCK = "archive:lock"
"""String: the worker that writes the archive; expires with it."""
RESULTS_TOTALS = "results:totals"
"""Hash: sums for /metrics (acknowledged, dropped, archived, webhook calls)."""
EVENTS = "events"
"""Stream: every change of state (trimmed)."""
WATCH_CHANNEL = "live"
"""Pub/sub: somebody looks at rollouts in RUN; see the next."""
watched = Key("live:watched:<rollout_id>")
"""String: somebody looks at what the rollout's sandbox prints; expires unless it is said again."""
REPORTS_CHANNEL = "reports:new"
"""Pub/sub: `<tenant> <run>` of a trainer's report that came."""
live = Key("live:<rollout_id>")
"""Pub/sub: what the sandbox of a rollout in RUN has printed (JSON), while it is watched."""
CANCEL_CHANNEL = "rollouts:cancel"
"""Pub/sub: ids to cancel now, hundreds in a message. Lossy; the record's flag is what counts."""
TOTALS = "rollouts:totals"
"""Hash: sums for /metrics (attempts, blame, retries, what was lost or dropped)."""
API_KEYS = "api_keys"
"""Hash: key id → what is kept of it (JSON, with the SHA-256 of its secret)."""
session = Key("session:<digest>")
"""String: a session of the web page (JSON), by the SHA-256 of its token; expires with it."""
sessions_of = Key("sessions:<key_id>")
"""List: digests of a key's sessions, the newest first."""
TENANTS = "tenants"
"""Hash: tenant → its limits (JSON). A tenant without an entry has none."""
TENANTS_POLICIES = "tenants:policies"
"""Hash: tenant → the policies that it may name (JSON). Apart from its other limits, because a release that
does not know of them could not read these."""
ACCESS_VERSION = "access:version"
"""String: another one after each change of keys or tenants, so that gateways know when to read them again."""
vocabulary = Key("vocabulary:<digest>")
"""String: texts of a tokenizer's ids (JSON, packed by gzip), written by who loads it."""
reports_of = Key("reports:<tenant>")
"""Sorted set: runs of training that the tenant reports of, by when it did last (ms)."""
reports_bytes = Key("reports:bytes:<tenant>")
"""Hash: run → bytes of its reports."""
reports = Key("reports:run:<tenant>:<run>")
"""Sorted set: reports of a run (JSON) by step."""
bundle = Key("bundle:{<tenant>/<digest>}")
"""List: a bundle of the tenant in pieces. Not used for long it is deleted."""
bundle_part = Key("bundle:part:<token>")
"""List: a bundle that is being written, in pieces; expires soon."""
bundles_of = Key("bundles:tenant:<tenant>")
"""Sorted set: digests of the tenant's bundles by when they were used last (ms)."""
bundles_sizes = Key("bundles:sizes:<tenant>")
"""Hash: digest → bytes of the bundle."""
BUNDLES_BYTES = "bundles:bytes"
"""Hash: tenant → bytes of its bundles."""
BUNDLES_TOTALS = "bundles:totals"
"""Hash: sums for /metrics."""
TENANTS_LIVE = "tenants:live"
"""Hash: tenant → number of its rollouts that have not ended."""
TENANTS_BYTES = "tenants:bytes"
"""Hash: tenant → bytes of its requests that are kept, and of its batches' prompts that wait."""
bucket = Key("tenant:<tenant>:bucket")
"""Hash: what is left of the tenant's submissions a minute."""
FAIR_TENANTS = "fair:tenants"
"""Sorted set: tenant with rollouts that wait for INIT → its virtual time, the least of which is next."""
FAIR_CLOCK = "fair:clock"
"""String: the virtual time of the last claim; where a tenant starts that had nobody waiting."""
FAIR_SERVED = "fair:served"
"""Hash: tenant → the virtual time up to which it has been served."""
FAIR_CLAIMS = "fair:claims"
"""Hash: tenant → its rollouts that INIT has claimed, every attempt counted."""
FAIR_ORDER = "fair:order"
"""String: time of the last submission (ms), with a fraction that keeps those of one millisecond apart."""
fair_waiting = Key("fair:waiting:<tenant>")
"""Sorted set: the tenant's rollouts that wait for INIT, by rank: time of submission (ms) less what their
priority is worth."""
fair_claim = Key("fair:claim:<token>")
"""String: the rollout that a call of `claim_next` took, for its repetition; expires with the lease."""
NO_SANDBOX = "-"
"""Place of rollouts without a sandbox: no node can have that name."""
ahead = Key("ahead:<place>")
"""Set: rollouts from the start of INIT until RUN takes them, by node; under `-` those that are ready
and have no sandbox."""
AUTOSCALE = "autoscale"
"""String: what the autoscaler last saw and decided (JSON with the time)."""
AUTOSCALE_TOTALS = "autoscale:totals"
"""Hash: sums for /metrics (slots and nodes given and taken, failures)."""
AUTOSCALE_LOCK = "autoscale:lock"
"""String: the autoscaler that acts; expires with it."""
LEFTOVERS_LOCK = "leftovers:lock"
"""String: the worker that removes packed files that no rollout goes on with; expires with it."""
REAPER_LOCK = "reaper:lock"
"""String: the worker that looks for overdue rollouts; expires with it."""
NODES = "nodes"
"""Hash: node → what its sandbox host last said of itself (JSON with the time)."""
FLEET_SLOTS = "fleet:slots"
"""Hash: worker → its node and how many rollouts it carries at once (JSON with the time)."""
FLEET_ADMISSION = "fleet:admission"
"""Hash: node → whether INIT takes rollouts there, and if not why (JSON with the time)."""
HANDLERS = "handlers"
"""Hash: handler name → what the workers announced of it."""
HANDLERS_REPEATABLE = "handlers:repeatable"
"""Hash: handler name → the stages that another worker may take up. Apart from their descriptions, of which a
worker of a release that knows no such stages would write its own."""
FILTERS = "filters"
"""Set: names of the filters of batches that workers announced."""
BACKENDS = "backends"
"""Hash: backend id → its description (JSON)."""
backends_load = Key("backends<of>:load")
"""Sorted set, the min-heap of a policy: backend id by what all rollouts on it reserve. Those of a policy NAME
other than `default` have `backends/NAME` before the colon, here and below."""
backends_chosen = Key("backends<of>:chosen")
"""Sorted set: backend id by when the policy chose it last, to break ties."""
backends_turn = Key("backends<of>:turn")
"""String: the counter by which that is told."""
backends_version = Key("backends<of>:version")
"""String: the version that a backend must have to take new rollouts of the policy; absent = any."""
backends_reserved = Key("backends<of>:reserved")
"""Hash: tenant → what its rollouts reserve of the policy now."""
backends_line = Key("backends<of>:line")
"""String: there while rollouts wait for room: `-`, or `<backend> <rollout>` where one is kept for one."""
backends_grants = Key("backends<of>:grants")
"""Hash: what all its backends hold, tokens granted there by other policies, and how far service of those who
wait had come when."""
backends_tenants = Key("backends<of>:tenants")
"""Sorted set: tenant with rollouts that wait for room → its service since it waits (tokens × s / weight)."""
backends_waiting = Key("backends<of>:waiting:<tenant>")
"""Sorted set: rollouts of the tenant that wait for room, by rank: since when (ms) less what their priority is
worth."""
backends_sizes = Key("backends<of>:sizes")
"""Sorted set: rollouts that wait for room by what they ask for."""
BACKEND_ASKS = "backends:asks"
"""Hash: rollout that waits for room → `<tokens> <JSON>`: what it asks for and since when."""
BACKEND_WAITS = "backends:waits"
"""Hash: `<policy> <tenant>` → ms that its rollouts waited for room, and with ` n` behind it how many did."""
BACKEND_PINS = "backends:pins"
"""Hash: rollout id, `<id>|<slot>` for a further reservation → `<backend> <weight> <label>`. The label is the
group, or `-`; behind it `;<policy>;<tenant>` where one of them is not `default`."""
BACKEND_GROUPS = "backends:groups"
"""Hash: label of a group's pins → `<backend> <live members>`."""
BACKEND_TOTALS = "backends:totals"
"""Hash: sums for /metrics (placements, moves, refusals)."""
BACKEND_SUSPECTS = "backends:suspects"
"""Hash: id of a backend to be probed at once → calls to it that failed since the last probe."""
KEEPER_LOCK = "keeper:lock"
"""String: the worker that probes the backends; expires with it."""
BACKEND_ROOM_CHANNEL = "backends:room"
"""Pub/sub: something is better on a backend; for who found none, and who waits behind one that ended."""
room_of = Key("backends:room:<process>")
"""Pub/sub: ids of rollouts of a worker process that waited and now have room."""
BACKEND_WAITED = "backends:waited"
"""String: one that no backend could take has been refused a moment ago; expires."""
BACKEND_DOWN_CHANNEL = "backends:down"
"""Pub/sub: `<backend>`, or `<backend> <policy>`: it turned out unusable, and calls to it are given up."""
backend = Key("backend:<backend_id>")
"""Hash: what changes about a backend (capacity, version, live rollouts, drain, pause, error, stats), whom it
is kept for (`kept`), its policies; `version/NAME` and `rejected/NAME` of those other than `default`."""
workers = Key("workers:<stage>")
"""Sorted set: worker names of a stage by when they were last heard of (ms)."""
POLICIES = "policies"
"""Set: names of policies that weights were brought to."""
policy_updates = Key("policy<of>:updates")
"""Hash: id → a weight update as asked for, and how far it has come (JSON). Here and below, the keys
of policies other than `default` have their names in them."""
policy_order = Key("policy<of>:order")
"""List: ids of updates, the newest first."""
policy_active = Key("policy<of>:active")
"""String: id of the policy's update that has not ended."""
policy_lease = Key("policy<of>:lease")
"""String: token of the worker that carries it out; expires with the worker."""
policy_current = Key("policy<of>:current")
"""String: the weights that new rollouts run on (JSON)."""
POLICY_BELL = "policy:bell"
"""List: rung for a worker when there is an update of any policy."""
policy_sequence = Key("policy<of>:sequence")
"""Sorted set: version → how many changes of the weights there had been with it; the latest 1,000."""
POLICY_ENDED = "policy:ended"
"""Stream: ids of updates that ended, of all policies."""
policy_totals = Key("policy<of>:totals")
"""Hash: sums for /metrics."""
BATCHES = "batches"
"""Sorted set: batch ids by time of creation (ms)."""
BATCHES_TODO = "batches:todo"
"""Sorted set: what somebody has to do for a batch or a group (`fill B`, `decide G` …), by when (ms)."""
BATCHES_BELL = "batches:bell"
"""Pub/sub: there is something to do. Lossy; workers also look by themselves."""
BATCHES_EVENTS = "batches:events"
"""Stream: batches to which something happened, for those who wait (trimmed)."""
BATCHES_TOTALS = "batches:totals"
"""Hash: sums for /metrics."""
batches_of = Key("batches:tenant:<tenant>")
"""Sorted set: the tenant's batch ids by time of creation (ms)."""
batch = Key("batch:{<batch_id>}")
"""Hash: a batch as asked for, its state and counters."""
batch_prompts = Key("batch:{<batch_id>}:prompts")
"""List: requests (JSON) that have not been started."""
batch_parts = Key("batch:{<batch_id>}:parts")
"""Set: names of the calls that have brought prompts, each of which counts once."""
batch_partial = Key("batch:{<batch_id>}:partial")
"""List: groups of which not all rollouts have been submitted, for want of slots."""
batch_open = Key("batch:{<batch_id>}:open")
"""Set: its groups that are not decided."""
batch_events = Key("batch:{<batch_id>}:events")
"""Stream: its groups in the order in which they were decided, and its end."""
batch_group = Key("batch:group:{<group_id>}")
"""Hash: a group: its batch, state, request, rollouts that ended, reason."""
policy_lock = Key("policy:lock:<backend_id>")
"""String: token of whoever exchanges the weights of a backend."""
job = Key("job:<tenant>:<digest>")
"""Hash: a job of a compatible API, by its caller's id: the rollout, and until when it is that one."""
prorl = Key("prorl:<tenant>")
"""Hash: whether the ProRL API was started or stopped, and how often."""
prorl_jobs = Key("prorl:<tenant>:jobs")
"""Sorted set: rollouts of the ProRL API that may not have ended, by time of submission (s)."""
prorl_servers = Key("prorl:<tenant>:servers")
"""Hash: address of an LLM server added through the ProRL API → its backend (JSON)."""
