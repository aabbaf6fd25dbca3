// Branches: all chains of a rollout along one axis of tokens, each where it left the one before.
import { html, useMemo } from "../ui.js";
import { commonPrefix, letter } from "./record.js";
import { exact } from "./words.js";

const ROLES = {
  agent: ["●", "the agent's own turns"],
  sub_agent: ["◆", "an agent that it started"],
  compaction: ["▣", "a summary, to go on from"],
  auxiliary: ["○", "a call beside the task"],
  discarded: ["✕", "sampled and never used"],
  judge: ["⚖", "another policy, which scored the agent"],
  user: ["☺", "another policy in the place of a user"],
  opponent: ["⚔", "another policy that the agent played against"],
  reference: ["≡", "another policy to compare with"],
};
const TRAINED = new Set(["agent", "sub_agent", "compaction"]);

/** Chains in the order of a tree, each with its depth and with what it shares with its parent. */
export function branchesOf(trajectory) {
  const { chains } = trajectory;
  const children = new Map();
  for (const chain of chains) {
    const parent = chain.parent != null && chain.parent !== chain.index && chains[chain.parent] ? chain.parent : null;
    children.set(parent, [...(children.get(parent) ?? []), chain]);
  }
  const rows = [];
  const seen = new Set();
  const walk = (parent, depth) => {
    for (const chain of children.get(parent) ?? []) {
      if (seen.has(chain.index)) continue;
      seen.add(chain.index);
      const shared = parent === null ? 0 : commonPrefix(chain, chains[parent]);
      rows.push({ chain, depth, parent, shared });
      walk(chain.index, depth + 1);
    }
  };
  walk(null, 0);
  // Parents that lead in a circle are no tree; their chains are shown all the same.
  for (const chain of chains) if (!seen.has(chain.index)) rows.push({ chain, depth: 0, parent: null, shared: 0 });
  return rows;
}

function Shape({ row, longest }) {
  const { chain, shared } = row;
  const scale = (tokens) => (1000 * tokens) / longest;
  return html`<svg class="branch-shape" viewBox="0 0 1000 20" preserveAspectRatio="none" aria-hidden="true">
    ${shared > 0 && html`<rect class="shared" x="0" y="8" width=${scale(shared)} height="4" />`}
    ${chain.segments.map((segment) => {
      const start = Math.max(segment.start, shared);
      if (segment.end <= start) return null;
      const [y, tall] = segment.sampled ? [2, 16] : [6, 8];
      return html`<rect class=${segment.sampled ? `v${segment.version % 8}` : "given"} x=${scale(start)} y=${y}
        width=${Math.max(0.8, scale(segment.end - start))} height=${tall} />`;
    })}
    ${row.parent !== null && html`<rect class="leaves" x=${Math.max(0, scale(shared) - 1.5)} y="0" width="3" height="20" />`}
  </svg>`;
}

export function Branches({ trajectory, length, selected, onOpen }) {
  const rows = useMemo(() => branchesOf(trajectory), [trajectory, length]);
  const longest = Math.max(1, ...trajectory.chains.map((chain) => chain.length));
  const roles = [...new Set(rows.map((row) => row.chain.role))];
  return html`<section class="tree" aria-label="branches">
    <p class="quiet">From left to right all ${exact(longest)} tokens of the longest chain: thick where sampled, thin where given, a mark
      where a chain left its parent. Choose one to see its tokens.</p>
    <ol class="branch-list">
      ${rows.map((row) => {
        const { chain, depth, parent, shared } = row;
        const [mark, meaning] = ROLES[chain.role] ?? ["•", chain.role];
        const versions = [...new Set(chain.segments.filter((segment) => segment.sampled).map((segment) => segment.version))];
        const place = parent === null ? (depth ? "" : "a root") : shared ? `left chain ${parent} after ${exact(shared)} tokens`
          : `follows chain ${parent}, of which it repeats nothing`;
        return html`<li key=${chain.index}>
          <button type="button" class="branch" aria-current=${selected === chain.index ? "true" : undefined} onClick=${() => onOpen(chain.index)}>
            <span class="branch-name" style=${{ paddingLeft: `${Math.min(depth, 8) * 16}px` }}>
              ${depth > 0 && html`<span class="branch-elbow" aria-hidden="true">└</span>`}
              <span class="branch-mark role-${chain.role}" aria-hidden="true">${mark}</span>
              <b>${chain.index}</b> <span>${chain.role.replace("_", " ")}${chain.policy && ` (${chain.policy})`}</span>
              ${!(chain.trained ?? TRAINED.has(chain.role)) && html`<span class="tag">not trained</span>`}
            </span>
            <${Shape} row=${row} longest=${longest} />
            <span class="branch-facts">${exact(chain.length)} tokens, ${exact(chain.sampled)} sampled, ${chain.turns} ${chain.turns === 1
              ? "turn" : "turns"}${versions.length > 0 && `, ${versions.map(letter).join(" ")}`}<span class="quiet"> · ${place}</span></span>
          </button>
        </li>`;
      })}
    </ol>
    <ul class="legend" aria-label="roles">${roles.map((role) => html`<li><span class="branch-mark role-${role}"
      aria-hidden="true">${ROLES[role]?.[0] ?? "•"}</span>${role.replace("_", " ")}: ${ROLES[role]?.[1] ?? ""}</li>`)}</ul>
  </section>`;
}
