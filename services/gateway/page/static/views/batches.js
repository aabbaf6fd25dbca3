import { html, Head } from "../ui.js";

export function BatchesView() {
  return html`<${Head} title="Batches" />`;
}

export function BatchView({ params }) {
  return html`<${Head} title=${params.id} />`;
}
