// Untrusted text for the screen: what cannot be seen is named, and what is long is cut until somebody asks for more.
import { html, useState } from "../ui.js";

const CONTROL = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f]/g;
const INVISIBLE = /[\u200b-\u200f\u061c\u202a-\u202e\u2060-\u2069\ufeff]/g;
const FIRST_CHARS = 4000;
const FIRST_LINES = 40;
/** Of a line as long as is read well; a text of one line is cut, too. */
const LINE_CHARS = 100;
const MORE_CHARS = 64_000;
const MORE_LINES = 1000;
/** Characters of one text that the page lays out at most; beyond, it is a file to save. */
const MOST_CHARS = 512_000;

/** A text whose control and bidi characters can be seen, and act on nothing around them. */
export function visible(text) {
  return text
    .replace(CONTROL, (c) => `⟨${c.charCodeAt(0).toString(16).padStart(2, "0")}⟩`)
    .replace(INVISIBLE, (c) => `⟨U+${c.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);
}

/** Position behind so many lines and characters of a text, or before them where `from` is its end. */
function edge(text, chars, lines, back) {
  let at = back ? text.length : 0;
  for (let line = 0; line < lines; line++) {
    const next = back ? text.lastIndexOf("\n", at - 1) : text.indexOf("\n", at);
    if (next < 0 || (back && at === 0)) return back ? Math.max(0, text.length - chars) : Math.min(text.length, chars);
    at = back ? next : next + 1;
  }
  return back ? Math.max(at + 1, text.length - chars) : Math.min(at, chars);
}

/** A text's beginning and its end, with the share of both that is the beginning's: `{head, tail, hidden}`. */
export function cut(text, chars, lines, share = 1) {
  if (text.length <= chars && edge(text, chars, lines, false) >= text.length) return { head: text, tail: "", hidden: 0 };
  const end = whole(text, edge(text, Math.floor(chars * share), Math.ceil(lines * share), false));
  const rest = 1 - share;
  const begin = rest ? whole(text, edge(text, Math.floor(chars * rest), Math.floor(lines * rest), true)) : text.length;
  return { head: text.slice(0, end), tail: text.slice(Math.max(end, begin)), hidden: Math.max(0, begin - end) };
}

/** Not in the middle of a surrogate pair. */
function whole(text, at) {
  const code = text.charCodeAt(at);
  return code >= 0xdc00 && code <= 0xdfff ? at + 1 : at;
}

const asked = new WeakMap();

/** How much of an object's text somebody asked for: kept beside it, for virtual lists forget what they do not show. */
export function useMore(owner, name, lines = FIRST_LINES) {
  const [size, setSize] = useState((owner && asked.get(owner)?.get(name)) ?? { chars: Math.min(FIRST_CHARS, lines * LINE_CHARS), lines });
  const more = () => {
    const next = { chars: Math.min(MOST_CHARS, size.chars + MORE_CHARS), lines: size.lines + MORE_LINES };
    if (owner) asked.set(owner, new Map(asked.get(owner)).set(name, next));
    setSize(next);
  };
  return [size, more];
}

/** A text as it is, cut until more of it is asked for. */
export function Words({ text, owner = null, name = "text", kind = "", lines }) {
  const [size, more] = useMore(owner, name, lines);
  const { head, hidden } = cut(text, size.chars, size.lines);
  return html`<div class="words ${kind}" dir="auto">${visible(head)}${hidden > 0 &&
    html`<${More} hidden=${hidden} text=${text} more=${size.chars < MOST_CHARS && more} name=${name} />`}</div>`;
}

export function More({ hidden, text, more, name }) {
  const whole = () => save(new Blob([text], { type: "text/plain" }), `${name}.txt`);
  return html`<span class="more">… ${exact(hidden)} more characters
    ${more && html`<button type="button" class="bare" onClick=${more}>Show more</button>`}
    ${text.length > MORE_CHARS && html`<button type="button" class="bare" onClick=${whole}>Save all</button>`}</span>`;
}

/** A field to find something: Enter goes to the next, with Shift to the one before; `said` is what there is. */
export function Find({ what, value, onInput, onGo, said }) {
  const key = (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault();
    onGo(event.shiftKey ? -1 : 1);
  };
  return html`<div class="find" role="search" aria-label="find in this view">
    <input type="search" placeholder=${what} aria-label=${what} value=${value} onInput=${(event) => onInput(event.target.value)} onKeyDown=${key} />
    ${said && html`<output class="quiet">${said}</output>`}</div>`;
}

/** Give a file to the browser. */
export function save(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name.replace(/[^\w.-]+/g, "_");
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** A whole number with all its digits. */
export const exact = (number) => (number == null ? "–" : Math.round(number).toLocaleString("en"));

/** A number with so many decimals; a minus is a minus, and nothing below zero is not zero. */
export function fixed(number, digits = 3) {
  if (number == null || Number.isNaN(number)) return "–";
  const text = number.toFixed(digits);
  return Number(text) === 0 ? text.replace("-", "") : text.replace("-", "−");
}
