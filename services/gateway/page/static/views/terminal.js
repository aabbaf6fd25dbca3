// Output of a terminal: colours as spans, everything else that a terminal would obey left out.
import { createAnsiSequenceParser, createColorPalette } from "../vendor/ansi-sequence-parser.js";
import { html, useMemo } from "../ui.js";
import { More, cut, useMore, visible } from "./words.js";

const SEQUENCE = /\x1b(?:\[([0-?]*)([ -/]*)([@-~])|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[PX^_][^\x1b]*(?:\x1b\\)?|[ -/]*[0-~]?)/g;
const MOST_SPANS = 5000;
/** Share of a cut output that is its beginning; of a running one its end is looked at. */
const HEAD = 0.7;
const HEAD_RUNNING = 0.1;
const palette = createColorPalette();

/** A text in which only colours and line ends are left to obey. */
export function settled(text) {
  const colours = text.replace(SEQUENCE, (whole, numbers, between, end) =>
    end === "m" && !between && /^[\d;]*$/.test(numbers) ? whole : "",
  );
  if (!/[\r\b]/.test(colours)) return colours;
  // Behind no other \r: a run of them is looked at once, and not once from each of its places.
  return colours.replace(/(?<!\r)\r+\n/g, "\n").split("\n").map(overwritten).join("\n");
}

/** A line after its carriage returns: what was written last stays. */
function overwritten(line) {
  if (!/[\r\b]/.test(line)) return line;
  const last = line.replace(/(?<!\r)\r+$/, "");
  return last.slice(last.lastIndexOf("\r") + 1).replace(/[^\b]\x08/g, "").replace(/\x08/g, "");
}

function spans(text) {
  const parts = createAnsiSequenceParser().parse(settled(text));
  if (parts.length > MOST_SPANS) return [visible(parts.map((part) => part.value).join(""))];
  return parts.map(({ value, foreground, background, decorations }) => {
    if (!foreground && !background && !decorations.size) return visible(value);
    const turned = decorations.has("reverse");
    const [front, back] = turned ? [background, foreground] : [foreground, background];
    const words = [...decorations].map((name) => `t-${name}`);
    const style = {};
    paint(front, "fg", words, style);
    paint(back, "bg", words, style);
    return html`<span class=${words.join(" ")} style=${style}>${visible(value)}</span>`;
  });
}

/** Named colours are classes, so that they fit the page's; others are lightened until they can be read. */
function paint(colour, side, words, style) {
  if (colour?.type === "named") words.push(`t-${side}-${colour.name}`);
  if (!colour || colour.type === "named") return;
  const rgb = palette.value(colour)?.match(/[\da-f]{2}/gi)?.map((part) => Number.parseInt(part, 16));
  if (!rgb || rgb.length !== 3) return;
  const bright = 0.2126 * rgb[0] + 0.7152 * rgb[1] + 0.0722 * rgb[2];
  const share = side === "fg" ? Math.max(0, 150 - bright) / 255 : -Math.max(0, bright - 60) / 255;
  const mixed = rgb.map((part) => Math.round(share > 0 ? part + (255 - part) * share : part * (1 + share)));
  style[side === "fg" ? "color" : "backgroundColor"] = `rgb(${mixed.join(",")})`;
}

/** What a command has printed; `running` has it end in a cursor. */
export function Terminal({ text, owner = null, name = "output", label = "output", running = false }) {
  const [size, more] = useMore(owner, name);
  const { head, tail, hidden } = useMemo(() => cut(text, size.chars, size.lines, running ? HEAD_RUNNING : HEAD), [text, size, running]);
  // A cut may fall into a sequence, of which the rest would be text.
  const broken = hidden > 0 && /\x1b\[[\d;]*$/.test(text.slice(Math.max(0, text.length - tail.length - 16), text.length - tail.length));
  const begin = useMemo(() => spans(head), [head]);
  const end = useMemo(() => spans(broken ? tail.replace(/^[\d;]*[A-Za-z]/, "") : tail), [tail]);
  const cursor = running && html`<span class="cursor" aria-hidden="true"> </span>`;
  return html`<div class="terminal" role="group" aria-label=${label} dir="ltr"><span class="screen">${begin}</span>
    ${hidden > 0 && html`<${More} hidden=${hidden} text=${text} more=${more} name=${name} />`}
    ${tail && html`<span class="screen">${end}</span>`}${cursor}${!text && !running && html`<span class="quiet">no output</span>`}</div>`;
}
