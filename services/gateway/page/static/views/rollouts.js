import { html, Head } from "../ui.js";

export function RolloutsView() {
  return html`<${Head} title="Rollouts" />`;
}
