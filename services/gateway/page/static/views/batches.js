// Batches of dynamic sampling: the list, and one as the funnel that it is.
import {
  html, useState, useEffect, useRef, Ago, Answered, Bars, Copy, count, digits, Duration, Empty, Head, headings, Link, plural, shortId,
  StateMark, Stat, useGet, useLive, useRowKeys, useSoon, words,
} from "../ui.js";
import { get } from "../api.js";

const PAGE = 20; // groups; each brings the summaries of its rollouts
const CELLS = 16; // rewards of a group that are drawn one by one

const decided = (b) => b.kept + b.filtered + b.failed + b.cancelled;
const stateOf = (b) => (b.paused && b.state === "running" ? "paused" : b.state);

/** Kept of wanted, as a bar with the numbers beside it. */
const Kept = ({ batch: b }) => html`<span class="kept">
  <span class="bar ok"><i style=${{ width: `${Math.min(100, (100 * b.kept) / b.wanted)}%` }}></i></span>
  <span class="num">${count(b.kept)}<span class="quiet"> of ${count(b.wanted)}</span></span></span>`;

export function BatchesView() {
  const answer = useGet("/v1/batches", { limit: 100 });
  const [fresh, setFresh] = useState(new Map()); // what has changed since, by id
  const table = useRef();
  useRowKeys(table);
  const known = answer.data?.batches ?? [];
  const changed = useRef(new Set());
  const look = useSoon(() => {
    const ids = [...changed.current];
    changed.current.clear();
    if (ids.some((id) => !known.some((b) => b.id === id))) answer.reload();
    ids.forEach((id) => get(`/v1/batches/${encodeURIComponent(id)}`).then((b) => setFresh((old) => new Map(old).set(id, b)), () => {}));
  });
  const status = useLive({ topics: "batches" }, {
    changed: ({ what, id }) => {
      if (what !== "batch") return;
      changed.current.add(id);
      look();
    },
  });
  return html`<${Head} title="Batches" status=${status} />
    <${Answered} answer=${answer} what="Loading batches">${({ batches }) => batches.length
      ? html`<section class="card flush" aria-label="Batches"><table class="list" ref=${table}>
          ${headings("State", "Batch", "Kept", ["Not kept", "right wide"], ["Why", "wider"], ["Under way", "right wide"],
            ["Carried in, out", "right wider"], ["Took", "right wide"], ["Created", "right narrow"])}
          <tbody>${batches.map((old) => fresh.get(old.id) ?? old).map((b) => html`<tr key=${b.id}>
            <td><${StateMark} state=${stateOf(b)} /></td>
            <td class="id"><${Link} path=${["batches", b.id]} class="whole mono" data-row=${b.id} title=${b.id}>${shortId(b.id)}<//>
              <span class="above"><${Copy} text=${b.id} label="Copy the id" /></span></td>
            <td><${Kept} batch=${b} /></td>
            <td class="right num wide">${count(decided(b) - b.kept)}</td>
            <td class="wider quiet"><span class="clip">${
              Object.entries(b.reasons).map(([reason, n]) => `${words(reason)} ${n}`).join(", ")}</span></td>
            <td class="right num wide">${count(b.open)} <span class="quiet">groups, ${count(b.in_flight)} rollouts</span></td>
            <td class="right num wider">${count(b.carried_in)}, ${count(b.carried_out)}</td>
            <td class="right wide"><${Duration} from=${b.created_at} to=${b.finished_at} /></td>
            <td class="right quiet narrow"><${Ago} at=${b.created_at} /></td></tr>`)}</tbody></table></section>`
      : html`<section class="card"><${Empty} title="No batches yet">
          A batch samples groups of rollouts until enough informative ones are kept. Start one with
          <code>client.batch(BatchRequest(prompts=prompts, n=8, groups=32))</code>.<//></section>`}<//>`;
}

// ---------------------------------------------------------------- one batch

const Loss = ({ state, n, children }) => n > 0 && html`<li><${StateMark} state=${state} bare /><b class="num">${count(n)}</b> ${children}</li>`;

function Funnel({ batch: b }) {
  const begun = b.started + b.carried_in;
  const steps = [
    { name: "Prompts", n: begun + b.waiting_prompts, losses: html`
      <${Loss} state="queued" n=${b.waiting_prompts}>${b.state === "running" ? "wait for a slot" : "left unused"}<//>` },
    { name: "Started", n: begun, note: b.carried_in ? `${count(b.carried_in)} of them carried in` : null, losses: html`
      <${Loss} state="running" n=${b.open}>${b.state === "running" ? "under way" : "to be carried on"}<//>
      <${Loss} state="ready" n=${b.carried_out}>carried out to another batch<//>` },
    { name: "Decided", n: decided(b), losses: html`
      <${Loss} state="filtered" n=${b.filtered}>filtered<//>
      <${Loss} state="failed" n=${b.failed}>failed: too few of their rollouts were scored<//>
      <${Loss} state="cancelled" n=${b.cancelled}>cancelled<//>` },
    { name: "Kept", n: b.kept, note: `of ${count(b.wanted)} wanted`, ok: true },
  ];
  const most = Math.max(1, steps[0].n);
  return html`<section class="card" aria-labelledby="funnel"><header><h2 id="funnel">Funnel</h2><span class="quiet small">groups</span></header>
    <ol class="funnel">${steps.map((step) => html`<li key=${step.name}>
      <span class="funnel-name">${step.name}</span>
      <span class="funnel-rail"><i class=${step.ok ? "ok" : ""} style=${{ width: `${(100 * step.n) / most}%` }}></i></span>
      <span class="funnel-count"><b class="num">${count(step.n)}</b>${step.note && html` <span class="quiet">${step.note}</span>`}</span>
      ${step.losses && html`<ul class="losses">${step.losses}</ul>`}</li>`)}</ol></section>`;
}

/** The rewards of siblings, one cell each, filled as far as the reward goes; a cross where one was dropped. */
function Rewards({ rollouts }) {
  const said = rollouts.map((r) => (r.drop ? "dropped" : digits(r.reward))).join(", ");
  return html`<span class="cells" role="img" aria-label="rewards ${said}" title=${said}>
    ${rollouts.slice(0, CELLS).map((r) => html`<i key=${r.id} class=${r.drop ? "cell-dropped" : ""}>
      <b style=${{ height: `${100 * Math.max(0, Math.min(1, r.reward ?? 0))}%` }}></b></i>`)}
    ${rollouts.length > CELLS && html`<span class="quiet small">+${rollouts.length - CELLS}</span>`}</span>`;
}

function mean(rollouts) {
  const rewards = rollouts.map((r) => r.reward).filter((reward) => reward !== null);
  return rewards.length ? rewards.reduce((a, b) => a + b, 0) / rewards.length : null;
}

function Groups({ batch }) {
  const [pages, setPages] = useState([]);
  const [cursor, setCursor] = useState("0");
  const answer = useGet(`/v1/batches/${encodeURIComponent(batch.id)}/groups`, { cursor, include: "summary", verdict: "all", limit: PAGE });
  const table = useRef();
  useRowKeys(table);
  useEffect(() => {
    if (!answer.loading) answer.reload(); // more were decided
  }, [decided(batch)]);
  const groups = [...pages, ...(answer.data?.groups ?? [])];
  const more = () => {
    setPages(groups);
    setCursor(answer.data.cursor);
  };
  if (!groups.length && answer.data) {
    return html`<section class="card"><${Empty} title="No group is decided yet">
      A group is decided when all its rollouts have ended.<//></section>`;
  }
  return html`<section class="card flush" aria-labelledby="groups">
    <header><h2 id="groups">Groups</h2><span class="quiet small">in the order in which they were decided</span></header>
    ${groups.length > 0 && html`<table class="list" ref=${table}>
      ${headings("Verdict", "Group", "Rewards", ["Mean", "right"], ["Why", "wide"], ["From", "wide"])}
      <tbody>${groups.map((g) => html`<tr key=${g.id}>
        <td><${StateMark} state=${g.verdict} /></td>
        <td><${Link} path=${["groups", g.id]} class="whole mono" data-row=${g.id} title=${g.id}>${shortId(g.id)}<//></td>
        <td><${Rewards} rollouts=${g.rollouts} /></td><td class="right num">${digits(mean(g.rollouts))}</td>
        <td class="wide quiet">${words(g.reason ?? "")}</td>
        <td class="wide quiet">${g.carried ? "an earlier batch" : "this batch"}</td></tr>`)}</tbody></table>`}
    ${!answer.data && html`<div class="pad"><${Answered} answer=${answer} what="Loading groups" /></div>`}
    ${answer.data?.groups.length === PAGE && html`<div class="list-foot"><span>${plural(groups.length, "group")} of ${count(decided(batch))}</span>
      <button type="button" class="button" onClick=${more}>Show more</button></div>`}
  </section>`;
}

export function BatchView({ params }) {
  const answer = useGet(`/v1/batches/${encodeURIComponent(params.id)}`);
  const look = useSoon(answer.reload);
  const status = useLive({ topics: "batches" }, { changed: ({ what, id }) => what === "batch" && id === params.id && look() });
  return html`<${Head} title=${shortId(params.id)} crumbs=${[{ label: "Batches", path: ["batches"] }]} status=${status}>
      <${Copy} text=${params.id}>Copy id<//><${Copy} text=${`rollout batches show ${params.id}`}>As command<//><//>
    <${Answered} answer=${answer} what="Loading the batch">${(b) => html`
      <div class="stats">
        <${Stat} name="State"><${StateMark} state=${stateOf(b)} /><//>
        <${Stat} name="Kept"><${Kept} batch=${b} /><//>
        <${Stat} name="Slots busy"><span class="num">${count(b.in_flight)}</span>
          <span class="quiet"> rollouts of ${plural(b.open, "open group")} of ${b.n}</span><//>
        <${Stat} name="Rollouts decided"><span class="num">${count(b.rollouts_scored)}</span>
          <span class="quiet"> scored, ${count(b.rollouts_dropped)} dropped</span><//>
        <${Stat} name="Prompts">${b.closed ? "all given" : "more may come"}<//>
        <${Stat} name="Took"><${Duration} from=${b.created_at} to=${b.finished_at} />
          <span class="quiet">, begun <${Ago} at=${b.created_at} /></span><//>
      </div>
      <div class="columns two">
        <${Funnel} batch=${b} />
        <section class="card" aria-labelledby="reasons"><header><h2 id="reasons">Why groups were not kept</h2></header>
          ${Object.keys(b.reasons).length
            ? html`<${Bars} tone="warn" rows=${Object.entries(b.reasons).sort((x, y) => y[1] - x[1])
                .map(([name, value]) => ({ name: words(name), value }))} />`
            : html`<p class="quiet">Every decided group was kept.</p>`}</section>
      </div>
      <${Groups} batch=${b} />`}<//>`;
}
