// A unified diff: each file with its counts, lines marked by sign and by colour.
import { html, useMemo, useState } from "../ui.js";
import { exact, visible } from "./words.js";

const FIRST_LINES = 400;
const MOST_LINE_CHARS = 2000;
/** Lines of a head that a reader does not need beside the file's name. */
const HEAD = /^(diff |index |--- |\+\+\+ |similarity )/;

/** Whether a text is a unified diff. */
export function isDiff(text) {
  return /^(diff --git |--- |Index: )/m.test(text.slice(0, 4000)) && /^@@ /m.test(text.slice(0, 100_000));
}

/** Files of a diff: `{name, added, removed, lines: [{kind, text, old, now}]}`. */
export function readDiff(text) {
  const files = [];
  let file = null;
  let [old, now] = [0, 0];
  let [oldLeft, nowLeft] = [0, 0];
  const begin = (name) => files.push((file = { name, added: 0, removed: 0, lines: [] }));
  for (const line of text.split("\n")) {
    const inHunk = oldLeft > 0 || nowLeft > 0;
    const hunk = /^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@/.exec(line);
    if (!inHunk && line.startsWith("diff --git ")) begin(line.slice(11).split(" ").pop().replace(/^b\//, ""));
    const begun = file && !file.lines.some((each) => each.kind === "hunk");
    if (!inHunk && !begun && line.startsWith("--- ")) begin(line.slice(4).replace(/^a\//, ""));
    if (!file) begin("");
    if (!inHunk && /^\+\+\+ /.test(line) && !line.includes("/dev/null")) file.name = line.slice(4).replace(/^b\//, "");
    if (hunk) {
      [old, now] = [Number(hunk[1]), Number(hunk[3])];
      [oldLeft, nowLeft] = [Number(hunk[2] ?? 1), Number(hunk[4] ?? 1)];
      file.lines.push({ kind: "hunk", text: line });
    } else if (inHunk && line.startsWith("+")) {
      [file.added, nowLeft] = [file.added + 1, nowLeft - 1];
      file.lines.push({ kind: "added", text: line.slice(1), now: now++ });
    } else if (inHunk && line.startsWith("-")) {
      [file.removed, oldLeft] = [file.removed + 1, oldLeft - 1];
      file.lines.push({ kind: "removed", text: line.slice(1), old: old++ });
    } else if (inHunk && !line.startsWith("\\")) {
      [oldLeft, nowLeft] = [oldLeft - 1, nowLeft - 1];
      file.lines.push({ kind: "same", text: line.slice(1), old: old++, now: now++ });
    } else if (line && !HEAD.test(line)) {
      file.lines.push({ kind: "meta", text: line });
    }
  }
  return files;
}

const SIGN = { added: "+", removed: "−", same: " ", hunk: " ", meta: " " };

const Counts = ({ added, removed }) =>
  html`<span class="added">+${exact(added)}</span> <span class="removed">−${exact(removed)}</span>`;

/** A patch to read. */
export function Diff({ text }) {
  const files = useMemo(() => readDiff(text), [text]);
  const [most, setMost] = useState(FIRST_LINES);
  const total = files.reduce((sum, file) => sum + file.lines.length, 0);
  const [added, removed] = ["added", "removed"].map((kind) => files.reduce((sum, file) => sum + file[kind], 0));
  let left = most;
  return html`<div class="diff">
    <p class="diff-sum">${exact(files.length)} ${files.length === 1 ? "file" : "files"}: <${Counts} added=${added} removed=${removed} /></p>
    ${files.map((file) => {
      const shown = file.lines.slice(0, Math.max(0, left));
      left -= shown.length;
      if (!shown.length) return null;
      return html`<details open class="diff-file">
        <summary><span dir="ltr">${visible(file.name) || "patch"}</span> <${Counts} ...${file} /></summary>
        <div class="diff-lines" tabindex="0" role="group" aria-label=${`changes of ${file.name || "the patch"}`}>
          ${shown.map((line) => html`<div class="diff-line ${line.kind}">
            <span class="number" aria-hidden="true">${line.old ?? ""}</span><span class="number" aria-hidden="true">${line.now ?? ""}</span>
            <span class="sign">${SIGN[line.kind]}</span>
            <span class="code">${visible(line.text.slice(0, MOST_LINE_CHARS))}${line.text.length > MOST_LINE_CHARS && " …"}</span></div>`)}
        </div></details>`;
    })}
    ${total > most && html`<button type="button" class="bare" onClick=${() => setMost(most + 2000)}>
      Show more (${exact(total - most)} lines)</button>`}
  </div>`;
}
