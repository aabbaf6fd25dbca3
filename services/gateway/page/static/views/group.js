// A group: siblings side by side, where they first differ, and how their rewards are spread.
import { embedded, get, getBytes, idsOf } from "../api.js";
import {
  Copy, Duration, ENDED_STATES, Empty, Failure, Head, Link, Loading, Reward, StateMark, digits, html, shortId, useEffect,
  useLive, useMemo, useReducer, useRef, useState, words,
} from "../ui.js";
import { Call, Version, itemsOf, textOf } from "./conversation.js";
import { SavePage } from "./copies.js";
import { commonPrefix, readRollout } from "./record.js";
import { Vocabulary, loadVocabulary } from "./vocabulary.js";
import { Words, exact, fixed, visible } from "./words.js";

const PAGE = 500;
/** Trajectories that are fetched unasked; of a larger group one chooses. */
const FIRST_FETCHED = 8;
const MOST_COMPARED = 4;
const RELOAD_MS = 1000;
const BUCKETS = 20;
const AROUND = 24;
const NO_TEXTS = new Vocabulary(null);

async function everyone(id) {
  const all = [];
  let cursor;
  do {
    const page = await get("/v1/rollouts", { group_id: id, limit: PAGE, ...(cursor && { cursor }) });
    all.push(...page.rollouts);
    cursor = page.cursor;
  } while (cursor && all.length < 1000 && !embedded);
  return all.sort((one, other) => one.index - other.index);
}

/** Mean, spread and counts of a group's rewards; dropped ones have none. */
export function spread(rollouts) {
  const rewards = rollouts.filter((each) => !each.drop && each.reward != null).map((each) => each.reward);
  const average = (values) => values.reduce((sum, each) => sum + each, 0) / values.length;
  const mean = average(rewards);
  const deviation = Math.sqrt(average(rewards.map((each) => (each - mean) ** 2)));
  return { rewards, mean, deviation, uniform: rewards.length > 1 && rewards.every((each) => each === rewards[0]) };
}

function Rewards({ rollouts }) {
  const { rewards, mean, deviation, uniform } = spread(rollouts);
  const ended = rollouts.filter((each) => each.finished_at).length;
  const dropped = rollouts.filter((each) => each.drop).length;
  if (!rewards.length) {
    return html`<p class="quiet">None has a reward: ${ended} of ${rollouts.length} have ended${dropped > 0 && `, ${dropped} were dropped`}.</p>`;
  }
  const [least, most] = [Math.min(0, ...rewards), Math.max(1, ...rewards)];
  const counts = new Array(BUCKETS).fill(0);
  for (const each of rewards) counts[Math.min(BUCKETS - 1, Math.floor(((each - least) / (most - least)) * BUCKETS))] += 1;
  const tallest = Math.max(...counts);
  const x = (value) => 4 + ((value - least) / (most - least)) * 292;
  return html`<figure class="rewards-spread">
    <svg viewBox="0 0 300 76" role="img"
      aria-label=${`Rewards from ${digits(Math.min(...rewards))} to ${digits(Math.max(...rewards))}, mean ${digits(mean)}`}>
      ${counts.map((many, at) => many > 0 && html`<g><rect class="level" x=${4 + (at * 292) / BUCKETS + 1} y=${56 - (44 * many) / tallest}
        width=${292 / BUCKETS - 2} height=${(44 * many) / tallest} rx="1.5" />
        <text class="spread-count" x=${4 + ((at + 0.5) * 292) / BUCKETS} y=${52 - (44 * many) / tallest}>${many}</text></g>`)}
      <line class="axis" x1="4" x2="296" y1="56.5" y2="56.5" />
      <path class="mean" d=${`M${x(mean)} 57l4 6h-8z`} />
      <text x="4" y="73">${digits(least)}</text><text x="296" y="73" text-anchor="end">${digits(most)}</text>
    </svg>
    <figcaption>mean <b>${digits(mean)}</b> · deviation <b>${digits(deviation)}</b> · ${rewards.length} of ${rollouts.length} scored${dropped > 0 &&
      ` · ${dropped} dropped`}</figcaption>
    ${uniform && html`<div class="remark" role="note"><span aria-hidden="true">=</span><p>All rewards are ${digits(rewards[0])}: advantages
      within the group are zero, so it teaches nothing where rewards are compared within groups. Batches leave such groups out with a
      filter.</p></div>`}
  </figure>`;
}

function Siblings({ rollouts, loaded, shared, picked, onPick, reference }) {
  const { mean, deviation } = spread(rollouts);
  const versions = [...new Set(rollouts.flatMap((each) => each.policy_versions))]; // a letter means the same in all rows
  const advantage = ({ drop, reward }) => {
    if (drop || reward == null) return "–";
    return deviation ? `${reward > mean ? "+" : ""}${fixed((reward - mean) / deviation, 2)}` : "0";
  };
  return html`<div class="table-frame" tabindex="0" role="group" aria-label="siblings"><table class="list siblings">
    <thead><tr><th scope="col">compare</th><th scope="col">rollout</th><th scope="col">state</th><th scope="col">reward</th><th scope="col"
      class="right num" title="(reward − mean) / deviation">advantage</th>
      <th scope="col">finish</th><th scope="col" class="right num">turns</th><th scope="col" class="right num">sampled</th><th
        scope="col">versions</th><th scope="col" class="right num" title=${`ids in common with #${reference}`}>same until</th><th
          scope="col" class="right num">took</th></tr></thead>
    <tbody>${rollouts.map((each) => {
      const has = loaded.get(each.id);
      return html`<tr class=${picked.includes(each.id) ? "picked" : ""}>
        <td><input type="checkbox" checked=${picked.includes(each.id)} onChange=${() => onPick(each.id)}
          aria-label=${`compare rollout ${each.index}`} /></td>
        <td><${Link} path=${["rollouts", each.id]} aria-label=${`#${each.index}, ${each.id}`}>#${each.index}<//></td>
        <td><${StateMark} state=${each.state} /></td><td><${Reward} value=${each.reward} drop=${each.drop} /></td>
        <td class="right num">${advantage(each)}</td>
        <td>${each.drop && each.drop_reason ? each.drop_reason : each.finish_reason ? words(each.finish_reason) : "–"}</td>
        <td class="right num">${exact(each.metrics?.turns ?? has?.trajectory?.total("turns"))}</td>
        <td class="right num">${exact(each.metrics?.sampled_tokens ?? has?.trajectory?.total("sampled"))}</td>
        <td><span class="versions">${each.policy_versions.map((version) =>
          html`<${Version} at=${versions.indexOf(version)} trajectory=${{ versions }} />`)}</span></td>
        <td class="right num">${each.index === reference ? "reference" : shared.has(each.id) ? exact(shared.get(each.id)) : "–"}</td>
        <td class="right num"><${Duration} from=${each.created_at} to=${each.finished_at} /></td>
      </tr>`;
    })}</tbody>
  </table></div>`;
}

/** The chain that siblings share the beginning of. */
const firstChain = (trajectory) => trajectory.chains[0];

/** Tokens around a position, as text: what is the same, and what comes instead. */
function Around({ chain, vocabulary, at }) {
  const said = (id) => vocabulary.text(id) ?? `⟨${vocabulary.bytes(id) ?? id}⟩`;
  const text = (from, to) => visible([...chain.ids.subarray(Math.max(0, from), Math.min(to, chain.length))].map(said).join(""));
  const here = at < chain.length ? chain.at(at) : null;
  return html`<p class="around" dir="ltr"><span class="quiet">${text(at - AROUND, at)}</span>${here
    ? html`<mark>${text(at, at + 1)}</mark>${text(at + 1, at + AROUND)}`
    : html`<mark>ends here</mark>`}</p>
    ${here?.sampled && html`<p class="quiet">token ${exact(at)}, id ${chain.ids[at]}, log-prob ${fixed(chain.logprobs[at],
      3)}, probability ${fixed(100 * Math.exp(chain.logprobs[at]), 1)} %</p>`}`;
}

/** The item of a chain in which a position lies. */
function itemAt(trajectory, chain, at) {
  const items = itemsOf(trajectory, chain);
  return items.find((item) => item.tokens && item.tokens.start <= at && at < item.tokens.end) ?? items[items.length - 1];
}

function Column({ has, at, vocabulary }) {
  const { rollout, trajectory } = has;
  const chain = firstChain(trajectory);
  const item = itemAt(trajectory, chain, at);
  const { message } = item ?? {};
  return html`<article class="column" aria-label=${`rollout ${rollout.index}`}>
    <header><${Link} path=${["rollouts", rollout.id]}
      query=${{ tab: "tokens", chain: chain.index, at: Math.min(at, chain.length - 1) }}>#${rollout.index}<//>
      <${Reward} value=${rollout.reward} drop=${rollout.drop} /><span class="quiet">${rollout.finish_reason
        && words(rollout.finish_reason)}</span></header>
    <${Around} chain=${chain} vocabulary=${vocabulary} at=${at} />
    <h3>${item?.tokens?.segment.sampled ? `Turn ${item.tokens.segment.turn}` : (item?.role ?? "nothing")}</h3>
    ${message?.reasoning && html`<div class="reasoning"><${Words} text=${message.reasoning} owner=${message} name="reasoning" /></div>`}
    ${message && textOf(message) && html`<${Words} text=${textOf(message)} owner=${message} />`}
    ${(message?.tool_calls ?? []).map((call) => html`<${Call} call=${call} />`)}
  </article>`;
}

function Difference({ chosen, vocabulary }) {
  const chains = chosen.map((has) => firstChain(has.trajectory));
  const shared = Math.min(...chains.slice(1).map((chain) => commonPrefix(chains[0], chain)));
  const segment = shared < chains[0].length ? chains[0].at(shared) : null;
  const same = chains.every((chain) => chain.length === shared);
  const part = segment?.sampled
    ? html`; they part in <b>turn ${segment.turn}</b>, at its token ${exact(shared - segment.start)}`
    : segment && html`; they part in what was <b>given</b> (${segment.role})`;
  return html`<section class="difference" aria-label="where they first differ">
    <h2>Where they first differ</h2>
    <p>${same ? `They are the same, all ${exact(shared)} ids.` : html`<b>${exact(shared)}</b> ids are the same${part}.`}</p>
    <div class="beside">${chosen.map((has) => html`<${Column} key=${has.rollout.id} has=${has} at=${shared} vocabulary=${vocabulary} />`)}</div>
  </section>`;
}

/** Members of a group, which follow the live stream while any of them is under way. */
function useMembers(id) {
  const [answer, setAnswer] = useState({ data: null, error: null });
  const [turn, reload] = useReducer((n) => n + 1, 0);
  useEffect(() => {
    let gone = false;
    const tell = (next) => gone || setAnswer(next);
    everyone(id).then((data) => tell({ data, error: null }), (error) => tell({ data: null, error }));
    return () => (gone = true);
  }, [id, turn]);
  const waited = useRef(null);
  const open = (answer.data ?? []).filter((each) => !each.finished_at).map((each) => each.id);
  const status = useLive(open.length ? { ids: idsOf(open) } : null, {
    states(states) {
      setAnswer(({ data, ...rest }) => ({ ...rest, data: data.map((each) => ({ ...each, ...states[each.id] })) }));
      if (Object.values(states).some(({ state }) => ENDED_STATES.includes(state))) waited.current ??= setTimeout(() =>
        ((waited.current = null), reload()), RELOAD_MS);
    },
  });
  return { ...answer, reload, status: open.length ? status : undefined };
}

/** Trajectories of members, as they are asked for: a Map by id. */
function useTrajectories(wanted) {
  const [loaded, setLoaded] = useState(new Map());
  const asked = useRef(new Set());
  useEffect(() => {
    for (const id of wanted) {
      if (asked.current.has(id)) continue;
      asked.current.add(id);
      getBytes(`/v1/rollouts/${encodeURIComponent(id)}`)
        .then(readRollout)
        .then((has) => setLoaded((before) => new Map(before).set(id, has)), () => asked.current.delete(id));
    }
  }, [wanted.join()]);
  return loaded;
}

function Members({ id, rollouts, status }) {
  const ended = rollouts.filter((each) => each.finished_at);
  const [picked, setPicked] = useState(null);
  const [vocabulary, setVocabulary] = useState(NO_TEXTS);
  const ranked = [...ended].filter((each) => each.reward != null).sort((one, other) => other.reward - one.reward);
  const extremes = ranked.length > 1 ? [ranked[0].id, ranked[ranked.length - 1].id] : ended.slice(0, 2).map((each) => each.id);
  const chosen = picked ?? extremes;
  const loaded = useTrajectories([...new Set([...chosen, ...ended.slice(0, FIRST_FETCHED).map((each) => each.id)])]);
  const digest = [...loaded.values()].find((has) => has.trajectory?.digest)?.trajectory.digest;
  useEffect(() => {
    if (digest) loadVocabulary(digest).then(setVocabulary);
  }, [digest]);
  const compared = chosen.map((each) => loaded.get(each)).filter((has) => has?.trajectory?.chains.length);
  const reference = compared[0];
  const shared = useMemo(() => {
    const pairs = [...loaded].filter(([, has]) => has.trajectory?.chains.length && reference);
    return new Map(pairs.map(([each, has]) => [each, commonPrefix(firstChain(has.trajectory), firstChain(reference.trajectory))]));
  }, [loaded, reference]);
  const pick = (each) => setPicked(chosen.includes(each) ? chosen.filter((other) => other !== each) : [...chosen, each].slice(-MOST_COMPARED));
  return html`<div class="group-view">
    <${Head} title=${`Group ${shortId(id)}`} status=${embedded ? undefined : status} crumbs=${embedded ? []
      : [{ label: "Rollouts", path: ["rollouts"] }]}>
      ${!embedded && html`<${Copy} text=${`rollout show ${id}`}>Copy command<//>`}
      <${SavePage} path=${`/v1/groups/${encodeURIComponent(id)}/page`} name=${id} />
    <//>
    <dl class="sum"><div><dt>handler</dt><dd>${[...new Set(rollouts.map((each) => each.handler))].join(", ")}</dd></div>
      <div><dt>rollouts</dt><dd>${exact(rollouts.length)}</dd></div><div><dt>ended</dt><dd>${exact(ended.length)}</dd></div>
      <div class="broad"><dt>task</dt><dd class="short mono"
        title="of the first one">${JSON.stringify(rollouts[0].request.task).slice(0, 400)}</dd></div></dl>
    <${Rewards} rollouts=${rollouts} />
    <${Siblings} rollouts=${rollouts} loaded=${loaded} shared=${shared} picked=${chosen} onPick=${pick} reference=${reference?.rollout.index} />
    ${compared.length > 1
      ? html`<${Difference} chosen=${compared} vocabulary=${vocabulary} />`
      : chosen.some((each) => !loaded.has(each))
        ? html`<${Loading} what="Loading what they said" />`
        : html`<p class="quiet">Choose two that have a trajectory, to see where they first differ.</p>`}
  </div>`;
}

export function GroupView({ params }) {
  const { id } = params;
  const { data, error, reload, status } = useMembers(id);
  if (data?.length) return html`<${Members} id=${id} rollouts=${data} status=${status} />`;
  return html`<${Head} title=${`Group ${shortId(id)}`} crumbs=${[{ label: "Rollouts", path: ["rollouts"] }]} />
    ${error ? html`<${Failure} error=${error} retry=${reload} />` : data ? html`<${Empty} title="No such group"
      command="rollout list --group ID">Its rollouts are past their retention, or belong to another tenant.<//>` : html`<${Loading}
        what="Loading the group" />`}`;
}
