// How a rollout came out: its reward and what scored it, each attempt and why it ended, and the receipt in words.
import { Copy, ENDED_STATES, Empty, StateMark, bytes, digits, html, span, useMemo, words } from "../ui.js";
import { Diff, isDiff } from "./diff.js";
import { Terminal } from "./terminal.js";
import { Words, exact, save } from "./words.js";

const ENDED = new Set(ENDED_STATES);
/** Characters of an artifact that is taken apart; a longer one is shown as text, cut. */
const MOST_READ = 2_000_000;
const MOST_DEPTH = 100;

/** Names and numbers. */
function Numbers({ values, signed = false }) {
  const names = Object.keys(values).sort();
  const most = Math.max(...names.map((name) => Math.abs(values[name])), 1e-9);
  return html`<table class="numbers"><tbody>
    ${names.map((name) => html`<tr><th scope="row">${name}</th><td class="right num">${digits(values[name])}</td>
      ${signed && html`<td class="numbers-bar" aria-hidden="true"><svg width="120" height="8"><rect class="rail" width="120" height="8" rx="2" />
        <rect class=${values[name] < 0 ? "below" : "level"} width=${(120 * Math.abs(values[name])) / most} height="8" rx="2" /></svg></td>`}</tr>`)}
  </tbody></table>`;
}

function Section({ title, children, note }) {
  return html`<section class="part"><h2>${title}${note && html` <span class="quiet">${note}</span>`}</h2>${children}</section>`;
}

/** An error with its blame; the traceback folds out. */
export function Fault({ error }) {
  return html`<div class="fault" role="group" aria-label="error">
    <p><b>${error.type}</b> <span class="tag">blame: ${error.blame}</span> ${error.stage && html`<span
      class="tag">in ${error.stage.toUpperCase()}</span>`}</p>
    <${Words} text=${error.message} owner=${error} />
    ${error.traceback && html`<details><summary>Traceback</summary><${Words} text=${error.traceback} owner=${error} name="traceback"
      kind="code" /></details>`}
  </div>`;
}

/** JSON with indents, which are a square of its depth: what is deeper than people write is left as it is. */
export function shownJson(text) {
  if (!/^\s*[[{]/.test(text) || text.length > MOST_READ) return null;
  let depth = 0;
  for (const [bracket] of text.matchAll(/[[{}\]]/g)) if ((depth += "[{".includes(bracket) ? 1 : -1) > MOST_DEPTH) return null;
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return null;
  }
}

function Artifact({ name, text, owner }) {
  const json = useMemo(() => shownJson(text), [text]);
  const body = text.length < MOST_READ && isDiff(text)
    ? html`<${Diff} text=${text} />`
    : json
      ? html`<${Words} text=${json} owner=${owner} name=${name} kind="code" />`
      : html`<${Terminal} text=${text} owner=${owner} name=${name} label=${`artifact ${name}`} />`;
  return html`<details class="artifact" open=${text.length < 20_000}>
    <summary><b>${name}</b> <span class="quiet">${bytes(text.length)}</span></summary>
    <div class="row"><${Copy} text=${text} label=${`Copy ${name}`} />
      <button type="button" class="bare" onClick=${() => save(new Blob([text], { type: "text/plain" }), name)}>Save</button></div>
    ${body}
  </details>`;
}

export function Outcome({ rollout, trajectory }) {
  const artifacts = Object.entries(trajectory?.artifacts ?? {}).sort(([one], [other]) => isFirst(other) - isFirst(one));
  const components = rollout.reward_components ?? {};
  return html`<div class="outcomes">
    <${Section} title="Reward">
      <p class="big">${rollout.drop ? "dropped" : digits(rollout.reward)}</p>
      ${rollout.drop && html`<p>It must not be trained on: <b>${rollout.drop_reason ?? "no reason given"}</b>.</p>`}
      ${!rollout.drop && rollout.reward == null && html`<p class="quiet">${ENDED.has(rollout.state) ? "It was not scored."
        : "It is not scored yet."}</p>`}
      ${Object.keys(components).length > 0 && html`<${Numbers} values=${components} signed />`}
      ${Object.keys(rollout.role_rewards ?? {}).length > 0 && html`<h3>Of other roles</h3><${Numbers} values=${rollout.role_rewards} signed />`}
    <//>
    ${rollout.error && html`<${Section} title="Error"><${Fault} error=${rollout.error} /><//>`}
    ${trajectory?.warnings.length > 0 && html`<${Section} title="Warnings"><ul class="warnings">${trajectory.warnings.map((line) =>
      html`<li>${line}</li>`)}</ul><//>`}
    ${artifacts.length > 0 && html`<${Section} title="Artifacts">${artifacts.map(([name, text]) => html`<${Artifact} key=${name}
      name=${name} text=${text} owner=${trajectory.artifacts} />`)}<//>`}
    ${Object.keys(rollout.metrics ?? {}).length > 0 && html`<${Section} title="Metrics"><${Numbers} values=${rollout.metrics} /><//>`}
    ${Object.keys(rollout.stage_seconds ?? {}).length > 0 && html`<${Section} title="Seconds"><${Numbers} values=${rollout.stage_seconds}
      signed /><//>`}
  </div>`;
}

const isFirst = (name) => Number(/patch|diff|solution/.test(name));

/** Attempts of a record: `{number, lines, fences, owners, from, to, end}`. */
export function attemptsOf(rollout) {
  const attempts = new Map();
  const enter = (line) => {
    if (!attempts.has(line.attempt)) attempts.set(line.attempt, { number: line.attempt, lines: [], owners: [] });
    const attempt = attempts.get(line.attempt);
    attempt.lines.push(line);
    if (line.owner && line.state !== "queued" && !attempt.owners.includes(line.owner)) attempt.owners.push(line.owner);
  };
  (rollout.timeline ?? []).forEach(enter);
  (rollout.notes ?? []).forEach(enter);
  const all = [...attempts.values()].sort((one, other) => one.number - other.number);
  all.forEach((attempt, place) => {
    attempt.lines.sort((one, other) => one.at - other.at);
    const before = all[place - 1]?.lines.at(-1).fence ?? 0;
    attempt.lines.forEach((line, at) => (line.claims = line.fence > (attempt.lines[at - 1]?.fence ?? before)));
    attempt.fences = attempt.lines.filter((line) => line.claims).map((line) => line.fence);
    attempt.from = attempt.lines[0].at;
    attempt.to = all[place + 1]?.lines[0].at ?? rollout.finished_at;
    attempt.end = endOf(attempt, rollout, place === all.length - 1);
  });
  return all;
}

function endOf(attempt, rollout, last) {
  const told = attempt.lines.filter((line) => line.text && /is blamed|next attempt|handed back|was lost/.test(line.text));
  const why = told[told.length - 1]?.text;
  if (!last) return why ?? "the next attempt began; no note says why";
  if (!ENDED.has(rollout.state)) return null;
  if (rollout.error) return why ?? `${rollout.error.blame} is blamed: ${rollout.error.type}: ${rollout.error.message}`;
  return [words(rollout.state), rollout.finish_reason && `finish ${words(rollout.finish_reason)}`].filter(Boolean).join(", ");
}

export function Attempts({ rollout }) {
  const attempts = attemptsOf(rollout);
  if (!attempts.length) return html`<${Empty} title="No timeline">An older release recorded this rollout, or it is new.<//>`;
  const taken = rollout.resumed > 0 && `, with work taken over from another worker, lost or stopped, ${rollout.resumed}×`;
  return html`<div class="attempts">
    <p class="quiet">${attempts.length} of at most ${rollout.request.limits.max_attempts} attempts${taken}. A claim raises the fence by
      one; whoever writes under an older one writes nothing.</p>
    ${[...attempts].reverse().map((attempt) => html`<details class="attempt" key=${attempt.number} open>
      <summary><h2>Attempt ${attempt.number}</h2>
        <span class="quiet">${attempt.fences.length ? `${attempt.fences.length > 1 ? "fences" : "fence"} ${attempt.fences.join(", ")}`
          : "not claimed"} · ${attempt.to ? span(attempt.to - attempt.from) : "under way"}${attempt.owners.length > 0
            && ` · ${attempt.owners.join(", ")}`}</span></summary>
      <p class="attempt-end">${attempt.end ? html`Ended: <b>${attempt.end}</b>` : "Under way."}${!attempt.end && rollout.lease_until
        && ` Its worker had a lease until ${new Date(rollout.lease_until * 1000).toLocaleTimeString()} when this was read, and each
        heartbeat makes it longer; should it run out, another worker goes on.`}</p>
      <div class="table-frame" tabindex="0" role="group" aria-label=${`what happened in attempt ${attempt.number}`}><table class="list log">
        <thead><tr><th scope="col" class="right num">after</th><th scope="col" class="right num">fence</th><th scope="col">what</th><th
          scope="col">by</th></tr></thead>
        <tbody>${attempt.lines.map((line) => html`<tr class=${line.text ? "is-note" : ""}>
          <td class="right num" title=${new Date(line.at * 1000).toISOString()}>${`+${(line.at - rollout.created_at).toFixed(3)} s`}</td>
          <td class="right num">${line.fence}${line.claims && html`<span class="tag">claim</span>`}</td>
          <td>${line.text ? line.text : html`<${StateMark} state=${line.state} />`}</td><td class="quiet">${line.owner ?? ""}</td></tr>`)}</tbody>
      </table></div>
    </details>`)}
  </div>`;
}

/** The receipt as sentences, each with a mark whether all is well. */
export function sentences(receipt) {
  const lines = [];
  const say = (fine, text) => lines.push({ fine, text });
  say(receipt.drift === 0, receipt.drift === 0
    ? "No drift: every call that repeated a conversation hashes to what is stored of it, so the ids trained on are the ids that the engine saw."
    : `${receipt.drift} calls did not hash to what is stored of their conversation: the record is damaged. Do not train on it.`);
  say(receipt.share_delivered >= 0.995,
    `${(100 * receipt.share_delivered).toFixed(1)} % of the ${exact(receipt.sampled_tokens)} sampled tokens are in chains that are trained on.`);
  say(true, `${exact(receipt.calls)} ${receipt.calls === 1 ? "call was"
    : "calls were"} answered from sampled tokens, by ${receipt.engines.join(", ") || "no engine"}.`);
  say(receipt.retries === 0, receipt.retries ? `${receipt.retries}× a call was repeated, got the first one's answer and was not sampled again.`
    : "No call was repeated.");
  say(receipt.refused === 0, receipt.refused ? `${receipt.refused} calls were answered without the model: past a limit, or with an error.`
    : "No call was refused.");
  say(receipt.branches <= 1, receipt.branches <= 1 ? "One conversation, from its beginning to its end."
    : `${receipt.branches} conversations were begun anew; the branches show which.`);
  say(true, receipt.reward_source === "program" ? "The program itself posted the reward." : "The handler scored it.");
  return lines;
}

export function ReceiptView({ receipt }) {
  return html`<div class="receipt">
    <${Section} title="Receipt" note=${receipt.harness}>
      <ul class="sentences">${sentences(receipt).map((line) => html`<li class=${line.fine ? "fine" : "look"}><span class="sentence-mark"
        aria-hidden="true">${line.fine ? "✓" : "!"}</span><span><span class="unseen">${line.fine ? "fine: "
          : "look: "}</span>${line.text}</span></li>`)}</ul>
    <//>
    <${Section} title="What it says">
      <dl class="pairs">
        ${[["model", receipt.model], ["policy versions", receipt.versions?.join(", ")
          || "–"], ["digest of all calls", receipt.digest]].map(([name, value]) => html`<div><dt>${name}</dt><dd
            class="mono">${value ?? "–"}</dd></div>`)}
      </dl>
      ${receipt.digest && html`<${Copy} text=${receipt.digest}>Copy digest<//>`}
    <//>
    ${receipt.asked?.length > 0 && html`<${Section} title="What the program asked of sampling"
      note="told here, and not obeyed: the request's sampling holds">
      <ul>${receipt.asked.map((asked) => html`<li>${exact(asked.calls)} ${asked.calls === 1 ? "call" : "calls"}: <span
        class="mono">${Object.keys(asked.parameters).length ? JSON.stringify(asked.parameters) : "nothing"}</span></li>`)}</ul>
    <//>`}
  </div>`;
}
