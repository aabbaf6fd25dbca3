// Tokens of one chain: the strip, its legend, its search, and what is known of the token that one looks at.
import { html, useEffect, useMemo, useRef, useState } from "../ui.js";
import { letter } from "./record.js";
import { Strip } from "./strip.js";
import { Find, exact, fixed } from "./words.js";

const MOST_HITS = 10_000;
const MOST_NAMED = 12;
const UNLIKELY = Math.log(0.01);

/** Positions of what is looked for: a text, which may lie in several tokens, or `#` and an id. */
export function search(chain, vocabulary, wanted) {
  const found = [];
  if (/^#\d+$/.test(wanted)) {
    const id = Number(wanted.slice(1));
    for (let at = 0; at < chain.length && found.length < MOST_HITS; at++) if (chain.ids[at] === id) found.push([at, at]);
    return found;
  }
  const begins = new Int32Array(chain.length);
  const parts = [];
  let length = 0;
  for (let at = 0; at < chain.length; at++) {
    begins[at] = length;
    const text = (vocabulary.text(chain.ids[at]) ?? "\ufffd").toLowerCase();
    parts.push(text);
    length += text.length;
  }
  const all = parts.join("");
  const needle = wanted.toLowerCase();
  let token = 0;
  for (let at = all.indexOf(needle); at >= 0 && found.length < MOST_HITS; at = all.indexOf(needle, at + needle.length)) {
    while (token + 1 < chain.length && begins[token + 1] <= at) token++;
    let last = token;
    while (last + 1 < chain.length && begins[last + 1] < at + needle.length) last++;
    found.push([token, last]);
  }
  return found;
}

/** What stands beside the strip: what its colours and letters mean. */
export function Legend({ versions, mode = "version" }) {
  return html`<ul class="legend" aria-label="legend">
    ${mode === "version"
      ? versions.slice(0, MOST_NAMED).map((version, at) => html`<li><span class="swatch v${at % 8}">${letter(at)}</span>
          <span class="short">${version ?? "no version"}</span></li>`)
      : html`<li><span class="swatch heat"></span>unlikely (the bar below a token is its probability)</li>`}
    ${versions.length > MOST_NAMED && mode === "version" && html`<li>and ${versions.length - MOST_NAMED} more</li>`}
    <li><span class="swatch given"></span>given: masked, no loss</li>
  </ul>`;
}

function Facts({ chain, trajectory, vocabulary, at }) {
  if (at < 0 || at >= chain.length) {
    return html`<p class="quiet">Point at a token, or focus the strip and use the arrow keys; [ and ] go by segments.</p>`;
  }
  const segment = chain.at(at);
  const id = chain.ids[at];
  const text = vocabulary.text(id);
  const p = chain.logprobs[at];
  const facts = [
    ["text", text !== null ? JSON.stringify(text) : vocabulary.bytes(id) ? `bytes ${vocabulary.bytes(id)}` : "unknown"],
    ["id", id],
    ["log-prob", segment.sampled ? fixed(p, 4) : "–"],
    ["probability", segment.sampled ? `${fixed(100 * Math.exp(p), 2)} %` : "–"],
    ["mask", segment.sampled ? "1, sampled" : at < trajectory.sharedOf(chain) ? "0, shared" : "0, given"],
    ["version", segment.sampled ? `${letter(segment.version)} ${trajectory.versions[segment.version] ?? "unknown"}` : "–"],
    ["position", `${exact(at)}, ${exact(at - segment.start)} of its segment`],
    ["said by", segment.sampled ? `${segment.role}, turn ${trajectory.turnOf(chain, segment)}` : segment.role],
    ["call", segment.call_id ?? "–"],
  ];
  return html`<dl class="facts">
    ${facts.map(([name, value]) => html`<div class=${`fact-${name.replace(" ", "-")}`}><dt>${name}</dt><dd dir="ltr">${value}</dd></div>`)}
  </dl>`;
}

/** The strip of a chain; `length` makes it look again when the chain has grown. `onChoose(position)` is told. */
export function Tokens({ trajectory, chain, length, vocabulary, at = -1, onChoose }) {
  const [scroller, canvas, map, strip] = [useRef(), useRef(), useRef(), useRef()];
  const [mode, setMode] = useState("version");
  const [hovered, setHovered] = useState(-1);
  const [chosen, setChosen] = useState(at);
  const [wanted, setWanted] = useState("");
  const [hit, setHit] = useState(0);
  const tell = useRef();
  tell.current = onChoose;

  useEffect(() => {
    strip.current = new Strip({
      scroller: scroller.current, canvas: canvas.current, map: map.current, letter,
      shown(position, why) {
        if (why === "hover") return setHovered(position);
        setChosen(position);
        tell.current?.(position);
      },
    });
    return () => strip.current.close();
  }, []);
  useEffect(() => {
    setChosen(at);
    strip.current.show(chain, vocabulary);
    if (at >= 0 && at < chain.length) strip.current.choose(at, true);
  }, [chain, vocabulary]);
  useEffect(() => strip.current.resize(), [length]);
  useEffect(() => strip.current.set({ mode }), [mode]);

  const found = useMemo(() => (wanted ? search(chain, vocabulary, wanted) : []), [wanted, chain, vocabulary, length]);
  useEffect(() => {
    const hits = new Set();
    for (const [first, last] of found) for (let each = first; each <= last; each++) hits.add(each);
    strip.current.set({ hits: hits.size ? hits : null });
    setHit(0);
    if (found.length) strip.current.choose(found[0][0], true);
  }, [found]);
  const go = (step) => {
    if (!found.length) return;
    const next = (hit + step + found.length) % found.length;
    setHit(next);
    strip.current.choose(found[next][0], true);
  };
  const surprise = () => {
    for (let step = 1; step <= chain.length; step++) {
      const next = (Math.max(chosen, -1) + step) % chain.length;
      if (chain.logprobs[next] < UNLIKELY && chain.at(next).sampled) return strip.current.choose(next, true);
    }
    return null;
  };

  const shown = hovered >= 0 ? hovered : chosen;
  const words = `Tokens of chain ${chain.index}: ${exact(chain.length)}. Arrow keys go from token to token.`;
  return html`<section class="tokens" aria-label="tokens">
    <div class="toolbar">
      <span class="choice" role="group" aria-label="colour by">
        ${[["version", "Version"], ["logprob", "Log-prob"]].map(([name, title]) =>
          html`<button type="button" aria-pressed=${mode === name} onClick=${() => setMode(name)}>${title}</button>`)}
      </span>
      <button type="button" class="bare" title="The next sampled token with a probability below 1 %" onClick=${surprise}>Next unlikely</button>
      <${Find} what="Find text or #id" value=${wanted} onInput=${setWanted} onGo=${go}
        said=${wanted && (found.length ? `${hit + 1} of ${exact(found.length)}` : "none")} />
      <${Legend} versions=${trajectory.versions} mode=${mode} />
    </div>
    ${vocabulary.loaded && !vocabulary.texts && html`<p
      class="note">Ids are shown, for the service has no texts of this tokenizer: a worker writes them when it loads it.</p>`}
    <div class="strip-frame">
      <div class="strip" ref=${scroller} tabindex="0" role="application" aria-label=${words}>
        <div class="strip-all"><canvas ref=${canvas} aria-hidden="true"></canvas></div>
      </div>
      <canvas class="strip-map" ref=${map} aria-hidden="true"></canvas>
    </div>
    <div class="strip-facts" aria-live=${hovered >= 0 ? "off" : "polite"}>
      <${Facts} chain=${chain} trajectory=${trajectory} vocabulary=${vocabulary} at=${shown} />
    </div>
  </section>`;
}
