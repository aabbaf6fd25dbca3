// The conversation of one chain: who said what, in which tokens, and what the tools answered.
import { Icon, html, span, useEffect, useMemo, useRef, useState } from "../ui.js";
import { letter } from "./record.js";
import { Terminal } from "./terminal.js";
import { VirtualList } from "./virtual.js";
import { Find, Words, exact, fixed } from "./words.js";

const SYSTEM_LINES = 8;
const FIND_AFTER_MS = 200;
const MOST_MARKS = 1000;
/** Pixels below which the message that one reads begins; above, the tabs stick. */
const TOP = 72;

/** Text parts of a message, joined. */
export function textOf(message) {
  const { content } = message;
  return typeof content === "string" ? content : (content ?? []).map((part) => part.text ?? "").join("");
}

/** A chain as items to show: a message each, with the range of tokens that it came in. */
export function itemsOf(trajectory, chain) {
  const timed = new Map((trajectory.calls ?? []).map((call) => [call.id, call]));
  const names = new Map();
  const items = [];
  const shared = trajectory.sharedOf(chain);
  let begun = null;
  for (const segment of chain.segments) {
    if (!segment.goesOn || !begun) begun = { start: segment.start, versions: [] };
    if (segment.sampled && !begun.versions.includes(segment.version)) begun.versions.push(segment.version);
    const next = chain.segments[segment.index + 1];
    if (!segment.messages.length && next?.goesOn) continue;
    const tokens = { ...begun, end: segment.end, segment, timed: timed.get(segment.call_id), shared: segment.end <= shared };
    if (!segment.messages.length) items.push({ key: `${segment.index}`, role: segment.role, tokens, first: true });
    segment.messages.forEach((message, place) => {
      for (const call of message.tool_calls ?? []) names.set(call.id, call.name);
      items.push({
        key: `${segment.index}.${place}`, role: message.role, message, tokens, timed: timed.get(message.tool_call_id),
        first: place === segment.messages.length - 1, together: segment.messages.length,
        name: message.name ?? names.get(message.tool_call_id),
      });
    });
    begun = null;
  }
  chain.texts.forEach((message, place) => items.push({ key: `text.${place}`, role: message.role, message, name: message.name }));
  if (chain === trajectory.chains[trajectory.chains.length - 1]) {
    trajectory.unread.forEach((message, place) =>
      items.push({ key: `unread.${place}`, role: message.role, message, unread: true, name: message.name }));
  }
  return items;
}

function searched(item) {
  const { message } = item;
  if (!message) return "";
  const calls = (message.tool_calls ?? []).map((call) => `${call.name} ${JSON.stringify(call.arguments)}`).join(" ");
  return `${message.reasoning ?? ""} ${textOf(message)} ${calls}`.toLowerCase();
}

/** A version's letter on its colour. */
export function Version({ at, trajectory }) {
  return html`<span class="swatch v${at % 8}" title=${`policy version ${trajectory.versions[at] ?? "unknown"}`}>${letter(at)}</span>`;
}

function Meta({ item, trajectory, chain, onTokens }) {
  const { tokens } = item;
  const unread = trajectory.finish_reason ? "no model call has read it: a limit ended the rollout" : "not read by a model call yet";
  if (item.unread) return html`<span class="msg-meta">${unread}</span>`;
  if (!item.first) return null;
  const { start, end, versions, segment } = tokens;
  const call = tokens.timed;
  const facts = [];
  if (segment.sampled) {
    facts.push(`turn ${trajectory.turnOf(chain, segment)}`, `${exact(end - start)} tokens`, `log-prob ${fixed(chain.mean(start, end), 2)}`);
    if (segment.finish_reason && segment.finish_reason !== "stop") facts.push(`ended by ${segment.finish_reason}`);
  } else {
    facts.push(`${exact(end - start)} tokens${item.together > 1 ? ` of ${item.together} messages` : ""}, ${tokens.shared ? "shared" : "given"}`);
  }
  const timed = segment.sampled ? call : item.timed;
  if (timed?.seconds != null) facts.push(span(timed.seconds));
  if (timed?.cached_tokens != null && timed.prompt_tokens) {
    facts.push(`${Math.round((100 * timed.cached_tokens) / timed.prompt_tokens)} % of the prompt cached`);
  }
  return html`<span class="msg-meta">
    ${versions.map((at) => html`<${Version} at=${at} trajectory=${trajectory} />`)}
    ${facts.map((fact, at) => html`${at > 0 && " · "}<span>${fact}</span>`)}
    <button class="bare" title="Show these tokens" aria-label="Show these tokens" onClick=${() => onTokens(start)}>
      tokens<${Icon} name="right" /></button>
  </span>`;
}

/** A tool call with its arguments, a single one as it is. */
export function Call({ call }) {
  const given = Object.entries(call.arguments ?? {});
  const single = given.length === 1 && typeof given[0][1] === "string";
  return html`<div class="call">
    <div class="call-name"><span class="call-mark" aria-hidden="true">→</span><b>${call.name}</b>
      ${single && html`<span class="quiet">${given[0][0]}</span>`}</div>
    ${given.map(([name, value]) => html`${!single && html`<span class="argument-name">${name}</span>`}
      <${Words} text=${typeof value === "string" ? value : JSON.stringify(value, null, 1)} owner=${call} name=${name} kind="code" />`)}
    ${!given.length && html`<span class="quiet">without arguments</span>`}
  </div>`;
}

function Message({ item, trajectory, chain, onTokens, found }) {
  const { message, role } = item;
  const text = message ? textOf(message) : "";
  const output = role === "tool";
  useEffect(() => {
    if (found) mark(found);
  });
  return html`<article class="msg msg-${role} ${found ? "msg-found" : ""} ${item.unread ? "msg-unread" : ""} ${item.tokens?.shared
    ? "msg-shared" : ""}" aria-label=${`${role} message`}>
    <header>
      <span class="msg-role">${role}</span>
      ${output && item.name && html`<span class="msg-name">${item.name}</span>`}
      <${Meta} item=${item} trajectory=${trajectory} chain=${chain} onTokens=${onTokens} />
    </header>
    <div class="msg-body">
      ${!message && html`<p class="quiet">${exact(item.tokens.end - item.tokens.start)} tokens without a text of their own in this chain</p>`}
      ${message?.reasoning && html`<div class="reasoning"><span class="reasoning-name">reasoning</span><${Words} text=${message.reasoning}
        owner=${message} name="reasoning" /></div>`}
      ${output
        ? html`<${Terminal} text=${text} owner=${message} label=${`output of ${item.name ?? "the tool"}`} name=${item.name ?? "output"} />`
        : text && html`<${Words} text=${text} owner=${message} lines=${role === "system" ? SYSTEM_LINES : undefined} />`}
      ${(message?.tool_calls ?? []).map((call) => html`<${Call} call=${call} />`)}
    </div>
  </article>`;
}

/** What is under way: what the running command has printed, or that the model is asked. */
export function Now({ output, state }) {
  if (output) {
    return html`<article class="msg msg-tool" aria-label="running command">
      <header><span class="msg-role">${output.kind}</span>
        <span class="msg-meta"><span class="live is-live"><span class="dot" aria-hidden="true"></span>${output.running ? "running"
          : "ended"}</span></span></header>
      <div class="msg-body"><${Terminal} text=${output.text} running=${output.running} label="output of the running command" /></div>
    </article>`;
  }
  return html`<div class="msg-wait" role="status"><span class="spinner" aria-hidden="true"></span>
    ${state === "running" ? "the agent is at work" : state}</div>`;
}

function estimate(item) {
  if (item.live) return 160;
  const lines = Math.min(40, Math.ceil((item.message ? textOf(item.message).length : 0) / 90));
  return 70 + 20 * lines + 90 * (item.message?.tool_calls?.length ?? 0);
}

/** Index of the message at the top of the window. */
function topItem() {
  const shown = [...document.querySelectorAll(".virtual-item")].find((item) => item.getBoundingClientRect().bottom > TOP);
  return Number(shown?.dataset.index ?? 0);
}

/** Highlight what was looked for in the message that was found; the document stays as it is. */
function mark(needle) {
  if (!globalThis.CSS?.highlights) return;
  CSS.highlights.delete("found");
  const message = needle && document.querySelector(".msg-found");
  if (!message) return;
  const ranges = [];
  const walker = document.createTreeWalker(message, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node && ranges.length < MOST_MARKS; node = walker.nextNode()) {
    const text = node.data.toLowerCase();
    for (let at = text.indexOf(needle); at >= 0 && ranges.length < MOST_MARKS; at = text.indexOf(needle, at + needle.length)) {
      if (at + needle.length > node.length) break;
      const range = new Range();
      range.setStart(node, at);
      range.setEnd(node, at + needle.length);
      ranges.push(range);
    }
  }
  CSS.highlights.set("found", new Highlight(...ranges));
}

/** `length` makes it look again when the chain has grown; `output` is the running command's, where there is one. */
export function Conversation({ trajectory, chain, length, output, state, running, onTokens }) {
  const [wanted, setWanted] = useState("");
  const [needle, setNeedle] = useState("");
  const [at, setAt] = useState(0);
  const handle = useRef();
  const items = useMemo(() => itemsOf(trajectory, chain), [trajectory, chain, length, trajectory.unread]);
  const all = running ? [...items, { key: "now", live: true }] : items;
  useEffect(() => {
    const later = setTimeout(() => setNeedle(wanted.toLowerCase()), FIND_AFTER_MS);
    return () => clearTimeout(later);
  }, [wanted]);
  const found = useMemo(() => items.flatMap((item, place) => (needle && searched(item).includes(needle) ? [place] : [])), [needle, items]);
  useEffect(() => {
    setAt(0);
    if (found.length) handle.current(found[0]);
  }, [found]);
  const go = (step) => {
    if (!found.length) return;
    const next = (at + step + found.length) % found.length;
    setAt(next);
    handle.current(found[next]);
  };
  useEffect(() => mark(null), [needle, at]);
  useEffect(() => {
    const key = (event) => {
      const step = { j: 1, k: -1 }[event.key];
      if (!step || event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, dialog")) return;
      const next = Math.max(0, Math.min(items.length - 1, topItem() + step));
      handle.current(next);
    };
    addEventListener("keydown", key);
    return () => removeEventListener("keydown", key);
  }, [items]);
  return html`<section class="conversation" aria-label="conversation">
    <div class="toolbar">
      <${Find} what="Find in the conversation" value=${wanted} onInput=${setWanted} onGo=${go}
        said=${needle && (found.length ? `${at + 1} of ${found.length} messages` : "none")} />
      <span class="quiet">${exact(items.length)} messages, ${exact(chain.turns)} turns</span>
    </div>
    <${VirtualList} items=${all} estimate=${estimate} handle=${handle} follow=${running} label="messages"
      render=${(item, place) => item.live
        ? html`<${Now} output=${output} state=${state} />`
        : html`<${Message} item=${item} trajectory=${trajectory} chain=${chain} onTokens=${onTokens}
            found=${found[at] === place ? needle : null} />`} />
  </section>`;
}
