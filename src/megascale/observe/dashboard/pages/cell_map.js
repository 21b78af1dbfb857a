// Cells in a plane that is zoomed and moved: a cell a rank, by host or by its place in the grid.

import { Drawing, followPointer } from "./canvas.js";
import { SCALE, css, inkOn } from "./colours.js";
import { h } from "./dom.js";

/**
 * Where the cells are, in units of the unzoomed plane.
 * @typedef {{x: Float32Array, y: Float32Array, w: number, h: number, width: number, height: number,
 *   labels: {x: number, y: number, text: string, align: CanvasTextAlign}[]}} Layout
 */

export class CellMap {
  /**
   * @param {{chosen: (cell: number) => void, pointed: (cell: number, x: number, y: number) => void,
   *   text: (cell: number) => string, lines: (cell: number) => string[], label?: string}} told
   */
  constructor(told) {
    this.told = told;
    /** @type {Layout | null} */
    this.layout = null;
    /** Share of the colour scale of each cell; nan: no value. @type {Float32Array} */
    this.shares = new Float32Array(0);
    /** @type {number[]} */
    this.marked = [];
    /** Which cells stay bright; null: all. @type {Set<number> | null} */
    this.bright = null;
    this.at = -1;
    this.zoom = 1;
    this.left = 0;
    this.top = 0;
    this.canvas = h("canvas", {
      tabindex: 0,
      role: "application",
      "aria-roledescription": "heat map",
      "aria-label": told.label ?? "heat map of ranks; arrow keys move, Enter opens a rank, plus and minus zoom",
      onwheel: (/** @type {WheelEvent} */ event) => {
        event.preventDefault();
        this.zoomAt(event.offsetX, event.offsetY, Math.exp(-event.deltaY / 400));
      },
      ...followPointer({
        hover: (x, y) => told.pointed(this.cellAt(x, y), x, y),
        drag: (dx, dy) => {
          this.left -= dx;
          this.top -= dy;
          this.bound();
          this.drawing.later();
        },
        click: (x, y) => this.choose(this.cellAt(x, y)),
      }),
      onpointerleave: () => told.pointed(-1, 0, 0),
      ondblclick: () => this.whole(),
      onkeydown: (/** @type {KeyboardEvent} */ event) => this.key(event),
    });
    this.spoken = h("p", { class: "unseen", role: "status" });
    this.drawing = new Drawing(this.canvas, (context, width, height) => this.draw(context, width, height));
  }

  whole() {
    this.zoom = 1;
    this.left = this.top = 0;
    this.drawing.later();
  }

  /** @param {number} cell */
  choose(cell) {
    if (cell < 0) return;
    this.at = cell;
    this.told.chosen(cell);
    this.drawing.later();
  }

  /** How large the plane is drawn at zoom 1. */
  fit() {
    const layout = this.layout;
    if (!layout) return 1;
    return Math.min(this.drawing.width / layout.width, this.drawing.height / layout.height);
  }

  /** @param {number} px @param {number} py @param {number} by */
  zoomAt(px, py, by) {
    const before = this.zoom;
    this.zoom = Math.max(1, Math.min(60, this.zoom * by));
    const ratio = this.zoom / before;
    this.left = (this.left + px) * ratio - px;
    this.top = (this.top + py) * ratio - py;
    this.bound();
    this.drawing.later();
  }

  bound() {
    const { width, height } = this.drawing;
    this.left = Math.max(0, Math.min(width * (this.zoom - 1), this.left));
    this.top = Math.max(0, Math.min(height * (this.zoom - 1), this.top));
  }

  /** @param {number} px @param {number} py */
  cellAt(px, py) {
    const layout = this.layout;
    if (!layout) return -1;
    const scale = this.fit() * this.zoom;
    const [x, y] = [(px + this.left) / scale, (py + this.top) / scale];
    for (let i = 0; i < layout.x.length; i++) {
      if (x >= layout.x[i] && x < layout.x[i] + layout.w && y >= layout.y[i] && y < layout.y[i] + layout.h) return i;
    }
    return -1;
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    const layout = this.layout;
    if (!layout) return;
    const { width, height } = this.drawing;
    const way = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (way) {
      const at = Math.max(0, this.at);
      let [best, least] = [at, Infinity];
      for (let i = 0; i < layout.x.length; i++) {
        const [dx, dy] = [layout.x[i] - layout.x[at], layout.y[i] - layout.y[at]];
        const along = dx * way[0] + dy * way[1];
        const aside = Math.abs(dx * way[1]) + Math.abs(dy * way[0]);
        if (along > 1e-6 && along + 4 * aside < least) [best, least] = [i, along + 4 * aside];
      }
      this.at = this.at < 0 ? 0 : best;
      this.spoken.textContent = this.told.text(this.at);
      const scale = this.fit() * this.zoom;
      this.told.pointed(this.at, layout.x[this.at] * scale - this.left, layout.y[this.at] * scale - this.top);
      this.drawing.later();
    } else if (event.key === "Enter" || event.key === " ") this.choose(this.at);
    else if (event.key === "+" || event.key === "=") this.zoomAt(width / 2, height / 2, 1.4);
    else if (event.key === "-") this.zoomAt(width / 2, height / 2, 1 / 1.4);
    else if (event.key === "Escape") this.whole();
    else return;
    event.preventDefault();
  }

  /** @param {CanvasRenderingContext2D} context @param {number} width @param {number} height */
  draw(context, width, height) {
    context.fillStyle = css("panel");
    context.fillRect(0, 0, width, height);
    const layout = this.layout;
    if (!layout) return;
    const scale = this.fit() * this.zoom;
    const [w, hgt] = [layout.w * scale, layout.h * scale];
    const gap = Math.min(w, hgt) > 5 ? 1 : Math.min(w, hgt) > 2.5 ? 0.5 : 0;
    const none = css("line");
    const texts = w > 52 && hgt > 17;
    context.textBaseline = "middle";
    context.textAlign = "center";
    // Cells of one colour are filled together: changing the colour costs more than a rectangle.
    /** @type {number[][]} */
    const byColour = Array.from({ length: 257 }, () => []);
    for (let i = 0; i < layout.x.length; i++) {
      const [x, y] = [layout.x[i] * scale - this.left, layout.y[i] * scale - this.top];
      if (x > width || y > height || x + w < 0 || y + hgt < 0) continue;
      const share = this.shares[i];
      byColour[Number.isNaN(share) ? 256 : Math.round(share * 255)].push(i);
    }
    for (let colour = 0; colour < 257; colour++) {
      if (!byColour[colour].length) continue;
      context.fillStyle = colour === 256 ? none : SCALE[colour];
      context.beginPath();
      for (const i of byColour[colour]) {
        if (this.bright && !this.bright.has(i)) continue;
        context.rect(layout.x[i] * scale - this.left, layout.y[i] * scale - this.top, w - gap, hgt - gap);
      }
      context.fill();
      if (this.bright) {
        context.globalAlpha = 0.4;
        context.beginPath();
        for (const i of byColour[colour]) {
          if (!this.bright.has(i)) context.rect(layout.x[i] * scale - this.left, layout.y[i] * scale - this.top, w - gap, hgt - gap);
        }
        context.fill();
        context.globalAlpha = 1;
      }
      if (!texts) continue;
      context.font = `${Math.min(13, hgt / 2.4)}px system-ui, sans-serif`;
      context.fillStyle = colour === 256 ? css("quiet") : inkOn(colour / 255);
      for (const i of byColour[colour]) {
        const lines = this.told.lines(i).slice(0, hgt > 34 ? 2 : 1);
        const [x, y] = [layout.x[i] * scale - this.left + w / 2, layout.y[i] * scale - this.top + hgt / 2];
        lines.forEach((line, n) => context.fillText(line, x, y + (n - (lines.length - 1) / 2) * Math.min(16, hgt / 2.4), w - 4));
      }
    }
    context.fillStyle = css("quiet");
    context.font = "11px system-ui, sans-serif";
    for (const label of layout.labels) {
      context.textAlign = label.align;
      context.fillText(label.text, label.x * scale - this.left, label.y * scale - this.top, 150);
    }
    const ring = css("mark");
    for (const i of this.marked) this.ring(context, i, scale, w, hgt, ring, 2);
    if (this.at >= 0 && this.at < layout.x.length) this.ring(context, this.at, scale, w, hgt, css("link"), 3);
  }

  /** @param {CanvasRenderingContext2D} context @param {number} i @param {number} scale @param {number} w
   * @param {number} hgt @param {string} colour @param {number} thick */
  ring(context, i, scale, w, hgt, colour, thick) {
    const layout = /** @type {Layout} */ (this.layout);
    const more = Math.max(0, (13 - Math.min(w, hgt)) / 2);
    const box = /** @type {const} */ ([layout.x[i] * scale - this.left - more, layout.y[i] * scale - this.top - more, w + 2 * more - 1, hgt + 2 * more - 1]);
    context.strokeStyle = css("panel");
    context.lineWidth = thick + 2;
    context.strokeRect(...box);
    context.strokeStyle = colour;
    context.lineWidth = thick;
    context.strokeRect(...box);
  }

  close() {
    this.drawing.close();
  }
}

/**
 * A host's ranks side by side. Few hosts: a row each, with its name; many: columns in bands, as wide as the place.
 * @param {number[]} hosts of each rank, an index @param {string[]} names @param {number} width @param {number} height
 * @returns {Layout}
 */
export function byHost(hosts, names, width, height) {
  const [x, y] = [new Float32Array(hosts.length), new Float32Array(hosts.length)];
  const counts = new Array(names.length).fill(0);
  const slot = hosts.map((host) => counts[host]++);
  const most = Math.max(1, ...counts);
  if (names.length <= 24) {
    const label = Math.min(170, 24 + 7 * Math.max(4, ...names.map((name) => name.length)));
    const w = Math.min(130, (width - label - 12) / most);
    const tall = Math.max(6, Math.min(56, (height - 16) / names.length));
    hosts.forEach((host, i) => {
      x[i] = label + slot[i] * w;
      y[i] = 8 + host * tall;
    });
    const labels = names.map((text, host) => ({ x: label - 8, y: 8 + (host + 0.5) * tall, text, align: /** @type {CanvasTextAlign} */ ("right") }));
    return { x, y, w, h: tall, width, height, labels };
  }
  let size = 40;
  for (; size > 2; size -= 0.25) {
    const columns = Math.floor((width - 16) / size);
    if (Math.ceil(names.length / columns) * (most * size + 0.6 * size) <= height - 16) break;
  }
  const columns = Math.floor((width - 16) / size);
  hosts.forEach((host, i) => {
    x[i] = 8 + (host % columns) * size;
    y[i] = 8 + Math.floor(host / columns) * (most + 0.6) * size + slot[i] * size;
  });
  return { x, y, w: size, h: size, width, height, labels: [] };
}

/**
 * Rows of pipeline stage and tensor rank, columns of data-parallel replicas.
 * @param {number[]} tensor @param {number[]} pipeline @param {number[]} data @param {number} width @param {number} height
 * @returns {Layout}
 */
export function byGrid(tensor, pipeline, data, width, height) {
  const [x, y] = [new Float32Array(data.length), new Float32Array(data.length)];
  const most = (/** @type {number[]} */ of) => of.reduce((a, b) => Math.max(a, b), 0) + 1;
  const [tensors, stages, replicas] = [most(tensor), most(pipeline), most(data)];
  const label = 66;
  const w = Math.min(110, (width - label - 12) / replicas);
  const split = stages > 1 ? 4 : 0;
  const tall = Math.max(1, Math.min(50, (height - 16 - stages * split) / (tensors * stages)));
  for (let i = 0; i < data.length; i++) {
    x[i] = label + Math.max(0, data[i]) * w;
    y[i] = 8 + (Math.max(0, pipeline[i]) * tensors + Math.max(0, tensor[i])) * tall + Math.max(0, pipeline[i]) * split;
  }
  const labels = Array.from({ length: stages }, (_, stage) => ({
    x: label - 8, y: 8 + (stage + 0.5) * tensors * tall + stage * split, text: `stage ${stage}`, align: /** @type {CanvasTextAlign} */ ("right"),
  }));
  return { x, y, w, h: tall, width, height, labels };
}
