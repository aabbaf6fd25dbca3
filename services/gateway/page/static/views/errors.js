// What was dropped or failed, by who is to blame and why, with examples; counted among what was looked at.
import {
  html, useState, useRef, Ago, Bars, count, Empty, Failure, Head, headings, Icon, Link, Loading, plural, shortId,
  StateMark, tally, useRowKeys, words,
} from "../ui.js";
import { useListing } from "./listing.js";

const PAGE = 100;
const SCANS = 5; // answers at a time
const EXAMPLES = 3;
const MOST_SAID = 300; // characters of a message

const blameOf = (r) => r.error?.blame ?? "nobody";
const said = (r) => (r.error?.message ?? words(r.finish_reason ?? "")).slice(0, MOST_SAID);
const reasonOf = (r) => r.drop_reason ?? r.error?.type ?? r.state;

/** `[{blame, reason, rows}]`, the most frequent first. */
function kinds(rows) {
  const found = new Map();
  for (const r of rows) {
    const key = `${blameOf(r)}\n${reasonOf(r)}`;
    if (!found.has(key)) found.set(key, { blame: blameOf(r), reason: reasonOf(r), rows: [] });
    found.get(key).rows.push(r);
  }
  return [...found.values()].sort((a, b) => b.rows.length - a.rows.length);
}

function Kind({ kind }) {
  const [open, setOpen] = useState(false);
  const message = said(kind.rows[0]);
  const shown = open ? kind.rows.slice(0, PAGE) : kind.rows.slice(0, EXAMPLES);
  return html`<section class="card flush">
    <header><h3>${kind.reason}</h3>
      <span class="row small"><span class="tag">blame: ${words(kind.blame)}</span><b class="num">${count(kind.rows.length)}</b></span>
      <p class="message quiet said">${message}</p></header>
    <table class="list kinds"><caption class="unseen">Examples of ${kind.reason}</caption>
      ${headings("State", "Rollout", ["Handler", "wide"], ["Message, where it is another", "wide"], "When")}
      <tbody>${shown.map((r) => html`<tr key=${r.id}>
        <td><${StateMark} state=${r.state} /></td>
        <td class="id"><${Link} path=${["rollouts", r.id]} class="whole mono" data-row=${r.id} title=${r.id}>${shortId(r.id)}<//></td>
        <td class="wide id">${r.handler}${r.error?.stage && html` <span class="tag">${r.error.stage.toUpperCase()}</span>`}</td>
        <td class="wide quiet fill-width"><span class="clip" title=${said(r)}>${said(r) === message ? "" : said(r)}</span></td>
        <td class="right quiet"><${Ago} at=${r.finished_at ?? r.updated_at} /></td></tr>`)}</tbody></table>
    ${kind.rows.length > EXAMPLES && html`<div class="list-foot">
      <button type="button" class="button" aria-expanded=${String(open)} onClick=${() => setOpen(!open)}>
        ${open ? "Fewer" : `All ${count(Math.min(kind.rows.length, PAGE))}`}</button></div>`}
  </section>`;
}

/** Counts by a name that the address may choose. */
function Choice({ title, name, names, query }) {
  const link = (value) => ({
    path: ["errors"], query: { ...query, [name]: value }, "aria-current": value === query[name] ? "true" : undefined,
  });
  return html`<section class="card" aria-label=${title}>
    <header><h2>${title}</h2>${query[name] && html`<${Link} path=${["errors"]} query=${{ ...query, [name]: "" }}>all<//>`}</header>
    <${Bars} tone="bad" rows=${tally(names).map(([value, n]) => ({ name: words(value), value: n, link: link(value) }))} /></section>`;
}

export function ErrorsView({ query }) {
  const dropped = useListing({ drop: true, handler: query.handler }, { limit: PAGE, scans: SCANS });
  const { rows, next, looked, loading, error } = dropped;
  const list = useRef();
  useRowKeys(list);
  return html`<${Head} title="Errors"><button type="button" class="button" onClick=${dropped.again}><${Icon} name="reload" />Reload</button><//>
    <p class="quiet" role="status">${plural(rows.length, "dropped rollout")} among ${
      looked === null ? "all that are kept" : `the newest ${count(Number(looked))}`}${loading ? ", looking on …" : "."}
      ${next !== null && !loading && html` <button type="button" class="button" onClick=${dropped.more}>Go on looking</button>`}</p>
    ${error && html`<${Failure} error=${error} retry=${dropped.again} />`}
    ${!rows.length && loading && html`<${Loading} what="Looking" />`}
    ${!rows.length && !loading && !error && html`<section class="card"><${Empty} title="Nothing was dropped">
      Rollouts that must not be trained on are collected here, with the reason.<//></section>`}
    ${rows.length > 0 && html`<div class="errors" ref=${list}>
      <div class="stack">
        <${Choice} title="To blame" name="blame" names=${rows.map(blameOf)} query=${query} />
        <${Choice} title="Handlers" name="handler" names=${rows.map((r) => r.handler)} query=${query} />
      </div>
      <div class="stack"><h2 class="unseen">By reason</h2>${kinds(rows).filter((kind) => !query.blame || kind.blame === query.blame)
        .map((kind) => html`<${Kind} key=${kind.blame + kind.reason} kind=${kind} />`)}</div>
    </div>`}`;
}
