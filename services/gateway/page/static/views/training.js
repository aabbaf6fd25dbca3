// What trainers report of their steps: a chart for each metric, runs laid over each other.
import {
  html, useState, useEffect, useMemo, useRef, Ago, Answered, count, digits, Empty, Head, headings, Loading, plural, Tabs, useGet, useLive, useSoon,
} from "../ui.js";
import { get, hashOf } from "../api.js";
import uPlot from "../vendor/uplot.js";

const MOST_RUNS = 6; // laid over each other; colours and dashes tell no more apart
const DASHES = [[], [6, 3], [2, 3], [8, 3, 2, 3], [12, 4], [4, 2]];
const HEIGHT = 180;
const TABLE_ROWS = 200;
const SMOOTH = { none: 0, some: 0.7, strong: 0.95 };
const FIRST = [/reward/i, /gap/i, /stale/i, /kl|entropy/i]; // what is looked at first
const FIRST_REPORT = 'client.report(step, {"reward": reward, "staleness": staleness}, run="my-run")';
const hover = uPlot.sync("training"); // one cursor over all charts

const colour = (i) => getComputedStyle(document.documentElement).getPropertyValue(`--c${i + 1}`).trim();

function byInterest(a, b) {
  const rank = (name) => FIRST.findIndex((pattern) => pattern.test(name)) >>> 0; // -1 goes last
  return rank(a) - rank(b) || (a < b ? -1 : 1);
}

/** A metric of a report, or null: names are the trainer's, and `constructor` is one, too. */
const valueOf = (report, name) => (Object.hasOwn(report.metrics, name) ? report.metrics[name] : null);

/** Exponential moving average that begins unbiased; gaps stay gaps. */
function smoothed(values, weight) {
  let sum = 0, norm = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return null;
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}

/** One metric of some runs. `runs`: `[{run, place, steps, values}]`. */
function Chart({ name, runs, smooth }) {
  const box = useRef();
  const [at, setAt] = useState(null);
  const [theme, setTheme] = useState(0);
  useEffect(() => {
    const look = () => setTheme((n) => n + 1);
    addEventListener("themechange", look);
    return () => removeEventListener("themechange", look);
  }, []);
  const data = useMemo(() => uPlot.join(runs.map((one) => [one.steps, one.values])), [runs]);
  const chart = useRef();
  const drawn = () => [data[0], ...data.slice(1).flatMap((values) => (smooth ? [values, smoothed(values, smooth)] : [values]))];
  useEffect(() => {
    const style = getComputedStyle(document.documentElement);
    const value = (variable) => style.getPropertyValue(variable).trim();
    const axis = {
      stroke: value("--muted"), font: `11px ${value("--font")}`, grid: { stroke: value("--line"), width: 1 }, ticks: { show: false },
    };
    const line = (one, extra) => ({
      stroke: colour(one.place), width: 1.5, dash: DASHES[one.place], spanGaps: true, points: { show: one.steps.length < 3 }, ...extra,
    });
    const plot = new uPlot({
      width: box.current.clientWidth, height: HEIGHT, padding: [8, 8, 0, 0],
      scales: { x: { time: false } },
      axes: [{ ...axis, size: 26, space: 70 }, { ...axis, size: 52, space: 32, values: (_, ticks) => ticks.map(digits) }],
      series: [{}, ...runs.flatMap((one) => (smooth ? [line(one, { alpha: 0.25, width: 1 }), line(one)] : [line(one)]))],
      legend: { show: false },
      cursor: { sync: { key: hover.key }, y: false, points: { size: 6 }, drag: { x: true, y: false } },
      hooks: { setCursor: [(u) => setAt(u.cursor.idx ?? null)] },
    }, drawn(), box.current);
    chart.current = plot;
    const sized = new ResizeObserver(() => plot.setSize({ width: box.current.clientWidth, height: HEIGHT }));
    sized.observe(box.current);
    return () => {
      sized.disconnect();
      plot.destroy();
      chart.current = null;
    };
  }, [theme, smooth, runs.map((one) => one.run).join()]);
  useEffect(() => chart.current?.setData(drawn()), [data]);

  const last = (values) => values.findLast((value) => value !== null && value !== undefined);
  const shown = runs.map((one, i) => ({ run: one.run, place: one.place, value: last(at === null ? data[i + 1] : data[i + 1].slice(0, at + 1)) }));
  const step = at === null ? null : data[0][at];
  return html`<figure class="card chart">
    <figcaption><h2 class="clip" title=${name}>${name}</h2><span class="quiet small num">${step === null ? "last" : `step ${count(step)}`}</span>
      <span class="chart-values">${shown.map((one) => html`<span key=${one.run} title=${one.run}><${Swatch} place=${one.place} />
        <b class="num">${digits(one.value)}</b></span>`)}</span></figcaption>
    <div class="plot" ref=${box} role="img" aria-label="${name} by step: ${shown.map((one) => `${one.run} ${digits(one.value)}`).join(", ")}"></div>
  </figure>`;
}

/** The line of a run: its colour and its dashes. */
const Swatch = ({ place }) => html`<svg width="22" height="8" aria-hidden="true"><line x1="0" y1="4" x2="22" y2="4" class="swatch"
  style=${{ stroke: `var(--c${place + 1})` }} stroke-dasharray=${DASHES[place].join(" ")} /></svg>`;

/** The reports of some runs, kept as they come: `{run: reports}`, whatever a run is called. */
function useReports(names) {
  const [all, setAll] = useState(Object.create(null));
  const [error, setError] = useState(null);
  const busy = useRef(new Set());
  const load = (run) => {
    if (busy.current.has(run)) return;
    busy.current.add(run);
    get(`/v1/reports/${encodeURIComponent(run)}`).then(
      (answer) => setAll((old) => Object.assign(Object.create(null), old, { [run]: answer.reports })), setError,
    ).finally(() => busy.current.delete(run));
  };
  useEffect(() => names.filter((run) => !all[run]).forEach(load), [names.join()]);
  return { all, error, load };
}

function Steps({ run, reports, names }) {
  return html`<section class="card flush" aria-label="Steps of ${run}">
    <header><h2>${run}</h2><span class="quiet small">the latest ${TABLE_ROWS} of ${plural(reports.length, "step")}</span></header>
    <div class="scroll" tabindex="0" role="group" aria-label="Steps of ${run}, scrolls sideways"><table class="list">
      ${headings(["Step", "right"], "Version", ...names.map((name) => [name, "right"]), ["Reported", "right"])}
      <tbody>${reports.slice(-TABLE_ROWS).reverse().map((one) => html`<tr key=${one.step}>
        <td class="right num">${count(one.step)}</td><td class="mono">${one.policy_version ?? "–"}</td>
        ${names.map((name) => html`<td class="right num" key=${name}>${digits(valueOf(one, name))}</td>`)}
        <td class="right quiet"><${Ago} at=${one.at} /></td></tr>`)}</tbody></table></div></section>`;
}

function Runs({ runs, query, status }) {
  const known = runs.map((one) => one.run);
  const chosen = (query.runs ? query.runs.split(",") : known.slice(0, 1)).filter((run) => known.includes(run)).slice(0, MOST_RUNS);
  const { all, error, load } = useReports(chosen);
  const [tab, setTab] = useState("charts");
  const [smooth, setSmooth] = useState("none");
  const [match, setMatch] = useState("");
  useEffect(() => chosen.forEach(load), [runs]); // the list is asked for again when something was reported
  const toggle = (run) => {
    const next = chosen.includes(run) ? chosen.filter((one) => one !== run) : [...chosen, run].slice(-MOST_RUNS);
    location.hash = hashOf(["training"], { ...query, runs: next.join(",") });
  };
  const here = chosen.filter((run) => all[run]?.length);
  const names = useMemo(() => {
    const every = here.flatMap((run) => all[run].flatMap((one) => Object.keys(one.metrics)));
    return [...new Set(every)].sort(byInterest);
  }, [all, here.join()]);
  const series = useMemo(() => {
    const of = (name) => here.filter((run) => all[run].some((one) => valueOf(one, name) !== null)).map((run) => ({
      run, place: chosen.indexOf(run), steps: all[run].map((one) => one.step), values: all[run].map((one) => valueOf(one, name)),
    }));
    return Object.fromEntries(names.map((name) => [name, of(name)]));
  }, [names]);
  const wanted = names.filter((name) => name.toLowerCase().includes(match.toLowerCase()));
  return html`
    <div class="chips" role="group" aria-label="Runs">${runs.map((one) => html`<button type="button" class="chip" key=${one.run}
      aria-pressed=${String(chosen.includes(one.run))} onClick=${() => toggle(one.run)}>
      ${chosen.includes(one.run) && html`<${Swatch} place=${chosen.indexOf(one.run)} />`}<span>${one.run}</span>
      <span class="quiet">${one.last ? `step ${count(one.last.step)}` : plural(one.reports, "step")} · <${Ago} at=${one.updated_at} />
      </span></button>`)}</div>
    <div class="row spread">
      <${Tabs} label="How to show it" selected=${tab} onSelect=${setTab} tabs=${[
        { id: "charts", label: "Charts", count: names.length }, { id: "table", label: "Table" }]} />
      <div class="filters"><input type="text" placeholder="Metric" aria-label="Only metrics whose names contain" value=${match}
          onInput=${(event) => setMatch(event.target.value)} />
        <select aria-label="Smoothing" value=${smooth} onChange=${(event) => setSmooth(event.target.value)}>
          <option value="none">not smoothed</option><option value="some">smoothed</option>
          <option value="strong">smoothed strongly</option></select></div></div>
    ${error && html`<p class="wrong" role="alert">${error.detail || error.message}</p>`}
    ${!chosen.length && html`<section class="card"><${Empty} title="No run is chosen">Choose one above.<//></section>`}
    ${chosen.length > 0 && !here.length && !error && html`<${Loading} what="Loading the steps" />`}
    <div role="tabpanel" id="panel-${tab}" aria-labelledby="tab-${tab}">${tab === "charts"
      ? html`<div class="charts">${wanted.map((name) => html`<${Chart} key=${name} name=${name} runs=${series[name]}
          smooth=${SMOOTH[smooth]} />`)}</div>`
      : html`<div class="stack">${here.map((run) => html`<${Steps} key=${run} run=${run} reports=${all[run]} names=${wanted} />`)}</div>`}</div>`;
}

export function TrainingView({ query }) {
  const answer = useGet("/v1/reports");
  const look = useSoon(answer.reload, 1000);
  const status = useLive({ topics: "reports" }, { changed: ({ what }) => what === "report" && look() });
  return html`<${Head} title="Training" status=${status} />
    <${Answered} answer=${answer} what="Loading runs">${({ runs }) => runs.length
      ? html`<${Runs} runs=${runs} query=${query} />`
      : html`<section class="card"><${Empty} title="No trainer has reported yet" command=${FIRST_REPORT}>
          After each step of your trainer, in Python:<//></section>`}<//>`;
}
