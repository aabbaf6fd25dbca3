import { html, Head, shortId } from "../ui.js";

export function RolloutView({ params }) {
  return html`<${Head} title=${shortId(params.id)} />`;
}
