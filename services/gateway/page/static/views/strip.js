// The token strip: where each cell lies, and drawing those that are seen. A canvas, for 128,000 elements would not scroll.

const ROW = 24;
const CELL = 20;
const PAD = 4;
const GAP = 2;
const HUES = 8;
/** Below it a log-prob has the strongest colour; e⁻⁶ is one in four hundred. */
const COLDEST = -6;

/** Places of all tokens for a width. Each segment begins a row, and so does what follows a line's end. */
export function layOut(chain, vocabulary, width, gutter, measure) {
  const { ids, length, segments } = chain;
  const xs = new Float32Array(length);
  const widths = new Float32Array(length);
  const rowOf = new Int32Array(length);
  const rows = [];
  const known = new Map();
  let x = gutter;
  for (const segment of segments) {
    x = Infinity;
    for (let at = segment.start; at < segment.end; at++) {
      const id = ids[at];
      let cell = known.get(id);
      if (cell === undefined) {
        const text = vocabulary.cell(id);
        cell = { wide: Math.min(width - gutter - GAP, measure(text) + 2 * PAD), ends: vocabulary.text(id)?.endsWith("\n") };
        known.set(id, cell);
      }
      if (x + cell.wide > width) {
        rows.push(at);
        x = gutter;
      }
      [xs[at], widths[at], rowOf[at]] = [x, cell.wide, rows.length - 1];
      x = cell.ends ? Infinity : x + cell.wide + GAP;
    }
  }
  return { xs, widths, rowOf, rows, height: rows.length * ROW + ROW, length };
}

export class Strip {
  /** `shown(position, why)` is told of the token under the pointer (`hover`) and of the chosen one (`chosen`). */
  constructor({ scroller, canvas, map, letter, shown }) {
    Object.assign(this, { scroller, canvas, map, letter, shown, chosen: -1, hovered: -1, hits: null, mode: "version" });
    this.pen = canvas.getContext("2d");
    this.mapPen = map.getContext("2d", { willReadFrequently: true });
    this.open = new AbortController();
    const on = (target, name, act) => target.addEventListener(name, act, { signal: this.open.signal });
    on(scroller, "scroll", () => this.later());
    on(canvas, "pointermove", (event) => this.hover(this.find(event)));
    on(canvas, "pointerleave", () => this.hover(-1));
    on(canvas, "click", (event) => this.choose(this.find(event)));
    on(scroller, "keydown", (event) => this.key(event));
    on(map, "pointerdown", (event) => this.travel(event));
    on(map, "pointermove", (event) => event.buttons && this.travel(event));
    on(matchMedia("(prefers-color-scheme: dark)"), "change", () => this.repaint());
    on(window, "themechange", () => this.repaint());
    this.resized = new ResizeObserver(() => this.resize());
    this.resized.observe(scroller);
  }

  close() {
    this.open.abort();
    this.resized.disconnect();
    cancelAnimationFrame(this.frame);
  }

  show(chain, vocabulary) {
    const another = chain !== this.chain || vocabulary !== this.vocabulary;
    if (another) [this.chosen, this.hovered, this.hits] = [-1, -1, null];
    Object.assign(this, { chain, vocabulary });
    this.resize(true);
    if (another && this.scroller.scrollTop) this.scroller.scrollTop = 0;
  }

  set(options) {
    Object.assign(this, options);
    this.repaint();
  }

  resize(anyway = false) {
    if (!this.chain) return;
    const [width, height] = [this.scroller.clientWidth, this.scroller.clientHeight];
    if (!width || !height) return;
    const scale = devicePixelRatio;
    const top = this.layout && !anyway ? this.layout.rows[this.topRow()] : -1;
    if (anyway || this.width !== width || this.layout?.length !== this.chain.length) {
      this.font = `12.5px ${getComputedStyle(this.scroller).fontFamily}`;
      this.pen.font = this.font;
      this.gutter = width < 520 ? 58 : 96;
      this.layout = layOut(this.chain, this.vocabulary, width, this.gutter, (text) => this.pen.measureText(text).width);
      this.canvas.parentElement.style.height = `${Math.max(height, this.layout.height)}px`;
      if (top > 0) this.scroller.scrollTop = this.layout.rowOf[top] * ROW;
    }
    [this.width, this.height] = [width, height];
    for (const [canvas, wide] of [[this.canvas, width], [this.map, this.map.clientWidth]]) {
      [canvas.width, canvas.height] = [wide * scale, height * scale];
      canvas.style.height = `${height}px`;
    }
    this.repaint();
  }

  repaint() {
    this.colours = null;
    this.later();
  }

  later() {
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.draw());
  }

  topRow() {
    return Math.max(0, Math.min(this.layout.rows.length - 1, Math.floor(this.scroller.scrollTop / ROW)));
  }

  end(row) {
    return this.layout.rows[row + 1] ?? this.chain.length;
  }

  // -- drawing

  palette() {
    if (this.colours) return this.colours;
    const style = getComputedStyle(this.scroller);
    const read = (name) => style.getPropertyValue(name).trim();
    const tile = Object.assign(document.createElement("canvas"), { width: 6, height: 6 });
    const pen = tile.getContext("2d");
    pen.strokeStyle = read("--tok-hatch");
    pen.beginPath();
    for (const from of [-6, 0, 6]) pen.moveTo(from, 6), pen.lineTo(from + 6, 0);
    pen.stroke();
    this.colours = {
      versions: Array.from({ length: HUES }, (_, at) => read(`--v${at}`)),
      hatch: this.pen.createPattern(tile, "repeat"),
      given: read("--tok-given"), text: read("--tok-text"), faint: read("--tok-faint"), heat: read("--tok-heat"),
      plain: read("--tok-plain"), bar: read("--tok-bar"), ring: read("--tok-ring"), hit: read("--tok-hit"),
    };
    this.drawMap();
    return this.colours;
  }

  draw() {
    if (!this.layout || !this.width) return;
    const { pen, layout, scroller } = this;
    const colours = this.palette();
    const scale = devicePixelRatio;
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, this.width, this.height);
    pen.font = this.font;
    pen.textBaseline = "middle";
    pen.direction = "ltr";
    const first = this.topRow();
    const last = Math.min(layout.rows.length - 1, Math.ceil((scroller.scrollTop + this.height) / ROW));
    for (let row = first; row <= last; row++) {
      const y = row * ROW - scroller.scrollTop + (ROW - CELL) / 2;
      const begin = layout.rows[row];
      const segment = this.chain.at(begin);
      if (begin === segment.start || row === first) this.label(segment, y, colours);
      for (let at = begin; at < this.end(row); at++) this.cell(at, segment, y, colours);
    }
    this.frameMap();
  }

  label(segment, y, colours) {
    const { pen } = this;
    const narrow = this.gutter < 80;
    pen.fillStyle = segment.sampled ? colours.text : colours.faint;
    if (!segment.sampled) return pen.fillText(narrow ? segment.role.slice(0, 6) : segment.role, 4, y + CELL / 2, this.gutter - 10);
    pen.fillStyle = colours.versions[segment.version % HUES];
    pen.fillRect(2, y + 2, 20, CELL - 4);
    pen.fillStyle = colours.text;
    pen.fillText(this.letter(segment.version), 8, y + CELL / 2, 14);
    pen.fillText(`${narrow ? "" : "turn "}${segment.turn}`, 28, y + CELL / 2, this.gutter - 34);
  }

  cell(at, segment, y, colours) {
    const { pen, layout } = this;
    const [x, wide] = [layout.xs[at], layout.widths[at]];
    const p = segment.sampled ? this.chain.logprobs[at] : 0;
    if (!segment.sampled) {
      pen.fillStyle = colours.given;
      pen.fillRect(x, y, wide, CELL);
      pen.fillStyle = colours.hatch;
    } else if (this.mode === "logprob") {
      pen.fillStyle = colours.plain;
      pen.fillRect(x, y, wide, CELL);
      pen.globalAlpha = Math.min(1, p / COLDEST);
      pen.fillStyle = colours.heat;
    } else {
      pen.fillStyle = colours.versions[segment.version % HUES];
    }
    pen.fillRect(x, y, wide, CELL);
    pen.globalAlpha = 1;
    if (segment.sampled && this.mode === "logprob") {
      pen.fillStyle = colours.bar;
      pen.fillRect(x, y + CELL - 2, wide * Math.exp(p), 2);
    }
    if (this.hits?.has(at)) {
      pen.strokeStyle = colours.hit;
      pen.lineWidth = 2;
      pen.strokeRect(x + 1, y + 1, wide - 2, CELL - 2);
    }
    if (at === this.chosen || at === this.hovered) {
      pen.strokeStyle = colours.ring;
      pen.lineWidth = at === this.chosen ? 2 : 1;
      pen.strokeRect(x + 0.5, y + 0.5, wide - 1, CELL - 1);
    }
    pen.fillStyle = segment.sampled ? colours.text : colours.faint;
    pen.fillText(this.vocabulary.cell(this.chain.ids[at]), x + PAD, y + CELL / 2 + 0.5, Math.max(1, wide - 2 * PAD + 1));
  }

  /** All rows in one column of the window's height: the shape of the whole chain. */
  drawMap() {
    const { map, layout, mapPen: pen } = this;
    pen.clearRect(0, 0, map.width, map.height);
    const rows = layout.rows.length;
    const each = Math.min(ROW * devicePixelRatio, map.height / rows);
    this.mapHeight = each * rows;
    for (const segment of this.chain.segments) {
      if (segment.start === segment.end) continue;
      const [from, rowsOf] = [layout.rowOf[segment.start], layout.rowOf[segment.end - 1] + 1 - layout.rowOf[segment.start]];
      const left = segment.sampled ? 0 : map.width / 2;
      pen.fillStyle = segment.sampled ? this.colours.versions[segment.version % HUES] : this.colours.given;
      pen.fillRect(left, from * each, map.width - left, Math.max(0.5, rowsOf * each));
    }
    if (this.hits) {
      pen.fillStyle = this.colours.hit;
      for (const at of this.hits) pen.fillRect(0, layout.rowOf[at] * each, map.width, Math.max(2, each / 4));
    }
    this.mapDrawn = pen.getImageData(0, 0, map.width, map.height);
  }

  frameMap() {
    if (!this.mapDrawn) return;
    const { mapPen: pen, map, scroller, layout } = this;
    pen.putImageData(this.mapDrawn, 0, 0);
    pen.strokeStyle = this.colours.ring;
    pen.lineWidth = 2;
    const share = this.mapHeight / layout.height;
    pen.strokeRect(1, scroller.scrollTop * share + 1, map.width - 2, Math.max(6, Math.min(this.mapHeight, this.height * share)) - 2);
  }

  travel(event) {
    const share = (event.offsetY * devicePixelRatio) / this.mapHeight;
    this.scroller.scrollTop = share * this.layout.height - this.height / 2;
  }

  // -- choosing

  find(event) {
    const row = Math.floor((event.offsetY + this.scroller.scrollTop) / ROW);
    return this.near(row, event.offsetX, true);
  }

  /** The token of a row at an x, or -1; without `exactly` the nearest one. */
  near(row, x, exactly = false) {
    const { layout } = this;
    if (!layout || row < 0 || row >= layout.rows.length) return -1;
    let at = layout.rows[row];
    while (at + 1 < this.end(row) && layout.xs[at + 1] <= x) at++;
    const outside = x < layout.xs[at] || x > layout.xs[at] + layout.widths[at];
    return exactly && outside ? -1 : at;
  }

  hover(at) {
    if (at === this.hovered) return;
    this.hovered = at;
    this.later();
    this.shown(at, "hover");
  }

  choose(at, scroll = false) {
    if (at < 0 || at >= this.chain.length) return;
    this.chosen = at;
    if (scroll) this.reveal(at);
    this.later();
    this.shown(at, "chosen");
  }

  /** Scroll as little as shows a token; to the middle where it is far. */
  reveal(at) {
    const y = this.layout.rowOf[at] * ROW;
    const { scrollTop } = this.scroller;
    if (y >= scrollTop && y + ROW <= scrollTop + this.height) return;
    const near = Math.abs(y - scrollTop) < 2 * this.height;
    this.scroller.scrollTop = !near ? y - this.height / 2 : y < scrollTop ? y : y + ROW - this.height;
  }

  key(event) {
    if (event.target !== this.scroller || event.altKey || event.metaKey) return;
    const at = this.moved(event.key, event.ctrlKey);
    if (at === null) return;
    event.preventDefault();
    event.stopPropagation();
    this.choose(Math.max(0, Math.min(this.chain.length - 1, at)), true);
  }

  moved(key, far) {
    const { layout, chain } = this;
    const from = this.chosen < 0 ? layout.rows[this.topRow()] : this.chosen;
    if (this.chosen < 0 && /^Arrow/.test(key)) return from;
    const row = layout.rowOf[from];
    const page = Math.max(1, Math.floor(this.height / ROW) - 1);
    const vertical = (rows) => this.near(Math.max(0, Math.min(layout.rows.length - 1, row + rows)), layout.xs[from]);
    const segment = chain.at(from);
    switch (key) {
      case "ArrowLeft": return from - 1;
      case "ArrowRight": return from + 1;
      case "ArrowUp": return vertical(-1);
      case "ArrowDown": return vertical(1);
      case "PageUp": return vertical(-page);
      case "PageDown": return vertical(page);
      case "Home": return far ? 0 : layout.rows[row];
      case "End": return far ? chain.length - 1 : this.end(row) - 1;
      case "[": return segment.start < from ? segment.start : (chain.segments[segment.index - 1]?.start ?? 0);
      case "]": return segment.end;
      default: return null;
    }
  }
}
