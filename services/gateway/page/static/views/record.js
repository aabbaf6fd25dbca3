// A rollout's answer as the page works with it: JSON, and chains whose tokens are typed arrays.
//
// The form is that of rollout/arrays.py. Numbers stay in arrays from the wire to the screen: a list of objects for
// 128,000 tokens would cost more than all the rest of the view.
import { decode } from "../vendor/messagepack.js";

const ANSWER_VERSION = 2;
const RECORD_VERSION = 1;
const WIDTHS = { 4: Float32Array, 8: Float64Array };

/** One chain: all its ids, a log-prob for each, and the segments that say what they are. */
export class Chain {
  constructor({ role = "agent", parent = null, policy = null, tokenizer = null, trained = null, texts = [] } = {}, index = 0) {
    Object.assign(this, { role, parent, policy, tokenizer, trained, texts });
    Object.assign(this, { index, segments: [], length: 0, sampled: 0, turns: 0 });
    this.ids = new Int32Array(0);
    this.logprobs = new Float64Array(0);
  }

  /** Take a segment's ids, and its log-probs where it was sampled (otherwise null). */
  append(segment, ids, logprobs, version) {
    const start = this.length;
    this.grow(start + ids.length);
    this.ids.set(ids, start);
    if (segment.sampled && logprobs) this.logprobs.set(logprobs, start);
    this.enter(segment, ids.length, version);
  }

  /** Enter a segment whose numbers are in the arrays. */
  enter(segment, tokens, version) {
    const last = this.segments[this.segments.length - 1];
    const goesOn = segment.sampled && last?.sampled && last.call_id === segment.call_id;
    if (segment.sampled && !goesOn) this.turns += 1;
    if (segment.sampled) this.sampled += tokens;
    this.segments.push({
      ...segment, token_ids: undefined, logprobs: undefined, messages: segment.messages ?? [], goesOn,
      index: this.segments.length, start: this.length, end: this.length + tokens, turn: this.turns,
      version: segment.sampled ? version : -1,
    });
    this.length += tokens;
  }

  grow(length) {
    if (length <= this.ids.length) return;
    const room = Math.max(length, 2 * this.ids.length, 1024);
    for (const name of ["ids", "logprobs"]) {
      const wider = new this[name].constructor(room);
      wider.set(this[name].subarray(0, this.length));
      this[name] = wider;
    }
  }

  /** The segment that a position lies in. */
  at(position) {
    let [low, high] = [0, this.segments.length - 1];
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.segments[middle].start <= position) low = middle;
      else high = middle - 1;
    }
    return this.segments[low];
  }

  /** Mean log-prob of a range, NaN where nothing is in it. */
  mean(start, end) {
    let sum = 0;
    for (let at = start; at < end; at++) sum += this.logprobs[at];
    return sum / (end - start);
  }
}

/** Number of ids that two chains have in common from their beginnings. */
export function commonPrefix(one, other) {
  const most = Math.min(one.length, other.length);
  let at = 0;
  while (at < most && one.ids[at] === other.ids[at]) at++;
  return at;
}

/** All chains of a rollout, and what else its record says. */
export class Trajectory {
  constructor(document = {}) {
    Object.assign(this, { warnings: [], unread: [], artifacts: {}, calls: [], ...document, chains: [], versions: [] });
  }

  /** From JSON with lists, as running rollouts come. */
  static fromLists(document) {
    const trajectory = new Trajectory(document);
    (document.chains ?? []).forEach((chain, index) => {
      trajectory.chains.push(new Chain(chain, index));
      chain.segments.forEach((segment) => trajectory.append(index, segment));
    });
    return trajectory;
  }

  static async fromRecord(record) {
    readable("record", record.v, RECORD_VERSION);
    const document = JSON.parse(typeof record.document === "string" ? record.document : await inflate(record.document));
    const trajectory = new Trajectory(document);
    trajectory.versions = record.versions;
    trajectory.chains = record.chains.map((packed, index) => {
      const chain = new Chain(document.chains[index], index);
      chain.ids = view(packed.ids, Int32Array);
      packed.runs.forEach(([tokens, version], at) => chain.enter(document.chains[index].segments[at], tokens, version));
      const sampled = view(packed.logprobs, WIDTHS[packed.width]);
      chain.logprobs = new Float64Array(chain.length);
      chain.logprobs.set(sampled, chain.length - sampled.length);
      return chain;
    });
    return trajectory;
  }

  versionIndex(version) {
    const at = this.versions.indexOf(version);
    return at >= 0 ? at : this.versions.push(version) - 1;
  }

  append(place, segment) {
    const version = segment.sampled ? this.versionIndex(segment.policy_version ?? null) : -1;
    this.chains[place].append(segment, segment.token_ids, segment.logprobs, version);
  }

  /** Take live pieces; false: something is missing before them, and the whole must be fetched. */
  take(pieces) {
    for (const { chain, place, segment } of pieces) {
      if (chain > this.chains.length) return false;
      if (chain === this.chains.length) this.chains.push(new Chain({}, chain));
      const known = this.chains[chain].segments.length;
      if (place > known) return false;
      if (place === known) this.append(chain, segment);
    }
    if (pieces.length) this.unread = [];
    return true;
  }

  /** The sum of a number of the agent's chains: `length`, `sampled`, `turns`. */
  total(name) {
    return this.chains.reduce((sum, chain) => sum + (chain.policy === null ? chain[name] : 0), 0);
  }

  /** Of a fork: ids at the beginning of a chain that it shares with the rollout that it left. */
  sharedOf(chain) {
    let left = this.branch?.tokens ?? 0;
    for (const each of this.chains) {
      if (each.policy !== null) continue;
      if (each === chain) return Math.min(left, each.length);
      left = Math.max(0, left - each.length);
    }
    return 0;
  }

  /** The number of a segment's turn, those before it in a fork's source included. */
  turnOf(chain, segment) {
    return segment.turn + (this.sharedOf(chain) ? this.branch.turn : 0);
  }

  /** The part of a tokenizer's name by which its texts are kept: of a chain's, or the agent's. */
  digestOf(chain) {
    const tokenizer = chain?.tokenizer ?? this.tokenizer;
    return tokenizer ? tokenizer.slice(tokenizer.lastIndexOf("@") + 1) : null;
  }

  get digest() {
    return this.digestOf(null);
  }
}

function readable(what, version, newest) {
  if (version > newest) throw new Error(`This ${what} has version ${version}; this page reads up to ${newest}: load it anew.`);
}

function view(raw, Numbers) {
  const bytes = raw instanceof ArrayBuffer ? new Uint8Array(raw) : raw;
  // A copy: what lies in the middle of an answer begins at no multiple of four.
  return new Numbers(bytes.slice().buffer);
}

async function inflate(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).text();
}

/** The rollout of an answer about one: `{rollout, trajectory}`, the latter null where there is none. */
export async function readRollout(bytes) {
  if (bytes[0] === 0x7b) return withLists(JSON.parse(new TextDecoder().decode(bytes))); // it is JSON
  const answer = decode(bytes);
  readable("answer", answer.v, ANSWER_VERSION);
  const rollout = JSON.parse(answer.json);
  if (!answer.records.length) return withLists(rollout);
  return { rollout, trajectory: await Trajectory.fromRecord(answer.records[0]) };
}

function withLists(rollout) {
  return { rollout, trajectory: rollout.trajectory ? Trajectory.fromLists(rollout.trajectory) : null };
}

/** A short name of a policy version, which works without colour: A, B, … Z, A1, … */
export function letter(version) {
  return version < 0 ? "–" : String.fromCharCode(65 + (version % 26)) + (version >= 26 ? Math.floor(version / 26) : "");
}
