// Texts of token ids, by the digest of their tokenizer.
import { get } from "../api.js";

const MOST_SHOWN = 40;
const SYMBOLS = { "\n": "↵", "\t": "⇥" };
const HIDDEN = /[\u0000-\u001f\u007f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;
const kept = new Map();

export class Vocabulary {
  constructor(texts, loaded = false) {
    Object.assign(this, { texts, loaded });
    this.cells = new Map();
  }

  /** The text of an id; null where nothing is known, or where it is no whole character. */
  text(id) {
    const text = this.texts?.[id];
    return typeof text === "string" ? text : null;
  }

  /** Bytes of an id that is no whole character, as hexadecimal digits; else null. */
  bytes(id) {
    return this.texts?.[id]?.bytes ?? null;
  }

  /** What a cell shows of an id. */
  cell(id) {
    let cell = this.cells.get(id);
    if (cell === undefined) this.cells.set(id, (cell = this.made(id)));
    return cell;
  }

  made(id) {
    const text = this.text(id);
    if (text === null) return this.bytes(id) ? `⟨${this.bytes(id)}⟩` : String(id);
    const short = text.length > MOST_SHOWN ? `${text.slice(0, MOST_SHOWN - 1)}…` : text;
    if (/^ +$/.test(short)) return "·".repeat(short.length);
    return short.replace(HIDDEN, named) || "∅";
  }
}

function named(character) {
  return SYMBOLS[character] ?? `⟨${character.charCodeAt(0).toString(16).padStart(2, "0")}⟩`;
}

/** The vocabulary of a digest. One without texts, where the service has none, shows ids. */
export function loadVocabulary(digest) {
  if (!digest) return Promise.resolve(new Vocabulary(null));
  if (!kept.has(digest)) {
    const asked = get(`/v1/tokenizers/${encodeURIComponent(digest)}`).catch(() => ({ texts: null })).then(({ texts }) => {
      if (!texts) kept.delete(digest); // a worker may write them yet
      return new Vocabulary(texts, true);
    });
    kept.set(digest, asked);
  }
  return kept.get(digest);
}
