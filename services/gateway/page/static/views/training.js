import { html, Head } from "../ui.js";

export function TrainingView() {
  return html`<${Head} title="Training" />`;
}
