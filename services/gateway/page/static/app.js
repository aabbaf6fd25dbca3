// The shell: who is signed in, which view an address means, navigation, search, keys, light and dark.
import {
  html, render, useState, useEffect, useRef, useErrorBoundary, Dialog, Failure, Icon, Loading,
} from "./ui.js";
import { embedded, embeddedHash, get, hashOf, onSignedOut, route, session, signOut } from "./api.js";
import { OverviewView } from "./views/overview.js";
import { RolloutsView } from "./views/rollouts.js";
import { RolloutView } from "./views/rollout.js";
import { GroupView } from "./views/group.js";
import { BatchesView, BatchView } from "./views/batches.js";
import { TrainingView } from "./views/training.js";
import { ErrorsView } from "./views/errors.js";
import { LoginView } from "./views/login.js";

const NAVIGATION = [
  { view: "overview", label: "Overview", key: "o" },
  { view: "rollouts", label: "Rollouts", key: "r" },
  { view: "batches", label: "Batches", key: "b" },
  { view: "training", label: "Training", key: "t" },
  { view: "errors", label: "Errors", key: "e" },
];
const LISTS = { __proto__: null, overview: OverviewView, rollouts: RolloutsView, batches: BatchesView, training: TrainingView, errors: ErrorsView };
const DETAILS = { __proto__: null, rollouts: RolloutView, groups: GroupView, batches: BatchView, training: TrainingView };
const KEYS = [
  ["/", "search: an id, or filters such as state:failed tag:step:17"],
  ["g o, g r, g b, g t, g e", "overview, rollouts, batches, training, errors"],
  ["j, k", "next and previous row"],
  ["Enter", "open the row"],
  ["c", "copy the id of the row"],
  ["d", "dark or light"],
  ["?", "this help"],
  ["Esc", "close, or leave a field"],
];

// ---------------------------------------------------------------- light and dark

const THEME = "rollout.theme";
const dark = matchMedia("(prefers-color-scheme: dark)");
const themeNow = () => document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light");
try {
  const chosen = localStorage.getItem(THEME);
  if (chosen) document.documentElement.dataset.theme = chosen;
} catch {
  // An exported file may have no storage: the system's choice it is.
}

function switchTheme() {
  const next = themeNow() === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = next;
  try {
    localStorage.setItem(THEME, next);
  } catch {
    // as above
  }
  dispatchEvent(new Event("themechange")); // charts are drawn, not styled
}

function ThemeSwitch() {
  const [theme, setTheme] = useState(themeNow);
  useEffect(() => {
    const look = () => setTheme(themeNow());
    addEventListener("themechange", look);
    dark.addEventListener("change", look);
    return () => {
      removeEventListener("themechange", look);
      dark.removeEventListener("change", look);
    };
  }, []);
  const next = theme === "dark" ? "light" : "dark";
  return html`<button type="button" class="icon-button" onClick=${switchTheme} title="Switch to ${next} (d)"
    aria-label="Switch to ${next}"><${Icon} name=${theme === "dark" ? "sun" : "moon"} /></button>`;
}

// ---------------------------------------------------------------- search

/** Where a search leads: `name:value` words are filters, anything else is an id, or the tag of rollouts. */
async function found(text) {
  const filters = text.split(/\s+/).map((word) => /^(state|handler|group|tag|version|blame|drop):(.+)$/.exec(word));
  if (filters.every(Boolean)) {
    const names = { group: "group_id", version: "policy_version" };
    return hashOf(["rollouts"], Object.fromEntries(filters.map(([, name, value]) => [names[name] ?? name, value])));
  }
  // Lists first: they answer whether or not there is something, and a browser logs a 404 as an error.
  const list = async (params) => (await get("/v1/rollouts", params)).rollouts;
  const family = text.replace(/\.\d+$/, "");
  const members = await list({ group_id: text, limit: 1 });
  if (members.length) return members[0].id === text ? hashOf(["rollouts", text]) : hashOf(["groups", text]);
  if (family !== text && (await list({ group_id: family, limit: 1 })).length) return hashOf(["rollouts", text]);
  if ((await list({ tag: text, limit: 1 })).length) return hashOf(["rollouts"], { tag: text });
  if ((await get("/v1/batches", { limit: 100 })).batches.some((batch) => batch.id === text)) return hashOf(["batches", text]);
  await get(`/v1/rollouts/${encodeURIComponent(text)}`, { include: "summary" });
  return hashOf(["rollouts", text]);
}

function Search() {
  const [text, setText] = useState("");
  const [wrong, setWrong] = useState(null);
  const go = async (event) => {
    event.preventDefault();
    if (!text.trim()) return;
    try {
      location.hash = await found(text.trim());
      setText("");
      setWrong(null);
      document.activeElement?.blur();
    } catch (problem) {
      setWrong(problem.status === 404 ? "No rollout, group, batch or tag of that name." : problem.detail);
    }
  };
  return html`<form class="search" role="search" onSubmit=${go}>
    <${Icon} name="search" />
    <input id="search" type="search" value=${text} onInput=${(event) => setText(event.target.value)} autocomplete="off"
      spellcheck="false" placeholder="Search, state:failed …" aria-label="Search by id, tag, or filters such as state:failed" />
    <kbd aria-hidden="true">/</kbd>
    ${wrong && html`<p class="wrong" role="alert">${wrong}</p>`}
  </form>`;
}

// ---------------------------------------------------------------- keys

function typing(target) {
  return target.closest?.("input, textarea, select, [contenteditable]");
}

function useKeys(showHelp) {
  useEffect(() => {
    let before = null; // `g`, until the next key
    const pressed = (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key === "Escape" && typing(event.target)) event.target.blur();
      if (typing(event.target) || document.querySelector("dialog[open]")) return;
      const wanted = before === "g" && NAVIGATION.find((item) => item.key === event.key);
      before = event.key;
      if (wanted && !embedded) location.hash = hashOf([wanted.view]);
      else if (event.key === "/") document.getElementById("search")?.focus();
      else if (event.key === "?") showHelp(true);
      else if (event.key === "d") switchTheme();
      else return;
      event.preventDefault();
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, []);
}

// ---------------------------------------------------------------- the shell

function Tenant({ who }) {
  const { view, parts, query } = route();
  if (!who.scopes.includes("admin")) return html`<span class="tenant" title="tenant">${who.tenant}</span>`;
  const choose = (event) => {
    const { tenant, ...rest } = query;
    location.hash = hashOf([view, ...parts], { ...rest, tenant: event.target.value });
  };
  return html`<input class="tenant" type="text" value=${query.tenant ?? ""} placeholder=${who.tenant} onChange=${choose}
    aria-label="Tenant to look at; * = all of them" title="Tenant to look at; * = all of them" spellcheck="false" />`;
}

function Shell({ who, view, onSignOut, onHelp, children }) {
  return html`<div class="shell">
    <a class="skip" href="#main" onClick=${(event) => {
      event.preventDefault();
      document.getElementById("main").focus();
    }}>Skip to the content</a>
    <aside class="side">
      <a class="brand" href=${hashOf(["overview"])}><span class="logo" aria-hidden="true">r</span>rollout</a>
      <${Search} />
      <nav class="menu" aria-label="Views">
        ${NAVIGATION.map((item) => html`<a href=${hashOf([item.view])} key=${item.view} title="${item.label} (g ${item.key})"
          aria-current=${item.view === view || (view === "groups" && item.view === "rollouts") ? "page" : undefined}>
          <${Icon} name=${item.view} /><span>${item.label}</span></a>`)}
      </nav>
      <div class="side-foot">
        <${Tenant} who=${who} />
        <${ThemeSwitch} />
        <button type="button" class="icon-button" onClick=${onHelp} title="Keys (?)" aria-label="Keys"><${Icon} name="help" /></button>
        <button type="button" class="icon-button" onClick=${onSignOut} title="Sign out" aria-label="Sign out"><${Icon} name="out" /></button>
      </div>
    </aside>
    <main id="main" tabindex="-1">${children}</main>
  </div>`;
}

function View({ component, params, query }) {
  const [error, again] = useErrorBoundary();
  if (error) return html`<h1>This view failed</h1><${Failure} error=${error} retry=${again} />`;
  return html`<${component} params=${params} query=${query} />`;
}

function App() {
  const [who, setWho] = useState(undefined); // undefined: not known yet; null: nobody
  const [error, setError] = useState(null);
  const [hash, setHash] = useState(location.hash);
  const [help, setHelp] = useState(false);
  const shown = useRef(null);
  const ask = () => {
    setError(null);
    session().then(setWho, setError);
  };
  useKeys(setHelp);
  useEffect(ask, []);
  useEffect(() => onSignedOut(() => setWho(null)), []);
  useEffect(() => {
    const moved = () => setHash(location.hash);
    addEventListener("hashchange", moved);
    return () => removeEventListener("hashchange", moved);
  }, []);

  const { view, parts, query } = route(hash || embeddedHash || "#/overview");
  const name = `${view}/${parts[0] ?? ""}`;
  useEffect(() => {
    // A view that was gone to begins at its top, for eyes and for screen readers.
    if (shown.current && shown.current !== name) {
      scrollTo(0, 0);
      document.getElementById("main")?.focus({ preventScroll: true });
    }
    shown.current = name;
  }, [name]);

  if (error) return html`<main class="login"><div class="card login-card"><h1>rollout</h1><${Failure} error=${error} retry=${ask} />
    ${error.status === 403 && html`<button type="button" class="button" onClick=${() => signOut().then(ask)}>Use another key</button>`}</div></main>`;
  if (who === undefined) return html`<${Loading} />`;
  if (who === null) {
    return html`<${LoginView} onSignedIn=${(signedIn) => {
      setWho(signedIn);
      if (view === "login") location.hash = hashOf(["overview"]);
    }} />`;
  }
  const component = parts.length ? DETAILS[view] : LISTS[view];
  const content = component
    ? html`<${View} key=${name} component=${component} params=${{ id: parts[0] }} query=${query} />`
    : html`<h1>No such view</h1><p><a href=${hashOf(["overview"])}>Go to the overview</a></p>`;
  return html`
    ${embedded
      ? html`<main id="main" class="alone" tabindex="-1"><div class="alone-switch"><${ThemeSwitch} /></div>${content}</main>`
      : html`<${Shell} who=${who} view=${view} onHelp=${() => setHelp(true)}
          onSignOut=${() => signOut().then(() => setWho(null))}>${content}<//>`}
    ${help && html`<${Dialog} title="Keys" onClose=${() => setHelp(false)}>
      <dl class="keys">${KEYS.map(([key, what]) => html`<dt>${key.split(", ").map((one) => html`<kbd>${one}</kbd> `)}</dt><dd>${what}</dd>`)}</dl>
    <//>`}`;
}

render(html`<${App} />`, document.getElementById("app"));
