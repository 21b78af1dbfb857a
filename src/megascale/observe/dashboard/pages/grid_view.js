// Ranks as points in space: data to the right, stages downward, tensor ranks into the depth; turned and zoomed.

import { Drawing, followPointer } from "./canvas.js";
import { SCALE, css, inkOn, parts, pixel } from "./colours.js";
import { h } from "./dom.js";

/** @typedef {{from: number, to: number, colour: string, dash: number[], arrow: boolean}} Link */

const MANY = 2000;

export class GridView {
  /** @param {{chosen: (cell: number) => void, pointed: (cell: number, x: number, y: number) => void}} told */
  constructor(told) {
    this.told = told;
    this.count = 0;
    /** Places in the grid, centred. @type {Float32Array[]} */
    this.at = [new Float32Array(0), new Float32Array(0), new Float32Array(0)];
    this.sizes = [1, 1, 1];
    /** @type {number[]} */
    this.ranks = [];
    /** @type {ImageData | null} */
    this.image = null;
    this.shares = new Float32Array(0);
    /** @type {Link[]} */
    this.links = [];
    /** Points with a ring, by its colour. @type {Map<number, string>} */
    this.rings = new Map();
    /** @type {Set<number> | null} */
    this.bright = null;
    this.yaw = -0.5;
    this.pitch = 0.42;
    this.zoom = 1;
    this.px = new Float32Array(0);
    this.py = new Float32Array(0);
    this.depth = new Float32Array(0);
    this.size = 4;
    /** @type {Uint32Array} */
    this.order = new Uint32Array(0);
    this.canvas = h("canvas", {
      tabindex: 0,
      role: "application",
      "aria-roledescription": "grid of ranks",
      "aria-label": "ranks in tensor, pipeline and data; arrows turn, plus and minus zoom; the field for a rank above chooses one",
      onwheel: (/** @type {WheelEvent} */ event) => {
        event.preventDefault();
        this.scale(Math.exp(-event.deltaY / 500));
      },
      ...followPointer({
        hover: (x, y) => told.pointed(this.hit(x, y), x, y),
        drag: (dx, dy) => this.turn(dx / 180, dy / 180),
        click: (x, y) => told.chosen(this.hit(x, y)),
      }),
      onpointerleave: () => told.pointed(-1, 0, 0),
      onkeydown: (/** @type {KeyboardEvent} */ event) => this.key(event),
    });
    this.drawing = new Drawing(this.canvas, (context, width, height) => this.draw(context, width, height));
  }

  /** @param {number[]} ranks @param {number[]} tensor @param {number[]} pipeline @param {number[]} data */
  set(ranks, tensor, pipeline, data) {
    this.ranks = ranks;
    this.count = tensor.length;
    const most = (/** @type {number[]} */ of) => of.reduce((a, b) => Math.max(a, b), 0) + 1;
    this.sizes = [most(data), most(pipeline), most(tensor)];
    this.at = [data, pipeline, tensor].map((places, axis) => Float32Array.from(places, (each) => each - (this.sizes[axis] - 1) / 2));
    this.px = new Float32Array(this.count);
    this.py = new Float32Array(this.count);
    this.depth = new Float32Array(this.count);
    this.order = Uint32Array.from({ length: this.count }, (_, i) => i);
  }

  /** @param {number} by */
  scale(by) {
    this.zoom = Math.max(0.3, Math.min(20, this.zoom * by));
    this.drawing.later();
  }

  /** @param {number} yaw @param {number} pitch */
  turn(yaw, pitch) {
    this.yaw += yaw;
    this.pitch = Math.max(-1.5, Math.min(1.5, this.pitch + pitch));
    this.drawing.later();
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    if (event.key === "ArrowLeft") this.turn(-0.12, 0);
    else if (event.key === "ArrowRight") this.turn(0.12, 0);
    else if (event.key === "ArrowUp") this.turn(0, -0.12);
    else if (event.key === "ArrowDown") this.turn(0, 0.12);
    else if (event.key === "+" || event.key === "=") this.scale(1.25);
    else if (event.key === "-") this.scale(0.8);
    else if (event.key === "Escape") {
      [this.yaw, this.pitch, this.zoom] = [-0.5, 0.42, 1];
      this.told.chosen(-1);
      this.drawing.later();
    } else return;
    event.preventDefault();
  }

  /** @param {number} x @param {number} y */
  hit(x, y) {
    let [best, nearest] = [-1, Math.max(9, this.size) ** 2];
    for (const i of this.order) {
      const far = (this.px[i] - x) ** 2 + (this.py[i] - y) ** 2;
      if (far <= nearest) [best, nearest] = [i, far];
    }
    return best;
  }

  /** How far apart ranks are along each axis: long axes closer, so that all fits. @returns {number[]} */
  spacing() {
    const longest = Math.max(...this.sizes);
    return this.sizes.map((size) => (size === 1 ? 1 : Math.min(1, (longest * (size === longest ? 1 : 0.55)) / size) * (size === longest ? 1 : Math.min(longest / size / 2, 9))));
  }

  /** @param {number} x @param {number} y @param {number} z @param {number} width @param {number} height
   * @param {number} unit @returns {[number, number, number]} */
  project(x, y, z, width, height, unit) {
    const [cy, sy, cp, sp] = [Math.cos(this.yaw), Math.sin(this.yaw), Math.cos(this.pitch), Math.sin(this.pitch)];
    const [x1, z1] = [x * cy + z * sy, -x * sy + z * cy];
    const [y2, z2] = [y * cp + z1 * sp, -y * sp + z1 * cp];
    return [width / 2 + x1 * unit, height / 2 + y2 * unit, z2];
  }

  /** @param {CanvasRenderingContext2D} context @param {number} width @param {number} height */
  draw(context, width, height) {
    context.fillStyle = css("panel");
    context.fillRect(0, 0, width, height);
    if (!this.count) return;
    const gaps = this.spacing();
    const half = this.sizes.map((size, axis) => Math.max(0.5, ((size - 1) / 2) * gaps[axis]));
    const reach = Math.hypot(half[0], half[2]);
    const unit = Math.min((width - 70) / (2 * reach + 2.6), (height - 60) / (2 * (half[1] * Math.cos(0.42) + reach * 0.5) + 1.6)) * this.zoom;
    for (let i = 0; i < this.count; i++) {
      [this.px[i], this.py[i], this.depth[i]] = this.project(this.at[0][i] * gaps[0], this.at[1][i] * gaps[1], this.at[2][i] * gaps[2], width, height, unit);
    }
    this.sort();
    // As wide as there is room beside each other, as tall as there is below each other.
    const wide = Math.max(2, Math.min(30, unit * gaps[0] * 0.7));
    const tall = Math.max(3, Math.min(30, unit * Math.min(...[1, 2].filter((axis) => this.sizes[axis] > 1).map((axis) => gaps[axis]), 9) * 0.3));
    this.size = Math.max(wide, tall);
    const inside = (/** @type {number} */ i) => this.px[i] > -wide && this.px[i] < width + wide && this.py[i] > -tall && this.py[i] < height + tall;
    if (this.count > MANY) this.dots(context, wide, tall);
    else this.boxes(context, wide, tall, inside);
    context.globalAlpha = 1;
    this.frame(context, half, width, height, unit);
    for (const link of this.links) this.link(context, link);
    for (const [i, colour] of this.rings) {
      const around = Math.max(this.size, 9) + 4;
      context.strokeStyle = css("panel");
      context.lineWidth = 5;
      context.strokeRect(this.px[i] - around / 2, this.py[i] - around / 2, around, around);
      context.strokeStyle = css(colour);
      context.lineWidth = 3;
      context.strokeRect(this.px[i] - around / 2, this.py[i] - around / 2, around, around);
    }
  }

  /** Few ranks, with an edge and their number. @param {CanvasRenderingContext2D} context @param {number} wide
   * @param {number} tall @param {(i: number) => boolean} inside */
  boxes(context, wide, tall, inside) {
    const [none, ink] = [css("edge"), css("ink")];
    context.font = "11px system-ui, sans-serif";
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.lineWidth = 1;
    const labelled = wide >= 16 && tall >= 12;
    for (const i of this.order) {
      if (!inside(i)) continue;
      const share = this.shares[i];
      context.fillStyle = Number.isNaN(share) ? none : SCALE[Math.round(share * 255)];
      context.globalAlpha = this.bright && !this.bright.has(i) ? 0.4 : 1;
      context.fillRect(this.px[i] - wide / 2, this.py[i] - tall / 2, wide, tall);
      if (!labelled) continue;
      // Dark colours have an edge on a dark page, and there is room for the rank.
      context.strokeStyle = none;
      context.strokeRect(this.px[i] - wide / 2, this.py[i] - tall / 2, wide, tall);
      context.fillStyle = Number.isNaN(share) ? ink : inkOn(share);
      context.fillText(String(this.ranks[i]), this.px[i], this.py[i] + 1, wide - 2);
    }
  }

  /** Many ranks, written pixel by pixel: filling ten thousand rectangles of changing colours takes most of a frame.
   * @param {CanvasRenderingContext2D} context @param {number} wide @param {number} tall */
  dots(context, wide, tall) {
    const { width, height } = this.canvas;
    const ratio = width / this.drawing.width;
    if (!this.image || this.image.width !== width || this.image.height !== height) this.image = context.createImageData(width, height);
    const pixels = new Uint32Array(this.image.data.buffer);
    const panel = parts(css("panel"));
    pixels.fill(pixel(panel, panel, 1));
    const colours = [...SCALE, css("edge")].map(parts);
    const full = Uint32Array.from(colours, (colour) => pixel(colour, panel, 1));
    const faint = Uint32Array.from(colours, (colour) => pixel(colour, panel, 0.4));
    const [w, hgt] = [Math.max(1, Math.round(wide * ratio)), Math.max(1, Math.round(tall * ratio))];
    for (const i of this.order) {
      const left = Math.round(this.px[i] * ratio - w / 2);
      const top = Math.round(this.py[i] * ratio - hgt / 2);
      const [x0, x1] = [Math.max(0, left), Math.min(width, left + w)];
      const [y0, y1] = [Math.max(0, top), Math.min(height, top + hgt)];
      if (x0 >= x1 || y0 >= y1) continue;
      const share = this.shares[i];
      const colour = (this.bright && !this.bright.has(i) ? faint : full)[Number.isNaN(share) ? 256 : Math.round(share * 255)];
      for (let y = y0; y < y1; y++) pixels.fill(colour, y * width + x0, y * width + x1);
    }
    context.putImageData(this.image, 0, 0);
  }

  /** Farthest first, by 512 classes of depth: sorting all of it exactly takes most of a frame. */
  sort() {
    let [least, most] = [Infinity, -Infinity];
    for (let i = 0; i < this.count; i++) {
      least = Math.min(least, this.depth[i]);
      most = Math.max(most, this.depth[i]);
    }
    const scale = 511 / (most - least || 1);
    const starts = new Uint32Array(513);
    for (let i = 0; i < this.count; i++) starts[1 + Math.floor((most - this.depth[i]) * scale)]++;
    for (let i = 0; i < 512; i++) starts[i + 1] += starts[i];
    for (let i = 0; i < this.count; i++) this.order[starts[Math.floor((most - this.depth[i]) * scale)]++] = i;
  }

  /** The three axes at the corner nearest to the eye. @param {CanvasRenderingContext2D} context @param {number[]} half
   * @param {number} width @param {number} height @param {number} unit */
  frame(context, half, width, height, unit) {
    const room = 0.9;
    const corner = [-half[0] - room, half[1] + room, -half[2] - room];
    const names = ["data", "pipeline", "tensor"];
    context.strokeStyle = css("edge");
    context.fillStyle = css("quiet");
    context.font = "12px system-ui, sans-serif";
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.lineWidth = 1;
    const [ox, oy] = this.project(corner[0], corner[1], corner[2], width, height, unit);
    for (let axis = 0; axis < 3; axis++) {
      const end = [...corner];
      end[axis] = -corner[axis];
      const [ex, ey] = this.project(end[0], end[1], end[2], width, height, unit);
      context.beginPath();
      context.moveTo(ox, oy);
      context.lineTo(ex, ey);
      context.stroke();
      const [mx, my] = [(ox + ex) / 2, (oy + ey) / 2];
      context.fillText(`${names[axis]} ${this.sizes[axis]}`, Math.max(40, Math.min(width - 40, mx + (axis === 1 ? -36 : 0))), Math.max(12, Math.min(height - 12, my + (axis === 1 ? 0 : 16))));
    }
  }

  /** @param {CanvasRenderingContext2D} context @param {Link} link */
  link(context, link) {
    const [x0, y0, x1, y1] = [this.px[link.from], this.py[link.from], this.px[link.to], this.py[link.to]];
    context.strokeStyle = context.fillStyle = css(link.colour);
    context.lineWidth = 2;
    context.setLineDash(link.dash);
    context.beginPath();
    context.moveTo(x0, y0);
    context.lineTo(x1, y1);
    context.stroke();
    context.setLineDash([]);
    const far = Math.hypot(x1 - x0, y1 - y0);
    if (!link.arrow || far < 12) return;
    const [ux, uy] = [(x1 - x0) / far, (y1 - y0) / far];
    const [tx, ty] = [x1 - ux * (this.size / 2 + 2), y1 - uy * (this.size / 2 + 2)];
    context.beginPath();
    context.moveTo(tx, ty);
    context.lineTo(tx - ux * 9 - uy * 5, ty - uy * 9 + ux * 5);
    context.lineTo(tx - ux * 9 + uy * 5, ty - uy * 9 - ux * 5);
    context.fill();
  }

  close() {
    this.drawing.close();
  }
}
