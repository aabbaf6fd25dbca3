// Calls of the public API, the one live stream of a view, and the addresses of views.
import { createParser } from "./vendor/eventsource-parser.js";

const PROOF = "rollout.proof"; // localStorage is per origin, cookies are not: a session needs both
const BACK_OFF_MS = [500, 1000, 2000, 5000, 10000, 15000];
const SILENCE_MS = 45000; // three heartbeats
const STEADY_MS = 5000; // a stream that is cut at once is asked for ever less often
const HIDDEN_MS = 60000; // a tab that nobody sees costs the service nothing after that
const MOST_IDS = 200; // of a stream
const MOST_IDS_CHARS = 3500; // a gateway takes 4094 bytes of address
const KEPT = /^\/v1\/tokenizers\//; // a megabyte that never changes
const OF_A_TENANT = /^\/v1\/(rollouts|groups|results|batches|reports|live)\b/; // these routes take `tenant=`

/** What the API refused, as its problem document says it; status 0 = no answer came. */
export class Problem extends Error {
  constructor(status, title, detail = "", errors = []) {
    super(detail || title);
    this.status = status;
    this.title = title;
    this.detail = [detail, ...errors.map((e) => (e.field ? `${e.field}: ${e.message}` : e.message))]
      .filter((text, i, all) => text && all.indexOf(text) === i).join("\n");
  }
}

const island = document.getElementById("embedded");
const answers = island ? JSON.parse(island.textContent) : null;
/** True in an exported file: answers lie in it, and there is no server. */
export const embedded = answers !== null;
/** The view that an exported file opens with. */
export const embeddedHash = answers?.["#"] ?? null;

const listeners = new Set();
/** Calls `listener()` once a call was refused for want of a session; returns what ends that. */
export function onSignedOut(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** `{view, parts, query}` of an address such as `#/rollouts/ID?tab=tokens`. */
export function route(hash = location.hash) {
  const [path, search = ""] = hash.replace(/^#\/?/, "").split("?", 2);
  const parts = path.split("/").filter(Boolean).map(decoded);
  return { view: parts[0] ?? "overview", parts: parts.slice(1), query: Object.fromEntries(new URLSearchParams(search)) };
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // a stray % is part of a name
  }
}

/** So many ids, for `ids` of a stream, as an address has room for. */
export function idsOf(ids) {
  let room = MOST_IDS_CHARS;
  return ids.slice(0, MOST_IDS).filter((id) => (room -= encodeURIComponent(`${id},`).length) >= 0).join(",");
}

/** The address of a view; the tenant that an admin looks at goes along. */
export function hashOf(path, query = {}) {
  const { tenant } = route().query;
  const search = searchOf({ ...(tenant ? { tenant } : {}), ...query });
  return `#/${path.map(encodeURIComponent).join("/")}${search && `?${search}`}`;
}

// Sorted, so that an exported file finds an answer by its address.
function searchOf(params) {
  const given = Object.entries(params).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return new URLSearchParams(given.sort(([a], [b]) => (a < b ? -1 : 1))).toString();
}

function address(path, params = {}) {
  const { tenant } = route().query;
  const all = OF_A_TENANT.test(path) && tenant && !embedded ? { tenant, ...params } : params;
  const search = searchOf(all);
  return search ? `${path}?${search}` : path;
}

async function call(method, path, { params, body, accept = "application/json", signal } = {}) {
  const headers = { Accept: accept };
  const proof = localStorage.getItem(PROOF);
  if (proof) headers["X-Rollout-Session"] = proof;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let answer;
  try {
    answer = await fetch(address(path, params).slice(1), {
      method, headers, signal, cache: KEPT.test(path) ? "default" : "no-store",
      body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(0, "No answer", "The gateway does not answer. Is it up? `rollout status` tells.");
  }
  if (answer.ok) return answer;
  const problem = await answer.json().catch(() => ({}));
  if (answer.status === 401 && path !== "/v1/session") listeners.forEach((listener) => listener());
  throw new Problem(answer.status, problem.title ?? answer.statusText, problem.detail, problem.errors);
}

function fromFile(path, params) {
  const found = answers[address(path, params)] ?? answers[path];
  if (!found) throw new Problem(404, "Not in this file", `${address(path, params)} was not exported with it`);
  return Uint8Array.from(atob(found.body), (c) => c.charCodeAt(0));
}

/** A JSON answer. `options`: `{signal}` to give the call up. */
export async function get(path, params = {}, options = {}) {
  if (embedded) return JSON.parse(new TextDecoder().decode(fromFile(path, params)));
  return (await call("GET", path, { params, ...options })).json();
}

/** The bytes of a msgpack answer. */
export async function getBytes(path, params = {}, options = {}) {
  if (embedded) return fromFile(path, params);
  const answer = await call("GET", path, { params, accept: "application/msgpack", ...options });
  return new Uint8Array(await answer.arrayBuffer());
}

export async function post(path, body = {}, params = {}) {
  return (await call("POST", path, { body, params })).json();
}

/** Whose key this is; null = nobody has signed in. */
export async function session() {
  if (embedded) return { tenant: null, scopes: [] };
  if (!localStorage.getItem(PROOF)) return null; // it counts only with a proof
  try {
    return await get("/v1/session");
  } catch (problem) {
    if (problem.status === 401) return null;
    throw problem;
  }
}

export async function signIn(key) {
  const { proof, ...who } = await post("/v1/session", { key });
  localStorage.setItem(PROOF, proof);
  return who;
}

export async function signOut() {
  await call("DELETE", "/v1/session").catch(() => {});
  localStorage.removeItem(PROOF);
}

/**
 * The live stream of a view: `handlers` by the name of the event, and `status(word)` with `connecting`, `live`,
 * `waiting` (it tries again), `paused` (the tab is hidden) or `off`; `refused(problem)` before the last. Returns `close()`.
 */
export function live(params, handlers) {
  const tell = (word) => handlers.status?.(word);
  let closed = embedded, abort = null, failures = 0, again = null, hide = null, silence = null;
  if (embedded) tell("off");

  const heard = () => {
    clearTimeout(silence);
    silence = setTimeout(() => abort?.abort(), SILENCE_MS);
  };

  async function read(signal) {
    const answer = await call("GET", "/v1/live", { params, accept: "text/event-stream", signal });
    const parser = createParser({
      onEvent: ({ event, data }) => handlers[event ?? "message"]?.(JSON.parse(data)),
    });
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    tell("live");
    const began = Date.now();
    for (;;) {
      heard();
      const { value, done } = await reader.read();
      if (done) return;
      if (Date.now() - began > STEADY_MS) failures = 0;
      parser.feed(value);
    }
  }

  async function open() {
    again = null;
    if (closed || abort || document.hidden) return;
    const mine = (abort = new AbortController());
    tell("connecting");
    let refused = null;
    try {
      await read(mine.signal);
    } catch (error) {
      refused = error;
    }
    clearTimeout(silence);
    abort = null;
    if (closed) return;
    if (document.hidden) return tell("paused");
    if (refused instanceof Problem && refused.status >= 400 && refused.status < 500 && refused.status !== 429) {
      handlers.refused?.(refused); // asking again would be refused again
      return tell("off");
    }
    tell("waiting");
    again = setTimeout(open, BACK_OFF_MS[Math.min(failures++, BACK_OFF_MS.length - 1)] * (0.75 + Math.random() / 2));
  }

  const seen = () => {
    clearTimeout(hide);
    if (document.hidden) {
      hide = setTimeout(() => abort?.abort(), HIDDEN_MS);
    } else if (!abort) {
      clearTimeout(again);
      open();
    }
  };
  if (!closed) {
    document.addEventListener("visibilitychange", seen);
    open();
  }
  return () => {
    closed = true;
    document.removeEventListener("visibilitychange", seen);
    [again, hide, silence].forEach(clearTimeout);
    abort?.abort();
  };
}
