// The list of rollouts: filters in the address, pages by cursor, states that move by themselves.
import {
  html, useState, useEffect, useMemo, useRef, Ago, Copy, count, Duration, Empty, Failure, Head, headings, Icon, LIVE_STATES, Link,
  Loading, plural, Reward, shortId, STATES, StateMark, useGet, useLive, useRowKeys, words,
} from "../ui.js";
import { get, hashOf, idsOf } from "../api.js";
import { useListing } from "./listing.js";

const PAGE = 50;
const SCANS = 4; // answers that a page asks for by itself when few rollouts fit the filters
const FIRST_ROLLOUTS = `echo '{"question": "37 times 85", "answer": "3145"}' | rollout submit - --handler calculator --n 4`;
const NEWER_MS = 10000;
const BLAMES = ["task", "handler", "agent", "model", "sandbox", "infrastructure", "timeout"];
const FILTERS = ["state", "handler", "group_id", "tag", "policy_version", "blame", "drop", "reward_min", "reward_max"];
const INDEXED = ["state", "group_id", "tag"]; // the others are looked for record by record

const filtersOf = (query) => Object.fromEntries(FILTERS.filter((name) => query[name]).map((name) => [name, query[name]]));

function go(query) {
  location.hash = hashOf(["rollouts"], query);
}

function Filters({ filters }) {
  const handlers = useGet("/v1/handlers");
  const [open, setOpen] = useState(false); // on a phone they take half of the screen
  const others = Object.keys(filters).filter((name) => name !== "state").length;
  const set = (name) => (event) => go({ ...filters, [name]: event.target.value.trim() });
  const names = (handlers.data?.handlers ?? []).map((handler) => handler.name);
  if (filters.handler && !names.includes(filters.handler)) names.push(filters.handler);
  const select = (name, label, values, shown = words) => html`<select aria-label=${label} value=${filters[name] ?? ""} onChange=${set(name)}>
    <option value="">${label}</option>${values.map((value) => html`<option key=${value} value=${value}>${shown(value)}</option>`)}</select>`;
  const input = (name, label, props = {}) =>
    html`<input type="text" aria-label=${label} placeholder=${label} value=${filters[name] ?? ""} onChange=${set(name)}
      spellcheck="false" ...${props} />`;
  const number = { type: "number", step: "any", class: "short" };
  return html`<div class="stack" role="group" aria-label="Filters">
    <div class="chips">
      <button type="button" class="chip" aria-pressed=${String(!filters.state)} onClick=${() => go({ ...filters, state: "" })}>All states</button>
      ${STATES.map((state) => html`<button type="button" class="chip" key=${state} aria-pressed=${String(filters.state === state)}
        onClick=${() => go({ ...filters, state: filters.state === state ? "" : state })}><${StateMark} state=${state} /></button>`)}
    </div>
    <button type="button" class="button only-phone" aria-expanded=${String(open)} onClick=${() => setOpen(!open)}>
      ${open ? "Hide filters" : `Filters${others ? ` (${others})` : ""}`}</button>
    <div class="filters ${open ? "" : "folded"}">
      ${select("handler", "Handler", names, String)}
      ${input("tag", "Tag")}
      ${input("group_id", "Group")}
      ${input("policy_version", "Version")}
      ${select("blame", "Blame", BLAMES)}
      ${select("drop", "Dropped?", ["true", "false"], (value) => (value === "true" ? "dropped" : "not dropped"))}
      ${input("reward_min", "Reward ≥", number)}
      ${input("reward_max", "Reward ≤", number)}
      ${Object.keys(filters).length > 0 && html`<button type="button" class="button" onClick=${() => go({})}><${Icon} name="close" />Clear</button>`}
    </div>
  </div>`;
}

/** What the task asks, as far as one line shows it: its first text. */
function asked(task) {
  for (const name of ["question", "prompt", "problem", "instruction", "instance_id"]) {
    if (typeof task[name] === "string") return task[name];
  }
  return Object.values(task).find((value) => typeof value === "string") ?? JSON.stringify(task);
}

const MOST_ASKED = 200; // characters; a task may be a megabyte

/** `first`: of siblings that follow each other; it alone names their group. */
function Row({ rollout: r, first, everybody }) {
  const live = LIVE_STATES.includes(r.state);
  const tokens = r.metrics.sampled_tokens;
  return html`<tr>
    <td class="id"><${StateMark} state=${r.state} />${r.attempt > 1 && html` <span class="tag" title="attempt ${r.attempt}">
      <span aria-hidden="true">↻</span><span class="unseen">attempt</span> ${r.attempt}</span>`}</td>
    <td class="id"><${Link} path=${["rollouts", r.id]} class="whole mono" data-row=${r.id} title=${r.id}>${shortId(r.id)}<//>
      <span class="above"><${Copy} text=${r.id} label="Copy the id" /></span></td>
    <td class="widest">${first && r.group_id !== r.id && html`<${Link} path=${["groups", r.group_id]} class="above small">siblings<//>`}</td>
    <td class="wide">${r.handler}${everybody && html` <span class="tag" title="tenant">${r.tenant}</span>`}</td>
    <td class="wider quiet fill-width"><span class="clip">${asked(r.request.task).slice(0, MOST_ASKED)}</span></td>
    <td class="right"><${Reward} value=${r.reward} drop=${r.drop} /></td>
    <td class="wide"><span class="clip quiet">${r.error ? `${r.error.blame}: ${r.error.type}` : words(r.finish_reason ?? "")}</span></td>
    <td class="right num wide">${count(r.metrics.turns)}</td>
    <td class="right num wide">${count(tokens)}</td>
    <td class="widest"><span class="clip mono">${r.policy_versions.join(", ") || "–"}</span></td>
    <td class="right wide"><${Duration} from=${r.created_at} to=${live ? null : r.finished_at ?? r.updated_at} /></td>
    <td class="right quiet"><${Ago} at=${r.created_at} /></td>
  </tr>`;
}

/** True once there is a rollout newer than the first of the page; only where asking that is one look-up. */
function useNewer(filters, cursor, first) {
  const [newer, setNewer] = useState(false);
  const cheap = !cursor && Object.keys(filters).every((name) => INDEXED.includes(name));
  useEffect(() => {
    setNewer(false);
    if (!cheap) return undefined;
    const timer = setInterval(() => {
      if (document.hidden) return;
      get("/v1/rollouts", { ...filters, limit: 1 }).then(
        ({ rollouts: [newest] }) => setNewer(newest !== undefined && newest.id !== first), () => {},
      );
    }, NEWER_MS);
    return () => clearInterval(timer);
  }, [cheap, JSON.stringify(filters), first]);
  return newer;
}

export function RolloutsView({ query }) {
  const filters = filtersOf(query);
  const cursor = query.cursor ?? null;
  const page = useListing(filters, { cursor, limit: PAGE, most: PAGE, scans: SCANS });
  const table = useRef();
  useRowKeys(table);
  const live = useMemo(() => page.rows.filter((r) => LIVE_STATES.includes(r.state)).map((r) => r.id), [page.key, page.rows.length]);
  const status = useLive(live.length ? { ids: idsOf(live) } : null, {
    states: (states) => {
      page.update((r) => (states[r.id] ? { ...r, ...states[r.id] } : r));
      // What an ended one came to is more than its state.
      Object.entries(states).filter(([, now]) => now && !LIVE_STATES.includes(now.state)).forEach(([id]) =>
        get(`/v1/rollouts/${encodeURIComponent(id)}`, { include: "summary" }).then((full) => page.update((r) => (r.id === id ? full : r)), () => {}));
    },
  });
  const newer = useNewer(filters, cursor, page.rows[0]?.id);
  const filtered = Object.keys(filters).length > 0;
  const short = !page.loading && page.next !== null && page.rows.length < PAGE;
  return html`
    <${Head} title="Rollouts" status=${live.length ? status : undefined}>
      ${newer && html`<button type="button" class="button primary" onClick=${page.again}>Show newer</button>`}
      <button type="button" class="button" onClick=${page.again}><${Icon} name="reload" />Reload</button>
    <//>
    <${Filters} filters=${filters} />
    ${page.error && html`<${Failure} error=${page.error} retry=${page.again} />`}
    ${page.rows.length > 0 && html`<section class="card flush" aria-label="Rollouts" aria-busy=${String(page.loading)}>
      <table class="list" ref=${table}>
        ${headings("State", "Rollout", ["Group", "widest"], ["Handler", "wide"], ["Task", "wider fill-width"], ["Reward", "right"],
          ["End", "wide"], ["Turns", "right wide"], ["Sampled", "right wide"], ["Version", "widest"], ["Took", "right wide"],
          ["Created", "right"])}
        <tbody>${page.rows.map((r, i) => html`<${Row} key=${r.id} rollout=${r} everybody=${query.tenant === "*"}
          first=${page.rows[i - 1]?.group_id !== r.group_id} />`)}</tbody>
      </table>
      <div class="list-foot">
        <span role="status">${short
          ? `${count(page.rows.length)} of ${count(page.looked)} looked at fit.`
          : `${plural(page.rows.length, "rollout")}${cursor ? `, after the newest ${count(Number(cursor))}` : ""}`}</span>
        <span class="row">
          ${cursor && html`<button type="button" class="button" onClick=${() => history.back()}>Previous</button>
            <${Link} path=${["rollouts"]} query=${filters} class="button">Newest<//>`}
          ${short && html`<button type="button" class="button" onClick=${page.more}>Go on looking</button>`}
          ${page.next !== null && page.rows.length >= PAGE && html`<${Link} path=${["rollouts"]}
            query=${{ ...filters, cursor: page.next }} class="button">Next ${PAGE}<//>`}
        </span>
      </div>
    </section>`}
    ${page.rows.length === 0 && page.loading && html`<${Loading} what=${page.looked ? `Looking, ${count(page.looked)} so far` : "Loading"} />`}
    ${page.rows.length === 0 && !page.loading && !page.error && html`<section class="card">
      ${short
        ? html`<${Empty} title="None of the ${count(page.looked)} looked at fits">
            There are more. <button type="button" class="button" onClick=${page.more}>Go on looking</button><//>`
        : filtered
          ? html`<${Empty} title="No rollout fits these filters">Leave one out, or <${Link} path=${["rollouts"]}>see all<//>.<//>`
          : html`<${Empty} title="No rollouts yet" command=${FIRST_ROLLOUTS}>
              Submit some from Python with <code>client.run([...])</code>, or here:<//>`}
    </section>`}`;
}
