// One rollout: its conversation, its tokens, when what happened, and how it came out; live while it runs.
import { embedded, getBytes, hashOf, post, route } from "../api.js";
import {
  Ago, Dialog, Duration, ENDED_STATES, Empty, Failure, Head, Icon, Link, Loading, Reward, StateMark, Tabs, digits, html, shortId, useCallback,
  useEffect, useLive, useMemo, useRef, useState, words,
} from "../ui.js";
import { Conversation, Now, Version } from "./conversation.js";
import { CopyAs, SavePage, above, asPython, asRequest } from "./copies.js";
import { Lanes } from "./lanes.js";
import { Attempts, Outcome, ReceiptView } from "./outcome.js";
import { readRollout } from "./record.js";
import { Tokens } from "./tokens.js";
import { Branches } from "./tree.js";
import { Vocabulary, loadVocabulary } from "./vocabulary.js";
import { Words, exact } from "./words.js";

const ENDED = new Set(ENDED_STATES);
const RELOAD_MS = 1000;
/** Characters of a running command's output that are kept; its beginning is let go of. */
const MOST_OUTPUT = 400_000;
/** Of a reward, that the head has room for. */
const MOST_PARTS = 3;
const NO_TEXTS = new Vocabulary(null);

/** A rollout that follows what the service says of it: `{data, error, status, output, reload}`. */
function useRollout(id) {
  const [data, setData] = useState(null);
  const [error, setError] = useState(null);
  const [output, setOutput] = useState(null);
  const [, redraw] = useState(0);
  const held = useRef({ asked: 0, timer: null, busy: false, data: null });

  const load = useCallback(async () => {
    const mine = held.current;
    mine.timer = null;
    if (mine.busy) return later();
    mine.busy = true;
    mine.asked = Date.now();
    try {
      mine.data = await readRollout(await getBytes(`/v1/rollouts/${encodeURIComponent(id)}`));
      setData(mine.data);
      setOutput((now) => (now?.running ? now : null));
      setError(null);
    } catch (problem) {
      setError(problem);
    } finally {
      mine.busy = false;
    }
    return undefined;
  }, [id]);
  const later = useCallback(() => {
    const mine = held.current;
    mine.timer ??= setTimeout(load, Math.max(0, mine.asked + RELOAD_MS - Date.now()));
  }, [load]);
  useEffect(() => {
    load();
    return () => clearTimeout(held.current.timer);
  }, [load]);

  const running = data && !ENDED.has(data.rollout.state);
  const status = useLive(running ? { rollout: id } : null, {
    rollout(rollout) {
      const before = held.current.data;
      held.current.data = { ...before, rollout: { ...rollout, trajectory: null } };
      setData(held.current.data);
      // Turns come by themselves; what only RUN's end has, and another attempt's beginning, do not.
      if (rollout.state !== before.rollout.state || rollout.attempt !== before.rollout.attempt) {
        setOutput(null);
        later();
      }
    },
    turns({ attempt, pieces, calls, refetch }) {
      const { rollout, trajectory } = held.current.data;
      if (refetch || !trajectory || attempt !== rollout.attempt || !trajectory.take(pieces)) return later();
      const known = new Set(trajectory.calls.map((call) => `${call.id} ${call.at}`));
      trajectory.calls.push(...calls.filter((call) => !known.has(`${call.id} ${call.at}`)));
      if (pieces.some((piece) => piece.segment.role === "tool" || piece.segment.sampled)) setOutput((now) => (now?.running ? now : null));
      return redraw((n) => n + 1);
    },
    output(piece) {
      setOutput((before) => heard(before, piece));
    },
  });
  return { data, error, status, output, reload: load };
}

/** The output of a command with a further piece of it, which begins behind what is known or, after a cut, anew. */
export function heard(before, { operation, kind, offset, end, text, skipped, running }) {
  const known = before?.operation === operation && offset >= before.end ? before.text : "";
  const gap = skipped > 0 ? `⟨${exact(skipped)} bytes are not shown⟩\n` : "";
  const all = known + gap + text;
  return { operation, kind, running, end, text: all.length > MOST_OUTPUT ? `⟨its beginning is not shown⟩\n${all.slice(-MOST_OUTPUT / 2)}` : all };
}

function CancelButton({ rollout, onDone }) {
  const [asking, setAsking] = useState(false);
  const [error, setError] = useState(null);
  if (embedded || ENDED.has(rollout.state)) return null;
  const cancel = async () => {
    try {
      await post(`/v1/rollouts/${encodeURIComponent(rollout.id)}/cancel`);
      setAsking(false);
      onDone();
    } catch (problem) {
      setError(problem);
    }
  };
  return html`<button type="button" class="button danger" onClick=${() => setAsking(true)}><${Icon} name="close" />Cancel</button>
    ${asking && html`<${Dialog} title="Cancel this rollout?" onClose=${() => setAsking(false)}>
      <p>It ends as <b>cancelled</b>, its sandbox is ended, and it is dropped from training. This cannot be undone.</p>
      ${error && html`<${Failure} error=${error} />`}
      <div class="row end"><button type="button" class="button" onClick=${() => setAsking(false)}>Keep it running</button>
        <button type="button" class="button danger solid" onClick=${cancel}>Cancel the rollout</button></div>
    <//>`}`;
}

function Summary({ rollout, trajectory }) {
  const parts = Object.entries(rollout.reward_components ?? {});
  const { origin } = rollout.request;
  const facts = [
    ["state", html`<${StateMark} state=${rollout.state} />`],
    ["reward", html`<${Reward} value=${rollout.reward} drop=${rollout.drop} />`],
    ["parts", parts.length > 0 && parts.length <= MOST_PARTS && parts.map(([name, value]) => html`<span><span
      class="quiet">${name}</span> ${digits(value)}</span>`)],
    ["finish", rollout.finish_reason && words(rollout.finish_reason)],
    ["handler", html`${rollout.handler}${rollout.request.agent && html` <span class="tag">${rollout.request.agent.harness}</span>`}`],
    ["group", rollout.request.n > 1 || rollout.group_id !== rollout.id ? html`${above(rollout.group_id).length ? html`<${Link}
      path=${["groups", rollout.group_id]}>${shortId(rollout.group_id)}<//>` : shortId(rollout.group_id)} <span
        class="quiet">#${rollout.index}</span>` : null],
    ["attempt", `${rollout.attempt}${rollout.resumed ? `, taken over ${rollout.resumed}×` : ""}${rollout.moved ? `, moved ${rollout.moved}×` : ""}`],
    ["branched from", origin && html`${embedded ? shortId(origin.rollout) : html`<${Link}
      path=${["rollouts", origin.rollout]}>${shortId(origin.rollout)}<//>`} <span class="quiet">at turn ${origin.turn}${trajectory?.branch
        ? `, ${exact(trajectory.branch.tokens)} tokens shared` : ""}</span>`],
    ["turns", trajectory && exact(trajectory.total("turns"))],
    ["sampled", trajectory && html`${exact(trajectory.total("sampled"))} <span class="quiet">of ${exact(trajectory.total("length"))}</span>`],
    ["versions", trajectory?.versions.length > 0 && html`<span class="versions">${trajectory.versions.slice(0, 8).map((version, at) =>
      html`<span class="version"><${Version} at=${at} trajectory=${trajectory} /><span
        class="short">${version ?? "unknown"}</span></span>`)}${trajectory.versions.length > 8 && html`<span
          class="quiet">+${trajectory.versions.length - 8}</span>`}</span>`],
    ["took", html`<${Duration} from=${rollout.created_at} to=${rollout.finished_at} />`],
    ["submitted", html`<${Ago} at=${rollout.created_at} />`],
    ["tags", rollout.request.tags?.length > 0 && rollout.request.tags.map((tag) => embedded ? html`<span class="tag">${tag}</span>`
      : html`<${Link} class="tag" path=${["rollouts"]} query=${{ tag }}>${tag}<//>`)],
  ];
  return html`<dl class="sum">${facts.filter(([, value]) => value).map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;
}

function Remark({ rollout, onOpen }) {
  if (!rollout.drop && !rollout.error) return null;
  const { error } = rollout;
  return html`<div class="remark" role="note">
    <${StateMark} state=${rollout.state} bare />
    <p><b>${rollout.drop ? "Dropped" : "Error"}</b>${rollout.drop_reason && `: ${rollout.drop_reason}`}${error && html` <span
      class="tag">blame: ${error.blame}</span> <span class="remark-text">${error.message.slice(0, 300)}</span>`}</p>
    ${error && html`<button type="button" class="bare" onClick=${() => onOpen("reward")}>Details</button>`}
  </div>`;
}

function ChainChoice({ trajectory, chain, onChoose }) {
  if (trajectory.chains.length < 2) return null;
  return html`<label class="chain-choice">Chain <select value=${chain.index} onChange=${(event) => onChoose(Number(event.target.value))}>
    ${trajectory.chains.map((each) => html`<option value=${each.index}>${each.index}: ${words(each.role)}${each.policy ? ` of ${each.policy}` : ""}, ${exact(each.length)} tokens</option>`)}
  </select></label>`;
}

function Request({ request }) {
  return html`<div class="request"><section class="part"><h2>Request</h2><${Words} text=${asRequest(request)} owner=${request}
    name="request" kind="code" lines=${80} /></section>
    <section class="part"><h2>As Python</h2><${Words} text=${asPython(request)} owner=${request} name="python" kind="code"
      lines=${80} /></section></div>`;
}

/** Why there is no trajectory to show. */
function Without({ rollout }) {
  if (rollout.trajectory_dropped) return html`<${Empty}
    title="Its trajectory is kept no longer">It was ${rollout.trajectory_dropped === "size" ? "too large for what is kept"
      : "acknowledged, and then let go of"}. An archive may have it.<//>`;
  if (ENDED.has(rollout.state)) return html`<${Empty} title="No model call was recorded">It ended before the model had said anything.<//>`;
  return html`<${Empty} title=${`It is ${words(rollout.state)}`}>Turns appear here as they are made.<//>`;
}

/** What of a rollout an address means: the tab, the chain (null = the last one), and a token of it. */
function placeOf({ tab = "conversation", chain, at }) {
  return { tab, chain: chain != null ? Number(chain) : null, at: at != null ? Number(at) : -1 };
}

export function RolloutView({ params, query = {} }) {
  const { id } = params;
  const { data, error, status, output, reload } = useRollout(id);
  const [vocabulary, setVocabulary] = useState(NO_TEXTS);
  const [place, setPlace] = useState(() => placeOf(query));
  const digest = data?.trajectory?.digestOf(data.trajectory.chains[place.chain]);
  useEffect(() => {
    let gone = false;
    if (digest) loadVocabulary(digest).then((loaded) => gone || setVocabulary(loaded));
    return () => (gone = true);
  }, [digest]);
  useEffect(() => {
    const moved = () => setPlace(placeOf(route().query));
    addEventListener("hashchange", moved);
    return () => removeEventListener("hashchange", moved);
  }, []);
  useEffect(() => document.getElementById(`tab-${place.tab}`)?.scrollIntoView({ block: "nearest", inline: "nearest" }), [place.tab, data === null]);
  const go = useCallback((change) => {
    setPlace((before) => {
      const next = { ...before, ...change };
      const { tab, chain, at } = next;
      if (!embedded) history.replaceState(null, "", hashOf(["rollouts", id], { ...(tab !== "conversation" && { tab }), ...(chain !== null
        && { chain }), ...(tab === "tokens" && at >= 0 && { at }) }));
      return next;
    });
  }, [id]);
  const chain = useMemo(() => {
    const chains = data?.trajectory?.chains ?? [];
    return chains[place.chain] ?? chains[chains.length - 1];
  }, [data, place.chain, data?.trajectory?.chains.length]);

  if (!data) return html`<${Head} title=${shortId(id)} crumbs=${[{ label: "Rollouts", path: ["rollouts"] }]} />${error ? html`<${Failure}
    error=${error} retry=${reload} />` : html`<${Loading} what="Loading the rollout" />`}`;
  const { rollout, trajectory } = data;
  const running = !ENDED.has(rollout.state);
  const tabs = [
    { id: "conversation", label: "Conversation" },
    { id: "tokens", label: "Tokens", count: chain?.length },
    { id: "timeline", label: "Timeline" },
    { id: "attempts", label: "Attempts", count: rollout.attempt > 1 ? rollout.attempt : null },
    ...(trajectory?.chains.length > 1 ? [{ id: "branches", label: "Branches", count: trajectory.chains.length }] : []),
    { id: "reward", label: "Reward" },
    ...(trajectory?.receipt ? [{ id: "receipt", label: "Receipt" }] : []),
    { id: "request", label: "Request" },
  ];
  const tab = tabs.some((each) => each.id === place.tab) ? place.tab : "conversation";
  const chosen = trajectory && html`<${ChainChoice} trajectory=${trajectory} chain=${chain} onChoose=${(index) => go({ chain: index, at: -1 })} />`;
  const panels = {
    conversation: () => chain
      ? html`${chosen}<${Conversation} key=${chain.index} trajectory=${trajectory} chain=${chain} length=${chain.length} output=${output}
        state=${rollout.state}
          running=${running} onTokens=${(at) => go({ tab: "tokens", chain: chain.index, at })} />`
      : html`<${Without} rollout=${rollout} />${running && html`<${Now} output=${output} state=${rollout.state} />`}`,
    tokens: () => chain
      ? html`${chosen}<${Tokens} key=${chain.index} trajectory=${trajectory} chain=${chain} length=${chain.length} vocabulary=${vocabulary}
        at=${place.at} onChoose=${(at) => go({ at })} />`
      : html`<${Without} rollout=${rollout} />`,
    timeline: () => html`<${Lanes} rollout=${rollout} calls=${trajectory?.calls} running=${running} />`,
    attempts: () => html`<${Attempts} rollout=${rollout} />`,
    branches: () => html`<${Branches} trajectory=${trajectory} length=${trajectory.total("length")} selected=${chain.index}
      onOpen=${(index) => go({ tab: "tokens", chain: index, at: -1 })} />`,
    reward: () => html`<${Outcome} rollout=${rollout} trajectory=${trajectory} />`,
    receipt: () => html`<${ReceiptView} receipt=${trajectory.receipt} />`,
    request: () => html`<${Request} request=${rollout.request} />`,
  };
  return html`<div class="rollout-view">
    <${Head} title=${shortId(rollout.id)} status=${running && !embedded ? status : undefined} crumbs=${above(rollout.group_id)}>
      <${CancelButton} rollout=${rollout} onDone=${reload} />
      <${CopyAs} rollout=${rollout} />
      <${SavePage} path=${`/v1/rollouts/${encodeURIComponent(rollout.id)}/page`} name=${rollout.id} />
    <//>
    <${Summary} rollout=${rollout} trajectory=${trajectory} />
    <${Remark} rollout=${rollout} onOpen=${(wanted) => go({ tab: wanted })} />
    ${error && html`<${Failure} error=${error} retry=${reload} />`}
    <div class="tabs-stick"><${Tabs} tabs=${tabs} selected=${tab} onSelect=${(wanted) => go({ tab: wanted })} label="Parts of the rollout" /></div>
    <div class="panel" role="tabpanel" id=${`panel-${tab}`} aria-labelledby=${`tab-${tab}`}>${panels[tab]()}</div>
  </div>`;
}
