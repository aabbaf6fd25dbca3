import { html, Head, shortId } from "../ui.js";

export function GroupView({ params }) {
  return html`<${Head} title=${shortId(params.id)} />`;
}
