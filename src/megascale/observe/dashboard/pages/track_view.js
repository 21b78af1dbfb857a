// Tracks of a step in time: what each rank did, its waits, and the plan under it; zoomed and moved in both directions.

import { Drawing, followPointer } from "./canvas.js";
import { css } from "./colours.js";
import { h } from "./dom.js";
import { duration, ticks } from "./format.js";

/** [action, chunk, micro-batch, begin, end], times in µs. @typedef {[string, number, number, number, number]} Act */
/** [kind, axis, begin, end, on, root, in, why] @typedef {[string, string, number, number, number, number, string, string]} Wait */
/** [backward, chunk, micro-batch, begin, end] @typedef {[number, number, number, number, number]} Planned */
/** @typedef {{rank: number, place: [number, number, number], begin: number, end: number, seconds: Record<string, number>, acts: Act[], waits: Wait[], planned: Planned[]}} Track */
/** @typedef {{kind: "act" | "wait" | "planned", track: number, index: number}} Hit */

const LABEL = 118;
const AXIS = 24;
const ACT = 22;
const PLAN = 9;

export class TrackView {
  /**
   * @param {{chosen: (hit: Hit | null) => void, pointed: (hit: Hit | null, x: number, y: number) => void,
   *   moved: (from: number, to: number) => void}} told
   */
  constructor(told) {
    this.told = told;
    /** @type {Track[]} */
    this.tracks = [];
    /** @type {number[][]} */
    this.messages = [];
    this.length = 1;
    this.from = 0;
    this.to = 1;
    this.top = 0;
    this.virtual = 1;
    /** @type {Hit | null} */
    this.at = null;
    /** Waits that follow from the chosen one. @type {Hit[]} */
    this.chain = [];
    /** @type {Record<string, string>} */
    this.colours = {};
    this.canvas = h("canvas", {
      tabindex: 0,
      role: "application",
      "aria-roledescription": "timeline",
      "aria-label": "timeline of ranks; left and right move, plus and minus zoom, up and down go from rank to rank, n and p from wait to wait, Enter explains",
      onwheel: (/** @type {WheelEvent} */ event) => this.wheel(event),
      ...followPointer({
        hover: (x, y) => told.pointed(this.hit(x, y), x, y),
        drag: (dx, dy) => this.drag(dx, dy),
        click: (x, y) => this.choose(this.hit(x, y)),
        drop: () => told.moved(this.from, this.to),
      }),
      onpointerleave: () => told.pointed(null, 0, 0),
      ondblclick: () => this.show(0, this.length),
      onkeydown: (/** @type {KeyboardEvent} */ event) => this.key(event),
    });
    this.drawing = new Drawing(this.canvas, (context, width, height) => this.draw(context, width, height));
  }

  /** Give the drawing the height of its ranks at most: what explains a wait stands below it on a phone. */
  fit() {
    this.canvas.style.maxHeight = `${AXIS + this.tracks.length * this.row + 8}px`;
  }

  get row() {
    return ACT + (this.tracks.some((track) => track.planned.length) ? PLAN + 2 : 0) + 7;
  }

  /** @param {Hit | null} hit */
  choose(hit) {
    this.at = hit;
    this.told.chosen(hit);
    this.drawing.later();
  }

  /** Show this part of the step. @param {number} from @param {number} to µs */
  show(from, to) {
    const span = Math.max(5, Math.min(this.length * 1.02, to - from));
    this.from = Math.max(-0.01 * this.length, Math.min(this.length * 1.01 - span, from));
    this.to = this.from + span;
    this.told.moved(this.from, this.to);
    this.drawing.later();
  }

  /** Bring a wait into sight. @param {Hit} hit */
  reveal(hit) {
    const [from, to] = this.span(hit);
    if (from < this.from || to > this.to) {
      const span = Math.max(this.to - this.from, (to - from) * 3);
      this.show((from + to) / 2 - span / 2, (from + to) / 2 + span / 2);
    }
    const y = AXIS + hit.track * this.row - this.top;
    if (y < AXIS || y + this.row > this.drawing.height) this.down(hit.track * this.row - this.drawing.height / 2);
    this.drawing.later();
  }

  /** @param {Hit} hit @returns {[number, number]} */
  span(hit) {
    const track = this.tracks[hit.track];
    if (hit.kind === "wait") return [track.waits[hit.index][2], track.waits[hit.index][3]];
    const of = hit.kind === "act" ? track.acts[hit.index] : track.planned[hit.index];
    return [/** @type {number} */ (of[3]), /** @type {number} */ (of[4])];
  }

  /** @param {number} top */
  down(top) {
    this.top = Math.max(0, Math.min(this.tracks.length * this.row + AXIS + 8 - this.drawing.height, top));
    this.drawing.later();
  }

  /** @param {WheelEvent} event */
  wheel(event) {
    event.preventDefault();
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      const by = ((event.deltaX || event.deltaY) / this.drawing.width) * (this.to - this.from);
      this.show(this.from + by, this.to + by);
    } else if (event.altKey) this.down(this.top + event.deltaY);
    else this.zoom(this.time(event.offsetX), Math.exp(event.deltaY / 350));
  }

  /** @param {number} at @param {number} by */
  zoom(at, by) {
    this.show(at - (at - this.from) * by, at + (this.to - at) * by);
  }

  /** @param {number} px */
  time(px) {
    return this.from + ((px - LABEL) / Math.max(1, this.drawing.width - LABEL - 8)) * (this.to - this.from);
  }

  /** @param {number} at µs */
  px(at) {
    return LABEL + ((at - this.from) / (this.to - this.from)) * (this.drawing.width - LABEL - 8);
  }

  /** @param {number} dx @param {number} dy */
  drag(dx, dy) {
    const by = (dx / (this.drawing.width - LABEL - 8)) * (this.to - this.from);
    const span = this.to - this.from;
    this.from = Math.max(-0.01 * this.length, Math.min(this.length * 1.01 - span, this.from - by));
    this.to = this.from + span;
    this.down(this.top - dy);
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    const span = this.to - this.from;
    const at = this.at;
    if (event.key === "ArrowLeft") this.show(this.from - span / 10, this.to - span / 10);
    else if (event.key === "ArrowRight") this.show(this.from + span / 10, this.to + span / 10);
    else if (event.key === "+" || event.key === "=") this.zoom((this.from + this.to) / 2, 0.7);
    else if (event.key === "-") this.zoom((this.from + this.to) / 2, 1 / 0.7);
    else if (event.key === "Escape") this.show(0, this.length);
    else if (event.key === "ArrowDown" || event.key === "ArrowUp" || event.key === "n" || event.key === "p") {
      const along = event.key === "n" ? 1 : event.key === "p" ? -1 : 0;
      const track = Math.max(0, Math.min(this.tracks.length - 1, (at?.track ?? 0) + (along || !at ? 0 : event.key === "ArrowDown" ? 1 : -1)));
      const waits = this.tracks[track]?.waits ?? [];
      if (!waits.length) return;
      const middle = at ? this.span(at)[0] : this.from;
      let index = along && at?.kind === "wait" ? at.index + along : waits.findIndex((wait) => wait[3] >= middle);
      index = Math.max(0, Math.min(waits.length - 1, index < 0 ? waits.length - 1 : index));
      const hit = { kind: /** @type {const} */ ("wait"), track, index };
      this.choose(hit);
      this.reveal(hit);
      event.stopPropagation();
    } else if (event.key === "Enter") this.told.chosen(at);
    else return;
    event.preventDefault();
  }

  /** What is there. @param {number} px @param {number} py @returns {Hit | null} */
  hit(px, py) {
    const track = Math.floor((py - AXIS + this.top) / this.row);
    const one = this.tracks[track];
    if (!one || px < LABEL || py < AXIS) return null;
    const inside = py - AXIS + this.top - track * this.row;
    const at = this.time(px);
    const slack = ((this.to - this.from) / this.drawing.width) * 1.5;
    if (inside > ACT + 1) {
      const index = one.planned.findIndex((each) => at >= each[3] && at <= each[4]);
      return index < 0 || inside > ACT + PLAN + 2 ? null : { kind: "planned", track, index };
    }
    let index = one.waits.findIndex((wait) => at >= wait[2] - slack && at <= wait[3] + slack);
    if (index >= 0) return { kind: "wait", track, index };
    index = one.acts.findIndex((act) => at >= act[3] - slack && at <= act[4] + slack);
    return index < 0 ? null : { kind: "act", track, index };
  }

  /** @param {CanvasRenderingContext2D} context @param {number} width @param {number} height */
  draw(context, width, height) {
    for (const name of ["panel", "ink", "quiet", "line", "edge", "forward", "backward", "update", "other", "bubble", "exposed", "samples", "mark", "link"]) this.colours[name] = css(name);
    const colours = this.colours;
    context.fillStyle = colours.panel;
    context.fillRect(0, 0, width, height);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.save();
    context.beginPath();
    context.rect(LABEL, 0, width - LABEL, height);
    context.clip();
    context.strokeStyle = colours.line;
    context.fillStyle = colours.quiet;
    context.textAlign = "center";
    context.lineWidth = 1;
    for (const at of ticks(this.from, this.to, width / 110)) {
      const x = Math.round(this.px(at)) + 0.5;
      context.beginPath();
      context.moveTo(x, AXIS - 6);
      context.lineTo(x, height);
      context.stroke();
      if (x > LABEL - 1) context.fillText(duration(at / 1e6), Math.max(x, LABEL + 14), AXIS / 2);
    }
    const row = this.row;
    const first = Math.max(0, Math.floor(this.top / row));
    const last = Math.min(this.tracks.length, Math.ceil((this.top + height) / row));
    context.save();
    context.beginPath();
    context.rect(LABEL, AXIS, width - LABEL, height - AXIS);
    context.clip();
    for (let i = first; i < last; i++) this.track(context, this.tracks[i], AXIS + i * row - this.top);
    this.arrows(context);
    for (const hit of this.chain) this.frame(context, hit, colours.mark, 1.5);
    if (this.at) this.frame(context, this.at, colours.mark, 2.5);
    context.restore();
    context.restore();
    context.textAlign = "left";
    context.save();
    context.beginPath();
    context.rect(0, AXIS, LABEL, height - AXIS);
    context.clip();
    for (let i = first; i < last; i++) {
      const { rank, place } = this.tracks[i];
      const y = AXIS + i * row - this.top;
      context.fillStyle = colours.ink;
      context.fillText(`rank ${rank}`, 10, y + ACT / 2 + 1, LABEL - 14);
      if (row > 28) {
        context.fillStyle = colours.quiet;
        context.fillText(`t${place[0]} s${place[1]} d${place[2]}`, 10, y + ACT + 6, LABEL - 14);
      }
    }
    context.restore();
  }

  /** @param {CanvasRenderingContext2D} context @param {Track} track @param {number} y */
  track(context, track, y) {
    const { colours } = this;
    // By colour, so that a thousand rectangles are one path; what is thinner than a third of a pixel joins the last.
    /** @type {Record<string, number[][]>} */
    const rects = {};
    let [name, end] = ["", -1];
    for (let i = after(track.acts, 4, this.from); i < track.acts.length; i++) {
      const [action, chunk, , from, to] = track.acts[i];
      if (from > this.to) break;
      const part = action.startsWith("backward") ? "backward" : action;
      const colour = part === "forward" || part === "backward" ? part : part === "optimizer" ? "update" : "other";
      const [x0, x1] = [this.px(from), this.px(to)];
      if (colour === name && x1 - end < 0.4) continue;
      (rects[colour + (chunk % 2 && colour !== "other" ? "|" : "")] ??= []).push([x0, Math.max(0.7, x1 - x0)]);
      [name, end] = [colour, x1];
    }
    for (const [key, found] of Object.entries(rects)) {
      context.fillStyle = colours[key.replace("|", "")];
      context.globalAlpha = key.endsWith("|") ? 0.72 : 1;
      context.beginPath();
      for (const [x, w] of found) context.rect(x, y + 1, w, ACT);
      context.fill();
    }
    context.globalAlpha = 1;
    if ((this.to - this.from) / this.length < 0.5 || track.acts.length < 60) this.numbers(context, track, y);
    end = -1;
    for (let i = after(track.waits, 3, this.from); i < track.waits.length; i++) {
      const [kind, , from, to] = track.waits[i];
      if (from > this.to) break;
      const [x0, x1] = [this.px(from), this.px(to)];
      if (x1 - end < 0.4) continue;
      end = x1;
      const w = Math.max(0.7, x1 - x0);
      context.fillStyle = colours[kind] ?? colours.other;
      context.fillRect(x0, y + 1, w, ACT);
      if (kind === "bubble" && w > 3) {
        // Hatched, so that it is told from the rest without colours.
        context.strokeStyle = colours.quiet;
        context.lineWidth = 1;
        context.save();
        context.beginPath();
        context.rect(Math.max(x0, LABEL), y + 1, Math.min(w, this.drawing.width - Math.max(x0, LABEL)), ACT);
        context.clip();
        context.beginPath();
        const until = Math.min(x1, this.drawing.width) + ACT;
        for (let x = Math.max(x0, LABEL - 7) - (Math.max(x0, LABEL - 7) % 7); x < until; x += 7) {
          context.moveTo(x, y + 1);
          context.lineTo(x - ACT, y + 1 + ACT);
        }
        context.stroke();
        context.restore();
      }
    }
    context.lineWidth = 1;
    for (let i = after(track.planned, 4, this.from); i < track.planned.length; i++) {
      const [backward, , , from, to] = track.planned[i];
      if (from > this.to) break;
      const x = this.px(from);
      context.fillStyle = context.strokeStyle = colours[backward ? "backward" : "forward"];
      context.globalAlpha = 0.5;
      context.fillRect(x, y + ACT + 3, Math.max(0.7, this.px(to) - x), PLAN);
      context.globalAlpha = 1;
      if (this.px(to) - x > 4) context.strokeRect(x + 0.5, y + ACT + 3.5, this.px(to) - x - 1, PLAN - 1);
    }
  }

  /** Micro-batches' numbers where there is room. @param {CanvasRenderingContext2D} context @param {Track} track
   * @param {number} y */
  numbers(context, track, y) {
    context.textAlign = "center";
    for (let i = after(track.acts, 4, this.from); i < track.acts.length; i++) {
      const [action, , batch, from, to] = track.acts[i];
      if (from > this.to) break;
      const [x0, x1] = [Math.max(LABEL, this.px(from)), Math.min(this.drawing.width, this.px(to))];
      const text = batch >= 0 ? String(batch) : action.replaceAll("_", " ");
      if (x1 - x0 < 8 + 5.5 * text.length) continue;
      context.fillStyle = "#fff";
      context.fillText(text, (x0 + x1) / 2, y + ACT / 2 + 1);
    }
  }

  /** Messages between the ranks shown, once there is room to see them. @param {CanvasRenderingContext2D} context */
  arrows(context) {
    if ((this.to - this.from) / this.length > 0.35 && this.messages.length > 200) return;
    const row = new Map(this.tracks.map((track, i) => [track.rank, i]));
    context.strokeStyle = this.colours.quiet;
    context.globalAlpha = 0.5;
    context.lineWidth = 1;
    context.beginPath();
    for (const [sender, begin, receiver, end] of this.messages) {
      if (end < this.from || begin > this.to) continue;
      const [a, b] = [row.get(sender), row.get(receiver)];
      if (a === undefined || b === undefined) continue;
      context.moveTo(this.px(begin), AXIS + a * this.row - this.top + (b > a ? ACT : 1));
      context.lineTo(this.px(end), AXIS + b * this.row - this.top + (b > a ? 1 : ACT));
    }
    context.stroke();
    context.globalAlpha = 1;
  }

  /** @param {CanvasRenderingContext2D} context @param {Hit} hit @param {string} colour @param {number} thick */
  frame(context, hit, colour, thick) {
    const [from, to] = this.span(hit);
    const y = AXIS + hit.track * this.row - this.top + (hit.kind === "planned" ? ACT + 2 : 0);
    context.strokeStyle = colour;
    context.lineWidth = thick;
    context.strokeRect(this.px(from), y, Math.max(3, this.px(to) - this.px(from)), hit.kind === "planned" ? PLAN + 2 : ACT + 2);
  }

  close() {
    this.drawing.close();
  }
}

/**
 * The first row, of rows in order, that ends after a time. Rows that overlap end in order nearly: some earlier ones are
 * drawn in vain.
 * @param {any[][]} rows @param {number} end which column is the end @param {number} at
 */
function after(rows, end, at) {
  let [low, high] = [0, rows.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (rows[middle][end] < at) low = middle + 1;
    else high = middle;
  }
  return Math.max(0, low - 2);
}
