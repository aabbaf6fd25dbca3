import { html, Head } from "../ui.js";

export function ErrorsView() {
  return html`<${Head} title="Errors" />`;
}
