// When what happened: stages, model calls and tool calls as swimlanes, attempts as bands behind them.
import { ENDED_STATES, html, span, useEffect, useMemo, useNow, useRef, useState } from "../ui.js";
import { exact } from "./words.js";

const ENDED = new Set(ENDED_STATES);
const LANES = { waiting: "waiting", init: "INIT", run: "RUN", eval: "EVAL", model: "model", tool: "tools" };
const STAGE_OF = { initializing: "init", running: "run", evaluating: "eval" };
const HEIGHT = 18;
const TOP = 30;
const MOST_ROWS = 6;
const MOST_LISTED = 200;

/** Stages of a record as bars; a claim raises the fence, and a stage without one is waited for. */
export function stagesOf(rollout, now) {
  const bars = [];
  const events = rollout.timeline ?? [];
  events.forEach((event, place) => {
    if (ENDED.has(event.state)) return;
    const claimed = event.fence > (events[place - 1]?.fence ?? 0);
    const lane = (claimed && STAGE_OF[event.state]) || "waiting";
    const end = events[place + 1]?.at ?? rollout.finished_at ?? now;
    const what = lane === "waiting" ? `waiting, ${event.state}` : event.state;
    bars.push({ ...event, lane, start: event.at, end, label: what, owner: claimed ? event.owner : null });
  });
  return bars;
}

function callsOf(calls) {
  return (calls ?? []).map((call) => ({
    call, lane: call.kind, start: call.at, end: call.at + call.seconds,
    label: call.name || (call.kind === "tool" ? "tool" : "model call"),
  }));
}

/** Bars in rows of their lane, so that none hides another that ran beside it. */
function stacked(bars) {
  const lanes = [];
  let y = TOP;
  for (const [lane, title] of Object.entries(LANES)) {
    const rows = [];
    const mine = bars.filter((bar) => bar.lane === lane).sort((one, other) => one.start - other.start);
    for (const bar of mine) {
      let row = rows.findIndex((end) => end <= bar.start + 1e-4);
      if (row < 0) row = Math.min(rows.length, MOST_ROWS - 1);
      rows[row] = Math.max(rows[row] ?? 0, bar.end);
      bar.y = y + row * (HEIGHT + 2);
    }
    if (mine.length || lane !== "eval") lanes.push({ lane, title, y, empty: !mine.length });
    y += Math.max(1, rows.length) * (HEIGHT + 2) + 8;
  }
  return { lanes, height: y };
}

/** Times at which a scale of about so many marks has them. */
export function ticks(from, to, about) {
  const rough = (to - from) / Math.max(1, about);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough) ?? 10 * power;
  const marks = [];
  for (let at = Math.ceil(from / step) * step; at <= to && marks.length < 100; at += step) marks.push(at);
  return marks;
}

function describe(bar) {
  const parts = [bar.label, span(bar.end - bar.start)];
  if (bar.attempt) parts.push(`attempt ${bar.attempt}, fence ${bar.fence}`);
  if (bar.owner) parts.push(bar.owner);
  const { call } = bar;
  if (call?.prompt_tokens != null) parts.push(`prompt ${exact(call.prompt_tokens)}`);
  if (call?.cached_tokens != null) parts.push(`${exact(call.cached_tokens)} of it cached`);
  if (call?.backend) parts.push(call.backend);
  return parts.join(" · ");
}

function Bar({ bar, x, wide, onShow }) {
  const { call } = bar;
  const cached = call?.prompt_tokens ? Math.min(1, (call.cached_tokens ?? 0) / call.prompt_tokens) : 0;
  return html`<g class="lane-bar in-${bar.lane} ${wide < 4 ? "thin" : ""}" onMouseEnter=${() => onShow(bar)} onMouseLeave=${() => onShow(null)}>
    <rect x=${x} y=${bar.y} width=${wide} height=${HEIGHT} rx="2" />
    ${cached > 0 && html`<rect class="cached" x=${x} y=${bar.y + HEIGHT - 4} width=${wide * cached} height="4" />`}
    ${wide > 8 * bar.label.length + 8 && html`<text x=${x + 5} y=${bar.y + 13}>${bar.label}</text>`}
  </g>`;
}

export function Lanes({ rollout, calls, running }) {
  const now = useNow(running);
  const frame = useRef();
  const [width, setWidth] = useState(0);
  const [window_, setWindow] = useState(null);
  const [shown, setShown] = useState(null);
  const bars = useMemo(() => [...stagesOf(rollout, now), ...callsOf(calls)], [rollout, calls, calls?.length, running ? now : 0]);
  const { lanes, height } = useMemo(() => stacked(bars), [bars]);
  const start = rollout.created_at;
  const end = Math.max(start + 0.01, rollout.finished_at ?? now, ...bars.slice(-50).map((bar) => bar.end));
  const [from, to] = window_ ?? [start, end];
  const left = width < 520 ? 56 : 80;
  const room = Math.max(50, width - left - 6);
  const x = (at) => left + ((at - from) / (to - from)) * room;

  useEffect(() => {
    const resized = new ResizeObserver(() => setWidth(frame.current?.clientWidth ?? 0));
    resized.observe(frame.current);
    return () => resized.disconnect();
  }, []);
  const zoom = (factor, share = 0.5) => {
    const middle = from + share * (to - from);
    const wide = Math.min(end - start, Math.max(0.005, (to - from) * factor));
    move(middle - share * wide, wide);
  };
  const move = (begin, wide = to - from) => {
    const first = Math.max(start, Math.min(end - wide, begin));
    setWindow(wide >= (end - start) * 0.999 ? null : [first, first + wide]);
  };
  const wheel = (event) => {
    if (!event.ctrlKey && !event.metaKey && !event.shiftKey) return;
    event.preventDefault();
    const by = event.deltaY || event.deltaX;
    const share = (event.clientX - frame.current.getBoundingClientRect().left - left) / room;
    if (event.shiftKey) move(from + (by / room) * (to - from));
    else zoom(by > 0 ? 1.25 : 0.8, Math.max(0, Math.min(1, share)));
  };
  const drag = (event) => event.buttons === 1 && move(from - (event.movementX / room) * (to - from));
  const key = (event) => {
    const step = { ArrowLeft: -0.2, ArrowRight: 0.2 }[event.key];
    if (step) move(from + step * (to - from));
    else if (event.key === "+" || event.key === "=") zoom(0.6);
    else if (event.key === "-") zoom(1.6);
    else if (event.key === "0") setWindow(null);
    else return;
    event.preventDefault();
  };

  const bands = [];
  for (const event of rollout.timeline ?? []) {
    if (event.attempt !== bands[bands.length - 1]?.attempt) bands.push({ attempt: event.attempt, at: event.at });
  }
  const seen = bars.filter((bar) => bar.end >= from && bar.start <= to);
  const detail = shown
    ? `${describe(shown)} · begins ${span(shown.start - start)} after submission`
    : "Ctrl and the wheel, or + and −, zoom; drag, or the arrow keys, move.";
  return html`<section class="lanes" aria-label="timeline">
    <div class="toolbar">
      <button type="button" class="button" onClick=${() => zoom(0.5)} aria-label="zoom in">+</button>
      <button type="button" class="button" onClick=${() => zoom(2)} aria-label="zoom out">−</button>
      <button type="button" class="button" onClick=${() => setWindow(null)} disabled=${!window_}>Whole</button>
      <span class="lanes-detail" role="status">${detail}</span>
    </div>
    <div class="lanes-frame" ref=${frame} tabindex="0" role="application" aria-label="Swimlanes; the table below says the same"
      onKeyDown=${key} onPointerMove=${drag} onWheel=${wheel}>
      ${width > 0 && html`<svg width=${width} height=${height} aria-hidden="true">
        ${bands.map((band, place) => {
          const [begin, stop] = [Math.max(left, x(band.at)), Math.min(width, x(bands[place + 1]?.at ?? end))];
          return stop > begin && html`<g class="band ${place % 2 ? "odd" : ""}">
            <rect x=${begin} y="0" width=${stop - begin} height=${height} />
            ${stop - begin > 60 && html`<text x=${begin + 4} y="11">attempt ${band.attempt}</text>`}
          </g>`;
        })}
        ${ticks(from - start, to - start, room / 90).map((at) => html`<g class="tick">
          <line x1=${x(at + start)} x2=${x(at + start)} y1="16" y2=${height} />
          ${x(at + start) < width - 46 && html`<text x=${x(at + start) + 3} y="24">${at === 0 ? "0" : `${Number(at.toPrecision(6))} s`}</text>`}
        </g>`)}
        <svg x=${left} width=${room + 6} height=${height} viewBox="${left} 0 ${room + 6} ${height}">
          ${seen.map((bar) => html`<${Bar} bar=${bar} x=${x(bar.start)} wide=${Math.max(1.5, x(bar.end) - x(bar.start))} onShow=${setShown} />`)}
        </svg>
        ${lanes.map(({ title, y, empty }) => html`<text class="lane-name ${empty ? "empty" : ""}" x="4" y=${y + 13}>${title}</text>`)}
        ${(rollout.notes ?? []).filter((note) => note.at >= from && note.at <= to).map((note) => html`<path class="note-mark"
          d=${`M${x(note.at)} ${TOP - 8}l4 -5h-8z`}><title>${note.text}</title></path>`)}
      </svg>`}
    </div>
    <p class="legend-line"><span class="key in-waiting"></span>waiting <span class="key in-run"></span>stage <span
      class="key in-model"></span>model call, the dark foot is what was cached of its prompt <span
        class="key in-tool"></span>tool call <span aria-hidden="true">▾</span> note</p>
    ${!calls?.length && html`<p class="quiet">There are no times of single calls: nothing was called, or an older release recorded this rollout.</p>`}
    <${Listed} bars=${bars} start=${start} />
  </section>`;
}

function Listed({ bars, start }) {
  const [most, setMost] = useState(MOST_LISTED);
  const ordered = [...bars].sort((one, other) => one.start - other.start);
  return html`<details class="listed"><summary>As a table (${exact(bars.length)})</summary>
    <div class="table-frame" tabindex="0" role="group" aria-label="stages and calls"><table class="list">
      <thead><tr>${["after", "took", "prompt", "cached", "what", "by"].map((name, at) => html`<th scope="col" class=${at < 4 ? "right"
        : ""}>${name}</th>`)}</tr></thead>
      <tbody>${ordered.slice(0, most).map((bar) => html`<tr>
        <td class="right num">${span(bar.start - start)}</td><td class="right num">${span(bar.end - bar.start)}</td>
        <td class="right num">${exact(bar.call?.prompt_tokens)}</td><td class="right num">${exact(bar.call?.cached_tokens)}</td>
        <td>${bar.label}</td><td>${bar.call?.backend ?? bar.owner ?? "–"}</td></tr>`)}</tbody>
    </table></div>
    ${ordered.length > most && html`<button type="button" class="bare" onClick=${() => setMost(most + 1000)}>Show more</button>`}
  </details>`;
}
