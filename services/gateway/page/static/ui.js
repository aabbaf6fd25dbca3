// What views are made of: Preact, marks of states and rewards, times, tabs, and what to show when there is nothing.
import {
  html, render, createContext, useState, useReducer, useEffect, useLayoutEffect, useRef, useMemo, useCallback,
  useContext, useErrorBoundary,
} from "./vendor/preact.js";
import { get, hashOf, live } from "./api.js";

export {
  html, render, createContext, useState, useReducer, useEffect, useLayoutEffect, useRef, useMemo, useCallback,
  useContext, useErrorBoundary,
};

// ---------------------------------------------------------------- words and numbers

export const LIVE_STATES = ["queued", "initializing", "ready", "running", "evaluating"];
export const ENDED_STATES = ["completed", "failed", "cancelled", "timed_out"];
export const STATES = [...LIVE_STATES, ...ENDED_STATES];

/** `completed` → `completed`, `timed_out` → `timed out`. */
export const words = (name) => String(name).replaceAll("_", " ");

/** The end of an id, by which people tell rollouts apart; a group's index stays. */
export function shortId(id) {
  const [base, ...rest] = String(id).split(".");
  const short = base.length > 14 ? `…${base.slice(-8)}` : base;
  return [short, ...rest].join(".");
}

const COMPACT = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const PLAIN = new Intl.NumberFormat("en");
/** 1234 → `1,234`, 1234567 → `1.2M`; null → `–`. */
export function count(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  return Math.abs(value) < 100000 ? PLAIN.format(Math.round(value)) : COMPACT.format(value);
}

/** `1 node`, `2 nodes`. */
export const plural = (value, noun, many = `${noun}s`) => `${count(value)} ${value === 1 ? noun : many}`;

/** Three digits that count: 0.1234 → `0.123`. */
export function digits(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value !== 0 && (Math.abs(value) < 0.001 || Math.abs(value) >= 100000)) return value.toPrecision(3);
  return String(Number(value.toPrecision(Math.abs(value) >= 1000 ? 5 : 3)));
}

export const percent = (share) => (Number.isFinite(share) ? `${Math.round(share * 100)} %` : "–");

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const power = Math.min(4, Math.floor(Math.log2(Math.max(1, value)) / 10));
  return `${digits(value / 1024 ** power)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

/** 0.0123 → `12 ms`, 75 → `1m 15s`, 7300 → `2h 1m`. */
export function span(seconds) {
  if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return "–";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  const s = Math.round(seconds);
  if (s < 3600) return `${Math.floor(s / 60)}m ${s % 60}s`;
  if (s < 86400) return `${Math.floor(s / 3600)}h ${Math.floor((s % 3600) / 60)}m`;
  return `${Math.floor(s / 86400)}d ${Math.floor((s % 86400) / 3600)}h`;
}

// ---------------------------------------------------------------- hooks

const ticks = new Set();
setInterval(() => document.hidden || ticks.forEach((tick) => tick()), 1000);
/** Seconds since the epoch, once a second. */
export function useNow(running = true) {
  const [, tick] = useReducer((n) => n + 1, 0);
  useEffect(() => {
    if (!running) return undefined;
    ticks.add(tick);
    return () => ticks.delete(tick);
  }, [running]);
  return Date.now() / 1000;
}

/**
 * `{data, error, loading, reload}` of a GET; `path` null asks nothing. It is asked again when `version` changes, and old
 * data stays until the new is there.
 */
export function useGet(path, params = {}, version = 0) {
  const key = JSON.stringify([path, params]);
  const [state, setState] = useState({ key: null, data: null, error: null });
  const [turn, reload] = useReducer((n) => n + 1, 0);
  useEffect(() => {
    if (!path) return undefined;
    const abort = new AbortController();
    get(path, params, { signal: abort.signal }).then(
      (data) => setState({ key, data, error: null }),
      (error) => error.name === "AbortError" || setState((old) => ({ key, data: old.key === key ? old.data : null, error })),
    );
    return () => abort.abort();
  }, [key, turn, version]);
  return { ...state, loading: Boolean(path) && state.key !== key, reload };
}

/** Follows the live stream while the view is there; handlers may close over state. Returns its status. */
export function useLive(params, handlers) {
  const latest = useRef(handlers);
  latest.current = handlers;
  const [status, setStatus] = useState(params ? "connecting" : "off");
  const key = params && JSON.stringify(params);
  useEffect(() => {
    if (!params) {
      setStatus("off");
      return undefined;
    }
    const forward = Object.fromEntries(
      Object.keys(handlers).map((name) => [name, (data) => latest.current[name]?.(data)]),
    );
    return live(params, { ...forward, status: setStatus });
  }, [key]);
  return status;
}

/** `action`, at most so often: a call in between is made up for at the end. */
export function useSoon(action, ms = 500) {
  const latest = useRef(action);
  latest.current = action;
  const timer = useRef(null);
  useEffect(() => () => clearTimeout(timer.current), []);
  return useCallback(() => {
    timer.current ??= setTimeout(() => {
      timer.current = null;
      latest.current();
    }, ms);
  }, []);
}

/** `j` and `k` walk the rows inside of `ref`, links with `data-row`; `c` copies the id that one has there. */
export function useRowKeys(ref) {
  useEffect(() => {
    const pressed = (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest?.("input, textarea, select, dialog")) return;
      const rows = [...(ref.current?.querySelectorAll("[data-row]") ?? [])];
      const at = rows.indexOf(document.activeElement);
      if (event.key === "j" || event.key === "k") {
        const to = at < 0 ? 0 : Math.max(0, Math.min(rows.length - 1, at + (event.key === "j" ? 1 : -1)));
        rows[to]?.focus();
        rows[to]?.scrollIntoView({ block: "nearest" });
      } else if (event.key === "c" && at >= 0) copyText(rows[at].dataset.row);
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, []);
}

// ---------------------------------------------------------------- marks

const SHAPES = {
  queued: html`<circle cx="8" cy="8" r="5.25" class="line dashed" />`,
  initializing: html`<circle cx="8" cy="8" r="5.25" class="line" /><path d="M8 8V2.75A5.25 5.25 0 0 1 13.25 8Z" class="fill" />`,
  ready: html`<circle cx="8" cy="8" r="5.25" class="line" /><circle cx="8" cy="8" r="2" class="fill" />`,
  running: html`<circle cx="8" cy="8" r="5.25" class="line" /><path d="M6.5 5.5v5l4-2.5z" class="fill" />`,
  evaluating: html`<circle cx="8" cy="8" r="5.25" class="line" /><path d="M8 2.75a5.25 5.25 0 0 1 0 10.5z" class="fill" />`,
  completed: html`<circle cx="8" cy="8" r="6" class="fill" /><path d="m5.4 8.2 1.8 1.8 3.4-3.8" class="cut" />`,
  failed: html`<path d="M5.2 2h5.6L14 5.2v5.6L10.8 14H5.2L2 10.8V5.2z" class="fill" /><path d="m5.9 5.9 4.2 4.2m0-4.2-4.2 4.2" class="cut" />`,
  cancelled: html`<circle cx="8" cy="8" r="5.25" class="line" /><path d="m4.3 11.7 7.4-7.4" class="line" />`,
  timed_out: html`<circle cx="8" cy="8" r="5.25" class="line" /><path d="M8 4.8V8l2.2 1.6" class="line" />`,
  kept: html`<circle cx="8" cy="8" r="6" class="fill" /><path d="m5.4 8.2 1.8 1.8 3.4-3.8" class="cut" />`,
  filtered: html`<path d="M2.5 4h11M5 8h6M7 12h2" class="line" />`,
};
Object.assign(SHAPES, {
  done: SHAPES.completed, exhausted: SHAPES.timed_out, open: SHAPES.running, healthy: SHAPES.completed,
  unhealthy: SHAPES.failed, draining: SHAPES.cancelled, paused: SHAPES.ready,
});

/** A state as shape and word: nobody needs the colour. `bare`: the word is for screen readers only. */
export function StateMark({ state, bare = false }) {
  return html`<span class="mark is-${state}">
    <svg viewBox="0 0 16 16" width="14" height="14" aria-hidden="true">${SHAPES[state] ?? SHAPES.queued}</svg>
    <span class=${bare ? "unseen" : ""}>${words(state)}</span>
  </span>`;
}

/** A reward with a bar from 0 to 1 beside it; dropped ones say so. */
export function Reward({ value, drop = false }) {
  if (drop) return html`<span class="reward dropped" title="dropped: not to be trained on">dropped</span>`;
  if (value === null || value === undefined) return html`<span class="quiet">–</span>`;
  const share = Math.max(0, Math.min(1, value));
  return html`<span class="reward">
    <span class="num">${digits(value)}</span>
    <svg class="meter" width="28" height="6" aria-hidden="true"><rect width="28" height="6" rx="3" class="rail" />
      ${share > 0 && html`<rect width=${28 * share} height="6" rx="3" class="level" />`}</svg>
  </span>`;
}

const clock = (at) => new Date(at * 1000).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "medium" });

/** How long ago, with the time itself on hover. */
export function Ago({ at }) {
  const now = useNow();
  if (!at) return html`<span class="quiet">–</span>`;
  const past = Math.max(0, now - at);
  const text = past < 2 ? "now" : span(past < 60 ? Math.floor(past) : past).replace(/ \d+[sm]$/, "");
  return html`<time class="num" datetime=${new Date(at * 1000).toISOString()} title=${clock(at)}>${text}${
    past >= 2 && html`<span class="ago"> ago</span>`}</time>`;
}

/** `seconds`, or from `from` until now while `to` is null. */
export function Duration({ seconds, from, to }) {
  const running = seconds === undefined && from && !to;
  const now = useNow(Boolean(running));
  return html`<span class="num">${span(seconds !== undefined ? seconds : from ? (to ?? now) - from : null)}</span>`;
}

export function Link({ path, query, children, ...rest }) {
  return html`<a href=${hashOf(path, query)} ...${rest}>${children}</a>`;
}

/** Puts `text` on the clipboard, also where the page came without TLS. */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = document.body.appendChild(Object.assign(document.createElement("textarea"), { value: text }));
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

export function Copy({ text, label = "Copy", children }) {
  const [done, setDone] = useState(false);
  const copy = async (event) => {
    event.preventDefault();
    event.stopPropagation();
    await copyText(typeof text === "function" ? text() : text);
    setDone(true);
    setTimeout(() => setDone(false), 1500);
  };
  return html`<button type="button" class=${children ? "button" : "icon-button"} onClick=${copy} title=${label}
    aria-label=${children ? undefined : label}>
    <${Icon} name=${done ? "check" : "copy"} />${children && html`<span>${done ? "Copied" : children}</span>`}
    <span class="unseen" role="status">${done ? "copied" : ""}</span>
  </button>`;
}

/** A command to run in a shell, with a button that copies it. */
export const Command = ({ children }) =>
  html`<span class="command"><code>${children}</code><${Copy} text=${children} label="Copy the command" /></span>`;

const ICONS = {
  overview: "M2.5 8h2.5l2-4.5 2.5 9 2-4.5h2",
  rollouts: "M2.5 4h11M2.5 8h11M2.5 12h7",
  batches: "M2.5 3.5h11l-4 5v4l-3-1.5V8.5z",
  training: "M2.5 2.5v11h11M5 10l2.5-3 2 1.5L13 4.5",
  errors: "M8 2.5 14 13.5H2zM8 6.5v3.2M8 11.6v.2",
  copy: "M5.5 5.5v-3h8v8h-3M2.5 5.5h8v8h-8z",
  check: "m3 8.5 3.3 3.3L13 4.8",
  search: "M7 11.5a4.5 4.5 0 1 0 0-9 4.5 4.5 0 0 0 0 9zM10.3 10.3l3.2 3.2",
  sun: "M8 10.8a2.8 2.8 0 1 0 0-5.6 2.8 2.8 0 0 0 0 5.6zM8 1.5v1.3M8 13.2v1.3M1.5 8h1.3M13.2 8h1.3" +
    "M3.4 3.4l.9.9M11.7 11.7l.9.9M3.4 12.6l.9-.9M11.7 4.3l.9-.9",
  moon: "M13 9.7A5.5 5.5 0 0 1 6.3 3a5.5 5.5 0 1 0 6.7 6.7z",
  help: "M6 6a2 2 0 1 1 2.9 1.8c-.6.3-.9.7-.9 1.4M8 11.6v.2",
  out: "M6.5 2.5h-4v11h4M6.5 8h7M10.8 5.3 13.5 8l-2.7 2.7",
  close: "m4 4 8 8m0-8-8 8",
  right: "m6 3.5 4.5 4.5L6 12.5",
  reload: "M13 8a5 5 0 1 1-1.5-3.6M13 2.5v2.8h-2.8",
};
export const Icon = ({ name }) =>
  html`<svg class="icon" viewBox="0 0 16 16" width="16" height="16" aria-hidden="true"><path d=${ICONS[name]} /></svg>`;

/** `tabs`: `[{id, label, count}]`; arrows move between them. The panel has the id `panel-ID`. */
export function Tabs({ tabs, selected, onSelect, label = "Parts of this view" }) {
  const move = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const at = tabs.findIndex((tab) => tab.id === selected);
    onSelect(tabs[(at + step + tabs.length) % tabs.length].id);
    const bar = event.currentTarget;
    requestAnimationFrame(() => bar.querySelector("[aria-selected=true]")?.focus());
  };
  return html`<div class="tabs" role="tablist" aria-label=${label} onKeyDown=${move}>
    ${tabs.map((tab) => html`<button type="button" role="tab" key=${tab.id} id="tab-${tab.id}"
      aria-selected=${String(tab.id === selected)} aria-controls=${tab.id === selected ? `panel-${tab.id}` : undefined}
      tabindex=${tab.id === selected ? 0 : -1} onClick=${() => onSelect(tab.id)}>
      ${tab.label}${tab.count !== undefined && tab.count !== null && html` <span class="num quiet">${count(tab.count)}</span>`}
    </button>`)}
  </div>`;
}

/** The head of a table: `name`, or `[name, classes]`. */
export const headings = (...columns) => html`<thead><tr>${columns.map((column) => {
  const [name, classes] = [].concat(column);
  return html`<th class=${classes} key=${name}>${name}</th>`;
})}</tr></thead>`;

/** A name and what it says, for the line of facts at the top of a view. */
export const Stat = ({ name, children }) => html`<div class="stat"><span class="stat-name">${name}</span><span>${children}</span></div>`;

/** `[[name, count]]`, the most frequent first. */
export function tally(names) {
  const counts = new Map();
  names.forEach((name) => counts.set(name, (counts.get(name) ?? 0) + 1));
  return [...counts].sort((a, b) => b[1] - a[1]);
}

export function Bars({ rows, tone = "" }) {
  const most = Math.max(1, ...rows.map((row) => row.value));
  return html`<ul class="bars">${rows.map((row) => html`<li key=${row.name}>
    <span class="clip">${row.link ? html`<${Link} ...${row.link}>${row.name}<//>` : row.name}${
      row.note && html` <span class="quiet">${row.note}</span>`}</span>
    <span class="num">${count(row.value)}</span>
    <span class="bar ${row.tone ?? tone}"><i style=${{ width: `${(100 * row.value) / most}%` }}></i></span></li>`)}</ul>`;
}

// ---------------------------------------------------------------- nothing, not yet, and no

/** Nothing to show: why, and with `command` or `children` what to do. */
export const Empty = ({ title, children, command }) => html`<div class="empty">
  <p class="empty-title">${title}</p>
  ${children && html`<p>${children}</p>`}
  ${command && html`<${Command}>${command}<//>`}
</div>`;

export const Loading = ({ what = "Loading" }) =>
  html`<div class="loading" role="status"><span class="spinner" aria-hidden="true"></span>${what} …</div>`;

const REMEDIES = {
  0: ["The gateway does not answer", "rollout status"],
  401: ["Not signed in", "rollout keys create NAME --scope read"],
  403: ["This key may not", "rollout keys list"],
  404: ["It is not there", null],
  429: ["Over quota: wait a little", null],
  503: ["The service is not ready", "rollout status"],
};

/** An error, and what to do about it. */
export function Failure({ error, retry }) {
  const [title, command] = REMEDIES[error.status] ?? [error.title ?? "Something went wrong", null];
  return html`<div class="failure" role="alert">
    <p class="empty-title"><${StateMark} state="failed" bare /> ${title}${error.status > 0 && html` <span class="quiet">${error.status}</span>`}</p>
    <p class="said">${error.detail || error.message}</p>
    <div class="row">
      ${command && html`<${Command}>${command}<//>`}
      ${retry && html`<button type="button" class="button" onClick=${retry}><${Icon} name="reload" />Try again</button>`}
    </div>
  </div>`;
}

/** What a GET came to: `children(data)` once there is data. */
export function Answered({ answer, what, children }) {
  if (answer.data) return children(answer.data);
  if (answer.error) return html`<${Failure} error=${answer.error} retry=${answer.reload} />`;
  return html`<${Loading} what=${what} />`;
}

const SAID = { connecting: "connecting", live: "live", waiting: "reconnecting", paused: "paused", off: "not live" };
/** Whether what is shown moves by itself. */
export const LiveMark = ({ status }) =>
  html`<span class="live is-${status}" role="status"><span class="dot" aria-hidden="true"></span>${SAID[status]}</span>`;

/** A dialog above the page; Esc and a click outside close it. */
export function Dialog({ title, onClose, children }) {
  const ref = useRef();
  useEffect(() => {
    ref.current.showModal();
    return () => ref.current?.close();
  }, []);
  return html`<dialog ref=${ref} aria-label=${title} onClose=${onClose}
    onClick=${(event) => event.target === ref.current && onClose()}>
    <div class="dialog"><header><h2>${title}</h2>
      <button type="button" class="icon-button" aria-label="Close" onClick=${onClose}><${Icon} name="close" /></button></header>
      ${children}</div>
  </dialog>`;
}

/** The head of a view: where it belongs, its title, and what one can do. */
export function Head({ title, crumbs = [], status, children }) {
  useEffect(() => {
    document.title = `${typeof title === "string" ? title : "rollout"} · rollout`;
  }, [title]);
  return html`<header class="head">
    <div class="head-title">
      ${crumbs.length > 0 && html`<nav aria-label="Breadcrumb" class="crumbs">
        ${crumbs.map(({ label, path, query }) => html`<${Link} path=${path} query=${query}>${label}<//>
          <span aria-hidden="true">/</span>`)}</nav>`}
      <h1>${title}</h1>
      ${status && html`<${LiveMark} status=${status} />`}
    </div>
    <div class="row">${children}</div>
  </header>`;
}
