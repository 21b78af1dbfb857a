// Heat map of experts: a row per layer, a column per expert, coloured by the load relative to the mean.

import { CellMap } from "./cell_map.js";
import { SCALE, onTheme } from "./colours.js";
import { fill, h, table } from "./dom.js";
import { short } from "./format.js";
import { ask } from "./server.js";

const HOTTEST = 2; // load that has the last colour

/**
 * @param {HTMLElement} place stays hidden for runs without experts
 * @param {string} run
 * @param {AbortSignal} signal
 * @returns {() => Promise<void>} reads the newest counts
 */
export function showExperts(place, run, signal) {
  /** @type {any} */
  let loads = null;
  /** Step that the reader chose; null: the newest. @type {number | null} */
  let chosen = null;
  const tip = h("div", { class: "told", "aria-hidden": "true", hidden: true });
  const map = new CellMap({
    label: "heat map of experts; arrow keys move, plus and minus zoom",
    chosen: () => {},
    pointed: (cell, x, y) => point(cell, x, y),
    text: (cell) => describe(cell),
    lines: (cell) => [short(load(cell), 3)],
  });
  const slider = h("input", {
    type: "range", "aria-label": "step of the heat map", min: 0,
    oninput: () => {
      const at = Number(slider.value);
      chosen = at >= loads.steps.length - 1 ? null : loads.steps[at];
      void read();
    },
  });
  const title = h("h2", {}, "Experts");
  const stepName = h("span", { class: "quiet" });
  const scale = h("span", { class: "scale" });
  const ramp = h("i", { class: "ramp" });
  ramp.style.background = `linear-gradient(to right, ${SCALE.filter((_, i) => i % 15 === 0).join(", ")})`;
  fill(scale, "no tokens", ramp, `${HOTTEST} x the mean or more; a ring marks an expert without tokens`);
  const canvas = h("div", { class: "canvas experts" }, map.canvas, tip, map.spoken);
  const figures = h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "loads of experts by layer" });
  fill(place, h("div", { class: "head" }, title, stepName, h("label", { class: "field" }, slider), scale), canvas, figures);
  place.hidden = true;

  /** @param {number} cell @returns {[number, number]} layer and expert */
  const where = (cell) => [Math.floor(cell / loads.counts[0].length), cell % loads.counts[0].length];

  /** Load of a cell relative to the mean. @param {number} cell */
  function load(cell) {
    const [layer, expert] = where(cell);
    const row = loads.counts[layer];
    const total = row.reduce((/** @type {number} */ sum, /** @type {number} */ count) => sum + count, 0);
    return total ? (row[expert] * row.length) / total : 0;
  }

  /** @param {number} cell */
  function describe(cell) {
    const [layer, expert] = where(cell);
    return `layer of experts ${layer}, expert ${expert}: ${loads.counts[layer][expert].toLocaleString("en")} tokens, ${short(load(cell), 3)} x the mean`;
  }

  /** @param {number} cell @param {number} x @param {number} y */
  function point(cell, x, y) {
    tip.hidden = cell < 0;
    if (cell < 0) return;
    tip.textContent = describe(cell);
    tip.style.left = `${Math.min(x + 14, map.drawing.width - 260)}px`;
    tip.style.top = `${y + 14}px`;
  }

  function lay() {
    const [layers, experts] = [loads.counts.length, loads.counts[0].length];
    const box = map.canvas.getBoundingClientRect();
    const label = 30;
    const w = Math.max(0.5, (box.width - label - 8) / experts);
    const tall = Math.max(0.5, (box.height - 8) / layers);
    const [x, y] = [new Float32Array(layers * experts), new Float32Array(layers * experts)];
    for (let i = 0; i < x.length; i++) {
      x[i] = label + (i % experts) * w;
      y[i] = 4 + Math.floor(i / experts) * tall;
    }
    const every = Math.ceil(14 / tall);
    const labels = loads.counts.flatMap((/** @type {number[]} */ _, /** @type {number} */ i) => i % every ? [] : [{ x: label - 6, y: 4 + (i + 0.5) * tall, text: `${i}`, align: /** @type {CanvasTextAlign} */ ("right") }]);
    map.layout = { x, y, w, h: tall, width: box.width, height: box.height, labels };
    map.shares = Float32Array.from(x, (_, cell) => Math.min(1, load(cell) / HOTTEST));
    // Rings mark experts that got no token.
    map.marked = [...x.keys()].filter((cell) => loads.counts[where(cell)[0]][where(cell)[1]] === 0).slice(0, 200);
    map.drawing.later();
  }

  function showFigures() {
    const hasRanks = loads.layers.some((/** @type {any} */ layer) => layer.rank_load !== null);
    const heads = ["layer of experts", "entropy", "dead experts", "largest load of an expert", ...(hasRanks ? ["largest load of a rank", "that rank"] : [])];
    const rows = loads.layers.map((/** @type {any} */ layer, /** @type {number} */ i) => [
      String(i), short(layer.entropy, 3), String(layer.dead), short(layer.load, 3), ...(hasRanks ? [short(layer.rank_load, 3), String(layer.rank)] : []),
    ]);
    fill(figures, table("Loads of experts by layer, relative to the mean", heads, rows, "figures"));
  }

  async function read() {
    try {
      loads = await ask("experts", { run, step: chosen }, signal);
    } catch {
      return; // the page shows what the next answer brings
    }
    if (!loads.counts.length) return;
    place.hidden = false;
    stepName.textContent = `step ${loads.step}`;
    slider.max = String(loads.steps.length - 1);
    if (document.activeElement !== slider) slider.value = String(loads.steps.indexOf(loads.step));
    canvas.style.height = `${Math.max(90, Math.min(420, 8 + 22 * loads.counts.length))}px`;
    lay();
    showFigures();
  }

  const resized = new ResizeObserver(() => {
    if (loads?.counts.length) lay();
  });
  resized.observe(canvas);
  onTheme(() => map.drawing.later());
  signal.addEventListener("abort", () => {
    resized.disconnect();
    map.close();
  });
  return read;
}
