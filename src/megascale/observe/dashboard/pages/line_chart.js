// Curves: mean and extremes of each bucket, one crosshair and one zoom over all charts of a group.

import { Drawing } from "./canvas.js";
import { css } from "./colours.js";
import { h, fill } from "./dom.js";
import { inUnit, short, ticks } from "./format.js";

/** @typedef {{x: number[], mean: (number | null)[], low: (number | null)[], high: (number | null)[]}} Series */
/** @typedef {{name: string, colour: string, dash: number[], series: Series}} Line */
/** @typedef {{x: number, text: string}} Mark */

/** Charts that show the same part of x and the same point of it. */
export class ChartGroup {
  /** @param {(low: number | null, high: number | null) => void} zoomed */
  constructor(zoomed) {
    this.zoomed = zoomed;
    /** @type {LineChart[]} */
    this.charts = [];
    /** @type {number | null} */
    this.at = null;
    /** Weight of the past in the averages of noisy charts, 0 to below 1. */
    this.smoothing = 0;
    /** What an x is, for people. @type {(x: number) => string} */
    this.tell = (x) => short(x, 6);
  }

  /** @param {number | null} x */
  point(x) {
    this.at = x;
    this.charts.forEach((chart) => chart.drawing.later());
  }

  /** The part of x that all charts show: from the first point of any curve to the last. */
  range() {
    const lines = this.charts.flatMap((chart) => chart.lines);
    const low = Math.min(...lines.map(({ series }) => series.x[0]));
    const high = Math.max(...lines.map(({ series }) => series.x[series.x.length - 1]));
    if (high > low) return [low, high];
    return low === Infinity ? [0, 1] : [low - 0.5, low + 0.5];
  }

  close() {
    this.charts.forEach((chart) => chart.drawing.close());
    this.charts = [];
  }
}

const LEFT = 52;
const RIGHT = 10;
const TOP = 8;
const BOTTOM = 20;

export class LineChart {
  /**
   * @param {ChartGroup} group
   * @param {string} title
   * @param {string} unit s, bytes, % or what else stands behind a number
   * @param {boolean} noisy whether its curves are averaged and its extremes may be outside
   */
  constructor(group, title, unit, noisy = false) {
    this.group = group;
    this.noisy = noisy;
    /** Points above and below the shown part. @type {[number, number]} */
    this.outside = [0, 0];
    this.title = title;
    this.unit = unit;
    this.log = false;
    /** @type {Line[]} */
    this.lines = [];
    /** The drawn curves: averages of the means, if the chart is noisy. @type {(number | null)[][]} */
    this.averages = [];
    /** Last values of the curves. @type {(number | null)[]} */
    this.ends = [];
    /** @type {Mark[]} */
    this.marks = [];
    /** @type {{low: number, high: number} | null} */
    this.dragged = null;
    this.range = { x0: 0, x1: 1, y0: 0, y1: 1 };
    this.canvas = h("canvas", {
      tabindex: 0,
      role: "img",
      "aria-label": title,
      "aria-keyshortcuts": "ArrowLeft ArrowRight + - Escape",
      onpointermove: (/** @type {PointerEvent} */ event) => this.moved(event),
      onpointerdown: (/** @type {PointerEvent} */ event) => this.pressed(event),
      onpointerup: (/** @type {PointerEvent} */ event) => this.released(event),
      onpointercancel: () => this.cancelled(),
      onpointerleave: () => this.dragged || group.point(null),
      ondblclick: () => group.zoomed(null, null),
      onkeydown: (/** @type {KeyboardEvent} */ event) => this.key(event),
    });
    this.last = h("span", { class: "last" });
    this.told = h("div", { class: "told", "aria-hidden": "true" });
    this.element = h(
      "figure",
      { class: "chart" },
      h("figcaption", {}, h("span", {}, title), this.last),
      h("div", { class: "plot" }, this.canvas, this.told),
    );
    this.drawing = new Drawing(this.canvas, (context, width, height) => this.draw(context, width, height));
    group.charts.push(this);
  }

  /** @param {Line[]} lines @param {Mark[]} marks */
  set(lines, marks) {
    this.lines = lines.filter((line) => line.series.x.length);
    this.marks = marks;
    const ends = this.lines.map((line) => line.series.mean[line.series.mean.length - 1]);
    this.ends = ends;
    this.tellLast();
    const words = this.lines.map((line, i) => `${line.name}: last ${inUnit(ends[i], this.unit)}`);
    this.canvas.setAttribute("aria-label", `${this.title}. ${words.join("; ") || "no values"}`);
    this.element.classList.toggle("empty", !this.lines.length);
    this.drawing.later();
  }

  /** @param {number} y */
  height(y) {
    return this.log ? Math.log10(y) : y;
  }

  /** The last value, and how many points are outside. */
  tellLast() {
    const [above, below] = this.outside;
    const parts = [];
    if (this.ends?.length === 1) parts.push(inUnit(this.ends[0], this.unit));
    if (above) parts.push(`${above} above`);
    if (below) parts.push(`${below} below`);
    const words = parts.join(" · ");
    if (this.last.textContent !== words) fill(this.last, words);
  }

  measure() {
    const [x0, x1] = this.group.range();
    const lows = [];
    const highs = [];
    for (const { series } of this.lines) {
      for (let i = 0; i < series.x.length; i++) {
        const [low, high] = [series.low[i], series.high[i]];
        if (low === null || high === null || (this.log && low <= 0)) continue;
        lows.push(this.height(low));
        highs.push(this.height(high));
      }
    }
    let [y0, y1] = lows.length ? [Math.min(...lows), Math.max(...highs)] : [0, 1];
    if (this.noisy && lows.length) [y0, y1] = cut(lows, highs);
    this.outside = [highs.filter((high) => high > y1).length, lows.filter((low) => low < y0).length];
    const [least, most] = [y0, y1];
    // A point that is not shown, such as the first step, is not part of the average either.
    const shown = (/** @type {number | null} */ y) => (y !== null && this.height(y) >= least && this.height(y) <= most ? y : null);
    this.averages = this.lines.map(({ series }) => (this.noisy ? average(series.mean.map(shown), this.group.smoothing) : series.mean));
    this.tellLast();
    const room = (y1 - y0 || Math.abs(y1) || 1) * 0.06;
    this.range = { x0, x1, y0: y0 - room, y1: y1 + room };
  }

  /** @param {number} x @param {number} width */
  px(x, width) {
    return LEFT + ((x - this.range.x0) / (this.range.x1 - this.range.x0)) * (width - LEFT - RIGHT);
  }

  /** @param {number} y @param {number} height */
  py(y, height) {
    return height - BOTTOM - ((this.height(y) - this.range.y0) / (this.range.y1 - this.range.y0)) * (height - TOP - BOTTOM);
  }

  /** @param {number} px */
  xAt(px) {
    const { x0, x1 } = this.range;
    const share = (px - LEFT) / (this.drawing.width - LEFT - RIGHT);
    return x0 + Math.max(0, Math.min(1, share)) * (x1 - x0);
  }

  /** @param {CanvasRenderingContext2D} context @param {number} width @param {number} height */
  draw(context, width, height) {
    this.measure();
    const { x0, x1, y0, y1 } = this.range;
    context.fillStyle = css("panel");
    context.fillRect(0, 0, width, height);
    context.font = "11px system-ui, sans-serif";
    context.lineWidth = 1;
    context.textBaseline = "middle";
    context.textAlign = "right";
    const marks = ticks(y0, y1, Math.max(2, Math.round(height / 45)));
    const step = marks.length > 1 ? marks[1] - marks[0] : 0;
    for (const y of marks) {
      const at = Math.round(height - BOTTOM - ((y - y0) / (y1 - y0)) * (height - TOP - BOTTOM)) + 0.5;
      context.strokeStyle = css("line");
      context.beginPath();
      context.moveTo(LEFT, at);
      context.lineTo(width - RIGHT, at);
      context.stroke();
      context.fillStyle = css("quiet");
      context.fillText(this.mark(this.log ? 10 ** y : y, this.log ? 0 : step), LEFT - 6, at);
    }
    context.textAlign = "center";
    context.textBaseline = "top";
    const every = ticks(x0, x1, Math.max(2, Math.round(width / 70)));
    for (const x of every) {
      const at = this.px(x, width);
      if (at < LEFT - 1 || at > width - RIGHT + 1) continue;
      context.fillText(this.group.tell(x), Math.min(at, width - RIGHT - 14), height - BOTTOM + 5);
    }
    context.save();
    context.beginPath();
    context.rect(LEFT, 0, width - LEFT - RIGHT, height - BOTTOM + 1);
    context.clip();
    for (const mark of this.marks) this.upright(context, this.px(mark.x, width), height, css("warn"), [3, 3]);
    this.lines.forEach((line, i) => this.curve(context, line, this.averages[i], width, height));
    if (this.dragged) {
      const [from, to] = [this.px(this.dragged.low, width), this.px(this.dragged.high, width)];
      context.fillStyle = css("shade");
      context.fillRect(Math.min(from, to), TOP, Math.abs(to - from), height - TOP - BOTTOM);
    }
    if (this.group.at !== null) this.upright(context, this.px(this.group.at, width), height, css("quiet"), []);
    context.restore();
    this.tell(width, height);
  }

  /** A number at the axis, with as many digits as tell it from the next. @param {number} y @param {number} step */
  mark(y, step) {
    if (this.unit === "s" || this.unit === "%" || this.unit === "bytes") return inUnit(y, this.unit).replace(/ /, "\u202f");
    const digits = step > 0 ? Math.ceil(-Math.log10(step) - 1e-9) : 0;
    if (digits > 0 && digits < 5 && Math.abs(y) < 1000) return y.toFixed(digits);
    if (digits < 5 || y === 0 || Math.abs(y) >= 1e-3) return short(y, 3);
    const figures = Math.floor(Math.log10(Math.abs(y)) + 1e-9) - Math.floor(Math.log10(step) + 1e-9);
    return y.toExponential(Math.min(5, Math.max(0, figures)));
  }

  /** @param {CanvasRenderingContext2D} context @param {number} at @param {number} height @param {string} colour
   * @param {number[]} dash */
  upright(context, at, height, colour, dash) {
    context.strokeStyle = colour;
    context.setLineDash(dash);
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(Math.round(at) + 0.5, TOP);
    context.lineTo(Math.round(at) + 0.5, height - BOTTOM);
    context.stroke();
    context.setLineDash([]);
  }

  /** @param {CanvasRenderingContext2D} context @param {Line} line @param {(number | null)[]} mean of the drawn line
   * @param {number} width @param {number} height */
  curve(context, line, mean, width, height) {
    const { x, low, high } = line.series;
    const good = (/** @type {number | null} */ y) => y !== null && !(this.log && y <= 0);
    context.fillStyle = context.strokeStyle = line.colour;
    context.globalAlpha = 0.2;
    context.beginPath();
    for (let i = 0; i < x.length; i++) if (good(high[i])) context.lineTo(this.px(x[i], width), this.py(/** @type {number} */ (high[i]), height));
    for (let i = x.length - 1; i >= 0; i--) if (good(low[i])) context.lineTo(this.px(x[i], width), this.py(/** @type {number} */ (low[i]), height));
    context.fill();
    if (mean !== line.series.mean && this.group.smoothing) {
      context.globalAlpha = 0.3;
      context.lineWidth = 1;
      context.beginPath();
      line.series.mean.forEach((y, i) => good(y) && context.lineTo(this.px(x[i], width), this.py(/** @type {number} */ (y), height)));
      context.stroke();
    }
    context.globalAlpha = 1;
    context.lineWidth = 1.6;
    context.setLineDash(line.dash);
    context.beginPath();
    for (let i = 0; i < x.length; i++) if (good(mean[i])) context.lineTo(this.px(x[i], width), this.py(/** @type {number} */ (mean[i]), height));
    context.stroke();
    context.setLineDash([]);
    if (x.length <= 40) {
      for (let i = 0; i < x.length; i++) {
        if (!good(mean[i])) continue;
        context.beginPath();
        context.arc(this.px(x[i], width), this.py(/** @type {number} */ (mean[i]), height), 2.2, 0, 7);
        context.fill();
      }
    }
  }

  /** What the curves are at the crosshair. @param {number} width @param {number} height */
  tell(width, height) {
    const at = this.group.at;
    if (at === null || !this.lines.length) {
      this.told.hidden = true;
      return;
    }
    const rows = this.lines.map((line) => {
      const i = nearest(line.series.x, at);
      return { line, x: line.series.x[i], mean: line.series.mean[i] };
    });
    fill(
      this.told,
      h("b", {}, this.group.tell(rows[0].x)),
      rows.map((row) => {
        const key = h("i", { class: "key" });
        key.style.background = row.line.colour;
        return h("div", {}, key, this.lines.length > 1 ? `${row.line.name} ` : "", inUnit(row.mean, this.unit));
      }),
    );
    this.told.hidden = false;
    const px = this.px(at, width);
    this.told.style.left = px > width / 2 ? `${LEFT + 4}px` : "auto";
    this.told.style.right = px > width / 2 ? "auto" : `${RIGHT + 2}px`;
    this.told.style.top = `${TOP}px`;
  }

  /** @param {PointerEvent} event */
  moved(event) {
    const x = this.xAt(event.offsetX);
    if (this.dragged) this.dragged.high = x;
    this.group.point(x);
  }

  /** @param {PointerEvent} event */
  pressed(event) {
    if (event.button !== 0 || event.pointerType === "touch") return;
    this.canvas.setPointerCapture(event.pointerId);
    const x = this.xAt(event.offsetX);
    this.dragged = { low: x, high: x };
  }

  /** @param {PointerEvent} event */
  released(event) {
    const dragged = this.dragged;
    this.dragged = null;
    if (!dragged) return;
    const [low, high] = [Math.min(dragged.low, dragged.high), Math.max(dragged.low, dragged.high)];
    const { x0, x1 } = this.range;
    if (high - low > (x1 - x0) * 0.01) this.group.zoomed(low, high);
    else this.drawing.later();
    event.preventDefault();
  }

  /** Drop the range that is being dragged: the browser has taken the pointer, and no pointerup follows. */
  cancelled() {
    this.dragged = null;
    this.group.point(null);
    this.drawing.later();
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    const { x0, x1 } = this.range;
    const at = this.group.at ?? (x0 + x1) / 2;
    const step = (x1 - x0) / (event.shiftKey ? 10 : 100);
    if (event.key === "ArrowLeft") this.group.point(Math.max(x0, at - step));
    else if (event.key === "ArrowRight") this.group.point(Math.min(x1, at + step));
    else if (event.key === "+" || event.key === "=") this.group.zoomed(at - (x1 - x0) / 4, at + (x1 - x0) / 4);
    else if (event.key === "-") this.group.zoomed(x0 - (x1 - x0) / 2, x1 + (x1 - x0) / 2);
    else if (event.key === "Escape") this.group.zoomed(null, null);
    else return;
    event.preventDefault();
  }
}

/**
 * Exponential averages, corrected for their start, as `megascale plot` draws them.
 * @param {(number | null)[]} values @param {number} weight of the past @returns {(number | null)[]}
 */
export function average(values, weight) {
  let [sum, count] = [0, 0];
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    count = weight * count + 1 - weight;
    return sum / count;
  });
}

/**
 * The shown part of y: without up to 2% of the points at each end, such as the first step, if these would take most of the room.
 * @param {number[]} lows @param {number[]} highs @returns {[number, number]}
 */
export function cut(lows, highs) {
  const rising = [...lows].sort((a, b) => a - b);
  const falling = [...highs].sort((a, b) => b - a);
  const count = rising.length < 4 ? 0 : Math.max(1, Math.floor(0.02 * rising.length));
  const [low, high] = [rising[count], falling[count]];
  const room = 2 * Math.max(high - low, 1e-9 * Math.max(Math.abs(high), Math.abs(low)));
  const least = rising.find((value) => value >= low - room) ?? low;
  const most = falling.find((value) => value <= high + room) ?? high;
  return [least, most];
}

/** @param {number[]} xs in order @param {number} x */
export function nearest(xs, x) {
  let [low, high] = [0, xs.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle;
    else high = middle;
  }
  return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
}
