// What one takes along: the request as JSON or Python, a command, the address, a file.
import { embedded, embeddedHash, getBytes, hashOf } from "../api.js";
import { Copy, Icon, html, shortId, useEffect, useRef, useState } from "../ui.js";
import { save } from "./words.js";

/** A request to submit again: without its id, which names this rollout, and without fields that are not set. */
function again(request) {
  const { id, origin, ...asked } = request;
  const { n, sampling, limits, tags, metadata } = asked;
  const rest = origin ? { from: { ...origin, n }, sampling, limits, tags, metadata } : asked;
  const isSet = (value) => value !== null && !(typeof value === "object" && !Object.keys(value).length);
  return Object.fromEntries(Object.entries(rest).filter(([, value]) => isSet(value)));
}

/** A JSON value as Python writes it. */
export function python(value, indent = 0) {
  const inner = " ".repeat(indent + 4);
  if (value === null || value === undefined) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value !== "object") return typeof value === "string" ? JSON.stringify(value).replace(/\u007f/g, "\\x7f") : String(value);
  const parts = Array.isArray(value)
    ? value.map((each) => python(each, indent + 4))
    : Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${python(each, indent + 4)}`);
  const [open, close] = Array.isArray(value) ? ["[", "]"] : ["{", "}"];
  const line = parts.join(", ");
  if (line.length + indent < 90 && !line.includes("\n")) return open + line + close;
  return `${open}\n${parts.map((part) => `${inner}${part},\n`).join("")}${" ".repeat(indent)}${close}`;
}

export function asPython(request) {
  const fields = Object.entries(again(request)).map(([name, value]) => `        ${name === "from" ? "from_" : name}=${python(value, 8)},\n`);
  const kind = request.origin ? "ForkRequest" : "RolloutRequest";
  return `from rollout import Client
from rollout.schema import ${kind}

with Client(${embedded ? "" : JSON.stringify(location.origin)}) as client:
    request = ${kind}(
${fields.join("")}    )
    for rollout in client.run([request]):
        print(rollout.id, rollout.state, rollout.reward)
`;
}

export const asRequest = (request) => JSON.stringify(again(request), null, 2);

/** Where the list of rollouts, or the group of an exported file, is: what is above a rollout. */
export function above(groupId) {
  if (!embedded) return [{ label: "Rollouts", path: ["rollouts"] }];
  return embeddedHash?.startsWith("#/groups/") ? [{ label: "Group", path: ["groups", groupId] }] : [];
}

/** A button with a menu; Esc and a click elsewhere close it. */
export function Menu({ label, children }) {
  const box = useRef();
  useEffect(() => {
    const close = (event) => {
      const { current } = box;
      if (!current?.open || (event.type === "pointerdown" && current.contains(event.target))) return;
      if (event.type === "keydown" && event.key !== "Escape") return;
      current.open = false;
      if (event.type === "keydown") current.querySelector("summary").focus();
    };
    document.addEventListener("pointerdown", close);
    document.addEventListener("keydown", close);
    return () => {
      document.removeEventListener("pointerdown", close);
      document.removeEventListener("keydown", close);
    };
  }, []);
  return html`<details class="menu-box" ref=${box}><summary class="button">${label}</summary><div class="menu-list">${children}</div></details>`;
}

export function CopyAs({ rollout }) {
  return html`<${Menu} label=${html`<${Icon} name="copy" />Copy as`}>
    <${Copy} text=${() => asRequest(rollout.request)}>Request, JSON<//>
    <${Copy} text=${() => asPython(rollout.request)}>Python<//>
    <${Copy} text=${`rollout show ${rollout.id}`}>Command, rollout show<//>
    <${Copy} text=${rollout.id}>Id<//>
    ${!embedded && html`<${Copy} text=${() => location.origin + location.pathname + hashOf(["rollouts", rollout.id])}>Link<//>`}
  <//>`;
}

/** Saves a page as a file that opens without a server. */
export function SavePage({ path, name }) {
  const [state, setState] = useState(null);
  if (embedded) return null;
  const fetchIt = async () => {
    setState("busy");
    try {
      save(new Blob([await getBytes(path)], { type: "text/html" }), `${shortId(name).replace("…", "")}.html`);
      setState(null);
    } catch (problem) {
      setState(problem.detail || problem.message);
    }
  };
  const failed = state && state !== "busy";
  return html`<button type="button" class="button" disabled=${state === "busy"} onClick=${fetchIt} title="One HTML file that opens without a server">
      <${Icon} name="out" />${state === "busy" ? "Saving …" : "Save page"}</button>
    ${failed && html`<span class="wrong" role="alert">${state}</span>`}`;
}
