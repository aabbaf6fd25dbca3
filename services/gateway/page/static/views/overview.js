import { html, Head } from "../ui.js";

export function OverviewView() {
  return html`<${Head} title="Overview" />`;
}
