// What the service does now: the flow of stages, throughput, backends as a heap, nodes, failures, versions.
import {
  html, useRef, useState, Ago, Answered, Bars, bytes, count, digits, Empty, Head, headings, Link, Loading, Failure, percent, plural, span, StateMark, tally,
  useGet, useLive, words, ENDED_STATES,
} from "../ui.js";

const WINDOW_S = 300;
const LEAST_S = 60; // a page just opened draws what it has over this long
const RATE_S = 20; // rates are of this long: backends are probed every few seconds only
const SAMPLE = 100; // rollouts that failures and versions are counted of
const HEAP_SHOWN = 7; // three levels; a fourth is too narrow to read
const REFRESH_S = 60;
const REAPER_LATE_S = 10;

// What was seen since the page was opened; it outlives a look at another view.
const seen = [];

const endedOf = (event) => ENDED_STATES.reduce((sum, state) => sum + (event.fleet.states[state] ?? 0), 0);

function remember(event) {
  const ended = endedOf(event);
  const tokens = event.backends.reduce((sum, backend) => sum + (backend.stats?.generation_tokens ?? 0), 0);
  if (seen.length && event.at <= seen[seen.length - 1].at) return;
  seen.push({ at: event.at, ended, tokens, stages: event.fleet.stages });
  while (seen[0].at < event.at - WINDOW_S - RATE_S) seen.shift();
}

/** Increments a second of a counter, `[{at, value}]`, each over the last seconds before it. */
function rates(pick) {
  const points = [];
  let from = 0;
  for (let i = 1; i < seen.length; i++) {
    while (seen[from].at < seen[i].at - RATE_S) from++;
    const begin = Math.min(from, i - 1);
    const gain = pick(seen[i]) - pick(seen[begin]);
    points.push({ at: seen[i].at, value: Math.max(0, gain) / (seen[i].at - seen[begin].at) }); // a restart sets counters to 0
  }
  return points;
}

function Spark({ points, label }) {
  if (points.length < 2) return html`<svg class="spark" viewBox="0 0 100 30" preserveAspectRatio="none" aria-hidden="true"></svg>`;
  const last = points[points.length - 1].at;
  const long = Math.min(WINDOW_S, Math.max(LEAST_S, last - points[0].at));
  const top = Math.max(...points.map((p) => p.value), 1e-9);
  const at = (p) => `${(100 - ((last - p.at) / long) * 100).toFixed(2)} ${(28 - (p.value / top) * 25).toFixed(2)}`;
  const line = points.filter((p) => p.at >= last - long).map(at).join("L");
  return html`<svg class="spark" viewBox="0 0 100 30" preserveAspectRatio="none" role="img" aria-label=${label}>
    <path class="spark-area" d="M${line.split(" ")[0]} 30L${line}L100 30Z" /><path class="spark-line" d="M${line}" /></svg>`;
}

function Tile({ label, value, unit, note, points, link }) {
  return html`<section class="card tile">
    <h2>${link ? html`<${Link} ...${link}>${label}<//>` : label}</h2>
    <p class="figure"><span class="num">${value}</span>${unit && html` <small>${unit}</small>`}</p>
    <p class="quiet small clip">${note}</p>
    ${points && html`<${Spark} points=${points} label="${label} over the last five minutes" />`}
  </section>`;
}

function Tiles({ event }) {
  const ended = rates((one) => one.ended);
  const tokens = rates((one) => one.tokens);
  const live = ["queued", "initializing", "ready", "running", "evaluating"];
  const total = live.reduce((sum, state) => sum + (event.fleet.states[state] ?? 0), 0);
  const oldest = Math.max(0, ...Object.values(event.fleet.oldest_s));
  const now = (points) => (points.length ? points[points.length - 1].value : null);
  return html`<div class="tiles">
    <${Tile} label="Ended" value=${digits(now(ended) === null ? null : now(ended) * 60)} unit="a minute" points=${ended}
      note="${count(seen[seen.length - 1]?.ended)} since Redis was set up" />
    <${Tile} label="Sampled" value=${count(now(tokens))} unit="tokens a second" points=${tokens}
      note=${plural(event.backends.length, "backend")} />
    <${Tile} label="Under way" value=${count(total)} unit="rollouts" link=${{ path: ["rollouts"] }}
      note=${total ? `oldest ${span(oldest)}; ${count(event.tenant?.live)} of ${event.tenant?.name ?? "yours"}` : "the service is idle"} />
    <${Tile} label="Policy" value=${event.policy?.version ?? "none"}
      note=${event.policy ? html`serves since <${Ago} at=${event.policy.since} />` : "any weights take rollouts"} />
  </div>`;
}

// ---------------------------------------------------------------- the flow

const STAGES = [
  { stage: "init", title: "INIT", what: "starts a sandbox", waits: "queued", word: "queued" },
  { stage: "run", title: "RUN", what: "the agent at work", waits: "ready", word: "ready" },
  { stage: "eval", title: "EVAL", what: "scores it", waits: "evaluating", word: "waiting" },
];
const SQUARES = 96; // more slots than these are drawn as one bar

function Slots({ busy, slots }) {
  if (slots > SQUARES) return html`<span class="bar"><i style=${{ width: `${(100 * busy) / slots}%` }}></i></span>`;
  return html`<span class="squares" aria-hidden="true">
    ${Array.from({ length: slots }, (_, i) => html`<i key=${i} class=${i < busy ? "on" : ""}></i>`)}</span>`;
}

function stageRate(stage) {
  const recent = seen.slice(-60);
  if (recent.length < 2) return {};
  const [a, b] = [recent[0], recent[recent.length - 1]];
  const ended = b.stages[stage].ended - a.stages[stage].ended;
  const seconds = b.stages[stage].seconds - a.stages[stage].seconds;
  return { perMinute: (60 * ended) / (b.at - a.at), mean: ended > 0 ? seconds / ended : null };
}

function StageBox({ title, what, stage, waits, word, load, depth }) {
  const { perMinute, mean } = stageRate(stage);
  const none = !load.workers;
  return html`<li class="stage-step">
    <div class="arrow">
      <${Link} path=${["rollouts"]} query=${{ state: waits }} class="waiting ${load.waiting ? "some" : ""}"
        title="${depth} messages in its queues"><b class="num">${count(load.waiting)}</b> ${word}<//>
      <svg viewBox="0 0 40 10" width="40" height="10" aria-hidden="true"><path d="M0 5h36m-5-4 5 4-5 4" /></svg>
    </div>
    <section class="stage ${none ? "stage-none" : ""}">
      <h3>${title} <span class="quiet">${what}</span></h3>
      <p class="figure"><span class="num">${count(load.busy)}</span> <small>of ${count(load.slots)} slots busy</small></p>
      <${Slots} busy=${load.busy} slots=${load.slots} />
      ${none
        ? html`<p class="wrong">No live worker. <code>rollout up</code></p>`
        : html`<p class="quiet small work"><span>${plural(load.workers, "worker")}</span><span>${digits(perMinute ?? null)}/min</span>
            ${mean && html`<span>${span(mean)} each</span>`}</p>`}
    </section>
  </li>`;
}

function Flow({ event }) {
  const depths = (stage) => Object.entries(event.queues ?? {})
    .reduce((sum, [name, depth]) => (name === stage || name.startsWith(`${stage}.`) ? sum + depth : sum), 0);
  const { states, stages } = event.fleet;
  return html`<section class="card" aria-labelledby="flow">
    <header><h2 id="flow">Flow</h2>
      ${event.fleet.leases_lost > 0 && html`<span class="quiet small">${count(event.fleet.leases_lost)} leases lost so far</span>`}
      ${event.fleet.reaper_lag_s > REAPER_LATE_S && html`<span class="wrong small">
        what is overdue is ${span(event.fleet.reaper_lag_s)} late: does any worker reap?</span>`}
    </header>
    <ol class="flow">
      ${STAGES.map((one) => html`<${StageBox} key=${one.stage} ...${one} load=${stages[one.stage]} depth=${depths(one.stage)} />`)}
      <li class="stage-step">
        <div class="arrow"><svg viewBox="0 0 40 10" width="40" height="10" aria-hidden="true"><path d="M0 5h36m-5-4 5 4-5 4" /></svg></div>
        <section class="stage outcome"><h3>Ended</h3>
          <ul>${ENDED_STATES.map((state) => html`<li key=${state}>
            <${Link} path=${["rollouts"]} query=${{ state }}><${StateMark} state=${state} /><//>
            <span class="num">${count(states[state])}</span></li>`)}</ul>
        </section>
      </li>
    </ol>
  </section>`;
}

// ---------------------------------------------------------------- backends

const usable = (backend) => backend.healthy && backend.reachable !== false && !backend.draining && !backend.paused;
const healthOf = (backend) =>
  !backend.healthy || backend.reachable === false ? "unhealthy" : backend.draining ? "draining" : backend.paused ? "paused" : "healthy";

function Backend({ backend, next, current }) {
  const { stats = {}, capacity_tokens: capacity } = backend;
  const share = capacity ? backend.load / capacity : 0;
  const behind = current && backend.policy_version && backend.policy_version !== current;
  return html`<article class="backend ${next ? "backend-next" : ""}" title=${backend.url}>
    <h3><span class="clip">${backend.id}</span>${next && html`<span class="badge">next</span>`}</h3>
    <div class="row spread"><${StateMark} state=${healthOf(backend)} />
      <span class=${behind ? "behind" : "quiet"} title=${behind ? "not the current policy" : "policy version"}>
        ${behind ? "⚠ " : ""}${backend.policy_version ?? "no version"}</span></div>
    <span class="bar ${share > 0.9 ? "warn" : ""}"><i style=${{ width: `${Math.min(100, share * 100)}%` }}></i></span>
    <p class="small"><span class="num">${count(backend.load)}</span><span class="quiet"> of ${count(capacity)} tokens · ${percent(share)}</span></p>
    <p class="small quiet">${count(backend.live_rollouts)} rollouts · ${count(stats?.running)} running · cache <b class="num">${
      stats?.cached_ratio === null || stats?.cached_ratio === undefined ? "–" : percent(stats.cached_ratio)}</b></p>
    ${backend.error && html`<p class="wrong small said">${backend.error}</p>`}
  </article>`;
}

/** A sorted list is a heap: the children of place i are 2i + 1 and 2i + 2, and the root is taken next. */
function Backends({ backends, current }) {
  if (!backends.length) {
    return html`<section class="card"><${Empty} title="No LLM backend" command="rollout backends add http://HOST:8000">
      Rollouts wait in RUN until one is registered.<//></section>`;
  }
  const able = backends.filter(usable);
  const heap = able.slice(0, HEAP_SHOWN);
  const levels = heap.length > 3 ? [heap.slice(0, 1), heap.slice(1, 3), heap.slice(3)] : heap.length > 1 ? [heap.slice(0, 1), heap.slice(1)] : [heap];
  const rest = [...able.slice(HEAP_SHOWN), ...backends.filter((backend) => !usable(backend))];
  return html`<section class="card" aria-labelledby="backends">
    <header><h2 id="backends">Backends</h2>
      ${backends.length > 1 && html`<span class="quiet small">least loaded first: the root takes the next rollout</span>`}</header>
    ${!able.length && html`<p class="wrong">None can be used now: rollouts wait in RUN.</p>`}
    ${levels.map((level, depth) => html`
      ${depth > 0 && html`<svg class="branches" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">
        ${level.map((_, i) => {
          const x = (place, width) => (100 * (place + 0.5)) / width;
          const [from, to] = [x(Math.floor(i / 2), 2 ** (depth - 1)), x(i, 2 ** depth)];
          return html`<path key=${i} d="M${from} 0C${from} 7 ${to} 3 ${to} 10" />`;
        })}</svg>`}
      <div class="heap heap-${depth}" key=${depth}>
        ${level.map((backend) => html`<${Backend} key=${backend.id} backend=${backend} next=${backend === heap[0]} current=${current} />`)}
      </div>`)}
    ${rest.length > 0 && html`<h3 class="out">${able.length > HEAP_SHOWN ? "Behind them, and out of the heap" : "Out of the heap"}</h3>
      <div class="heap-rest">${rest.map((backend) => html`<${Backend} key=${backend.id} backend=${backend} current=${current} />`)}</div>`}
  </section>`;
}

// ---------------------------------------------------------------- nodes, failures, versions

function Nodes({ fleet }) {
  if (!fleet.nodes.length) return html`<section class="card"><${Empty} title="No node has workers" command="rollout up" /></section>`;
  return html`<section class="card flush" aria-labelledby="nodes">
    <header><h2 id="nodes">Nodes and sandboxes</h2>
      <span class="quiet small">${plural(fleet.nodes.length, "node")}, ${plural(fleet.workers.length, "worker")}</span></header>
    <div class="scroll"><table class="list">
      ${headings("Node", ["Stages", "wide"], ["Busy", "right"], ["Sandboxes", "right"], ["Warm", "right wide"],
        ["Memory free", "right wide"], ["Disk free", "right wide"], "Takes work")}
      <tbody>${fleet.nodes.map((node) => html`<tr key=${node.node}>
        <td><b>${node.node}</b></td><td class="wide quiet">${node.stages.join(", ")}</td>
        <td class="right num">${node.busy}<span class="quiet"> / ${node.slots}</span></td>
        <td class="right num">${count(node.sandboxes)}</td><td class="right num wide">${count(node.warm)}</td>
        <td class="right num wide">${bytes(node.free_memory)}</td><td class="right num wide">${bytes(node.free_disk)}</td>
        <td>${node.stopped.length
          ? html`<${StateMark} state="paused" /> <span class="small">${node.stopped.join(" ")}</span>`
          : node.waits_for_run ? html`<span class="quiet">ahead of RUN, waits</span>` : html`<${StateMark} state="healthy" />`}</td>
      </tr>`)}</tbody>
    </table></div>
  </section>`;
}

function Failures({ version }) {
  const answer = useGet("/v1/rollouts", { drop: true, limit: SAMPLE }, version);
  return html`<section class="card" aria-labelledby="failures"><header><h2 id="failures">Failures by blame</h2>
      <span class="quiet small">${answer.data && `of the latest ${answer.data.rollouts.length} dropped`}</span></header>
    <${Answered} answer=${answer} what="Counting">${({ rollouts }) => rollouts.length
      ? html`<${Bars} tone="bad" rows=${tally(rollouts.map((r) => r.error?.blame ?? "nobody")).map(([name, value]) =>
          ({ name: words(name), value, link: { path: ["errors"], query: { blame: name } } }))} />`
      : html`<p class="quiet">Nothing was dropped${answer.data.cursor ? " lately" : ""}.</p>`}<//>
  </section>`;
}

function Versions({ current, version }) {
  const answer = useGet("/v1/rollouts", { state: "completed", limit: SAMPLE }, version);
  const policy = useGet("/v1/policy", {}, version);
  const order = [current, ...(policy.data?.history ?? []).filter((u) => u.state === "done" || u.state === "partly").map((u) => u.version)]
    .filter((version, i, all) => version && all.indexOf(version) === i);
  return html`<section class="card" aria-labelledby="versions"><header><h2 id="versions">Versions and staleness</h2>
      <span class="quiet small">${answer.data && `oldest version of the latest ${answer.data.rollouts.length} completed`}</span></header>
    <${Answered} answer=${answer} what="Counting">${({ rollouts }) => rollouts.length
      ? html`<${Bars} rows=${tally(rollouts.map((r) => r.policy_versions[0] ?? "none")).map(([name, value]) => {
          const behind = order.indexOf(name);
          return { name, value, note: behind === 0 ? "current" : behind > 0 ? `${behind} behind` : "", tone: behind > 0 ? "warn" : "",
            link: name === "none" ? undefined : { path: ["rollouts"], query: { policy_version: name } } };
        })} />`
      : html`<p class="quiet">No rollout has completed yet.</p>`}<//>
  </section>`;
}

export function OverviewView() {
  const [event, setEvent] = useState(null);
  const [refused, setRefused] = useState(null);
  const status = useLive({ topics: "overview" }, {
    overview: (data) => {
      remember(data);
      setEvent(data);
    },
    refused: setRefused,
  });
  // The samples are taken anew once more rollouts have ended, and not too often.
  const sampled = useRef({ at: 0, ended: 0 });
  if (event && event.at > sampled.current.at + REFRESH_S && endedOf(event) !== sampled.current.ended) {
    sampled.current = { at: event.at, ended: endedOf(event) };
  }
  // One alone is no heap: it stands in the line below.
  const backends = event && html`<${Backends} backends=${event.backends} current=${event.policy?.version} />`;
  return html`
    <${Head} title="Overview" status=${status} />
    ${!event && (refused
      ? html`<${Failure} error=${refused} />`
      : html`<${Loading} what="Waiting for the service" />`)}
    ${event && html`
      <${Tiles} event=${event} />
      <${Flow} event=${event} />
      ${event.backends.length > 1 && backends}
      <div class="columns">${event.backends.length < 2 && backends}<${Failures} version=${sampled.current.at} />
        <${Versions} version=${sampled.current.at} current=${event.policy?.version} /></div>
      <${Nodes} fleet=${event.fleet} />`}`;
}
