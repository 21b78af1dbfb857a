// Every rank's figure over a window of steps: which machine is not like the others.

import * as address from "./address.js";
import { CellMap, byGrid, byHost } from "./cell_map.js";
import { SCALE, onTheme, runColour } from "./colours.js";
import { choice, fill, h, teachSpans } from "./dom.js";
import { inUnit, percent, short } from "./format.js";
import { ChartGroup, LineChart } from "./line_chart.js";
import { ask } from "./server.js";

/**
 * @param {HTMLElement} place
 * @param {import("./main.js").Page} page
 * @returns {(told: {run: string, pulse: any}) => void}
 */
export function show(place, page) {
  const { signal } = page;
  const run = page.runs[0];
  /** @type {any} */
  let found = null;
  let order = address.get("order", "host");
  let chosen = address.number("rank");

  const tip = h("div", { class: "told", "aria-hidden": "true", hidden: true });
  const map = new CellMap({
    chosen: (cell) => open(found.rank[cell]),
    pointed: (cell, x, y) => point(cell, x, y),
    text: (cell) => describe(cell),
    lines: (cell) => [`rank ${found.rank[cell]}`, inUnit(found.value[cell], found.figure.unit)],
  });
  const controls = h("div", { class: "bar" });
  let figures = h("label");
  let figureNames = "";
  const from = makeStepField("from");
  const to = makeStepField("to");
  const allSteps = h("button", { type: "button", class: "small", onclick: () => pick({ first: found.steps.low, last: found.steps.high }) }, "all steps");
  const by = choice("By", [{ value: "host", text: "host" }, { value: "grid", text: "position in the grid" }], order, (value) => {
    order = value;
    address.set({ order: value === "host" ? null : value });
    map.whole();
    lay();
  });
  const among = choice("Compared with", [{ value: "stage", text: "ranks of its stage" }, { value: "job", text: "all ranks" }], "stage", (value) => pick({ among: value }));
  const scale = h("span", { class: "scale" });
  const side = h("div", { class: "side" });
  const notes = h("div", { class: "notes" }, h("p", { class: "quiet" }, "Reading spans…"));
  const split = h("div", { class: "split" }, h("div", { class: "canvas" }, map.canvas, tip, map.spoken), side);
  fill(
    place,
    h("h1", { class: "unseen" }, `Heat map of ${run}`),
    notes,
    controls,
    split,
  );
  const group = new ChartGroup(() => {});
  const machines = h("section", { class: "panel", "aria-label": "slow machines" });
  let judged = "";

  let asked = 0;
  let answered = 0;

  async function read() {
    asked += 1;
    const number = asked;
    let answer;
    try {
      answer = await ask("heat", { run, figure: address.get("figure"), first: address.number("first"), last: address.number("last"), among: address.get("among") }, signal);
    } catch (error) {
      if (signal.aborted || number < answered) return;
      answered = number;
      const { message } = /** @type {Error} */ (error);
      const teaching = found ? null : teachSpans(run, "heat map", message);
      fill(notes, h("p", { class: "note" }, message), teaching);
      split.hidden = teaching !== null;
      return;
    }
    split.hidden = false;
    // The answer to an earlier choice may come after that to a later one.
    if (number < answered) return;
    answered = number;
    found = answer;
    fill(notes, found.skipped.map((/** @type {string} */ words) => h("p", { class: "note" }, `skipped: ${words}`)));
    if (!found.rank.length) notes.append(h("p", { class: "note" }, "No timings of ranks are recorded yet."));
    lay();
    bar();
    if (chosen !== null && found.rank.includes(chosen)) void open(chosen);
    else list();
  }

  function lay() {
    if (!found) return;
    const box = map.canvas.getBoundingClientRect();
    const known = found.tensor.every((/** @type {number} */ each) => each >= 0);
    map.layout = order === "grid" && known
      ? byGrid(found.tensor, found.pipeline, found.data, box.width, box.height)
      : byHost(found.host, found.hosts, box.width, box.height);
    const [low, high] = limits();
    map.shares = Float32Array.from(found.value, (/** @type {number | null} */ value) => (value === null ? NaN : high > low ? Math.max(0, Math.min(1, (value - low) / (high - low))) : 0.5));
    const row = new Map(found.rank.map((/** @type {number} */ rank, /** @type {number} */ i) => [rank, i]));
    map.marked = found.outliers.map((/** @type {any} */ one) => row.get(one.rank));
    map.drawing.later();
  }

  /** Ends of the colours: most ranks' values, so that one far off does not make all others look alike. */
  function limits() {
    const values = found.value.filter((/** @type {number | null} */ value) => value !== null).sort((/** @type {number} */ a, /** @type {number} */ b) => a - b);
    if (!values.length) return [0, 1];
    const at = (/** @type {number} */ share) => values[Math.min(values.length - 1, Math.floor(share * values.length))];
    const [low, high] = values.length < 40 ? [values[0], values[values.length - 1]] : [at(0.005), at(0.995)];
    // Differences of less than 5% are not stretched over all colours.
    const least = 0.05 * Math.abs(at(0.5));
    return [Math.min(low, at(0.5) - least), Math.max(high, at(0.5) + least)];
  }

  /** A field for an end of the window. @param {"from" | "to"} name */
  function makeStepField(name) {
    const field = h("input", {
      type: "number", "aria-label": `${name} step`,
      onchange: () => {
        const given = Number(field.value);
        const { steps } = found;
        const [first, last] = name === "from" ? [given, Math.max(given, steps.last)] : [Math.min(given, steps.first), given];
        found.steps = { ...steps, first, last };
        pick({ first, last });
      },
      onblur: () => bar(),
    });
    return field;
  }

  /** Show a step, unless the field has the focus: an answer must not change what is being typed. @param {HTMLInputElement} field @param {number} step */
  function showStep(field, step) {
    field.min = String(found.steps.low);
    field.max = String(found.steps.high);
    if (document.activeElement !== field) field.value = String(step);
  }

  /** Choose an option. A new value would close an open list, so an equal one is not set. @param {HTMLElement} control @param {string} value */
  function showChoice(control, value) {
    const select = /** @type {HTMLSelectElement} */ (control.querySelector("select"));
    if (select.value !== value) select.value = value;
  }

  function makeFigures() {
    const made = choice("Figure", found.figures.map((/** @type {any} */ one) => ({ value: one.name, text: one.label })), found.figure.name, (value) => pick({ figure: value }));
    const isFocused = figures.contains(document.activeElement);
    figures.replaceWith(made);
    figures = made;
    if (isFocused) made.querySelector("select")?.focus();
  }

  /** The controls. Their elements stay, so that an answer leaves the focus and open lists alone. */
  function bar() {
    const { steps, figure } = found;
    if (!controls.hasChildNodes()) {
      fill(controls, figures, h("label", { class: "field" }, h("span", {}, "from"), from), h("label", { class: "field" }, h("span", {}, "to"), to), allSteps,
        h("button", { type: "button", class: "small", onclick: () => pick({ first: null, last: null }) }, "newest 20"), by, among, scale);
    }
    const names = JSON.stringify(found.figures);
    if (names !== figureNames) {
      figureNames = names;
      makeFigures();
    }
    showChoice(figures, figure.name);
    showStep(from, steps.first);
    showStep(to, steps.last);
    allSteps.title = `${steps.low} to ${steps.high}`;
    showChoice(among, found.among);
    const [low, high] = limits();
    const ramp = h("canvas", { width: 256, height: 1, "aria-hidden": "true" });
    const context = ramp.getContext("2d");
    if (context) SCALE.forEach((colour, i) => {
      context.fillStyle = colour;
      context.fillRect(i, 0, 1, 1);
    });
    fill(scale, inUnit(low, figure.unit), ramp, inUnit(high, figure.unit));
  }

  /** @param {Record<string, string | number | null>} changed */
  function pick(changed) {
    address.set(changed);
    void read();
  }

  /** @param {number} cell */
  function describe(cell) {
    const { unit } = found.figure;
    const z = found.z[cell];
    return `rank ${found.rank[cell]} on ${found.hosts[found.host[cell]]}: ${inUnit(found.value[cell], unit)}${z === null ? "" : `, z ${short(z, 3)}`}`;
  }

  /** @param {number} cell @param {number} x @param {number} y */
  function point(cell, x, y) {
    tip.hidden = cell < 0 || !found;
    if (tip.hidden) return;
    const at = found.tensor[cell] >= 0 ? h("div", {}, `tensor ${found.tensor[cell]}, stage ${found.pipeline[cell]}, data ${found.data[cell]}`) : null;
    fill(tip, h("b", {}, `rank ${found.rank[cell]}`), ` ${found.hosts[found.host[cell]]}`, h("div", {}, inUnit(found.value[cell], found.figure.unit), found.z[cell] === null ? "" : `  (z ${short(found.z[cell], 3)})`), at);
    const right = x > map.drawing.width - 230;
    tip.style.left = right ? "auto" : `${x + 14}px`;
    tip.style.right = right ? `${map.drawing.width - x + 14}px` : "auto";
    tip.style.top = `${Math.min(y + 12, map.drawing.height - 70)}px`;
  }

  /** The outliers. */
  function list() {
    map.bright = null;
    map.at = -1;
    map.drawing.later();
    const { unit } = found.figure;
    fill(
      side,
      h(
        "section",
        { class: "panel", "aria-label": "outliers" },
        h("h2", {}, found.outlier_count ? `${found.outlier_count} outlier${found.outlier_count > 1 ? "s" : ""}` : "No outlier"),
        h("p", { class: "quiet" }, found.limit === null ? "There are fewer than 4 ranks to compare." : `Marked: modified z-score (0.6745 × distance from the median / MAD) above ${found.limit.toFixed(1)}, and at least 1% from the median of ${found.among === "stage" ? "the ranks of its stage" : "all ranks"}. ${found.rank.length.toLocaleString("en")} ranks, steps ${found.steps.first} to ${found.steps.last}.`),
        h("ul", { class: "outliers" }, found.outliers.map((/** @type {any} */ one) =>
          h("li", {}, h("button", { type: "button", onclick: () => open(one.rank) },
            h("span", {}, `rank ${one.rank}`), h("b", {}, inUnit(one.value, unit)),
            h("span", {}, one.host), h("span", {}, `${one.value >= one.median ? "+" : ""}${percent(one.value / one.median - 1)}, z ${short(one.z, 3)}`))))),
        found.outlier_count > found.outliers.length ? h("p", { class: "quiet" }, `the ${found.outliers.length} largest outliers are listed`) : null,
      ),
      machines,
    );
    void judge();
  }

  /** What the analysis of slow machines makes of these steps. */
  async function judge() {
    const { first, last } = found.steps;
    const window = address.number("last") === null ? "" : `${first}-${last}`;
    if (judged === window + found.steps.high) return;
    judged = window + found.steps.high;
    fill(machines, h("h2", {}, "Slow machines"), h("p", { class: "quiet" }, "Analysing…"));
    try {
      const told = await ask("stragglers", { run, first: window ? first : null, last: window ? last : null }, signal);
      fill(
        machines,
        h("h2", {}, told.count ? "Slow machines" : "No slow machine"),
        h("p", { class: "quiet" }, `megascale stragglers, steps ${told.steps.first} to ${told.steps.last}: `, told.spread === null ? `too few ranks to measure how healthy ones differ; reported from ${percent(told.limit)} slower` : `healthy ranks differ by ${percent(told.spread)}; reported from ${percent(told.limit)} slower`, told.lonely ? `; ${told.lonely} ranks have no comparable rank` : ""),
        told.ranks.map((/** @type {any} */ one) =>
          h("div", { class: "machine" },
            h("div", { class: "head" }, h("button", { type: "button", class: "plain link", onclick: () => open(one.rank) }, `rank ${one.rank}`), h("b", {}, `${percent(one.slower)} slower`), h("span", { class: `tag ${one.state === "persistent" ? "wrong" : ""}` }, one.state)),
            h("div", {}, `${one.cause}, steps ${one.first} to ${one.last}${one.costs ? `; costs the job ${inUnit(one.costs, "s")} a step` : ""}${one.confidence > 0.9999 ? ", sure" : `, ${percent(one.confidence)} sure`}`),
            one.evidence.map((/** @type {string} */ line) => h("div", { class: "evidence" }, line)))),
        told.links.map((/** @type {any} */ one) =>
          h("div", { class: "machine" },
            h("div", { class: "head" }, h("b", {}, `link (${one.axis})`), h("span", {}, one.ranks.length === 1 ? `rank ${one.ranks[0]}` : `one of ranks ${one.ranks.slice(0, 6).join(", ")}`)),
            h("div", {}, `${inUnit(one.seconds, "s")} a step, ${percent(one.share)}`),
            one.evidence.map((/** @type {string} */ line) => h("div", { class: "evidence" }, line)))),
      );
    } catch (error) {
      if (!signal.aborted) fill(machines, h("h2", {}, "Slow machines"), h("p", { class: "quiet" }, /** @type {Error} */ (error).message));
    }
  }

  /** A rank: its host, the host's ranks, its history. @param {number} rank */
  async function open(rank) {
    chosen = rank;
    address.set({ rank });
    const cell = found.rank.indexOf(rank);
    const host = found.host[cell];
    const mates = found.rank.map((/** @type {number} */ _, /** @type {number} */ i) => i).filter((/** @type {number} */ i) => found.host[i] === host);
    map.at = cell;
    map.bright = found.hosts.length > 1 ? new Set(mates) : null;
    map.drawing.later();
    const { figure } = found;
    const past = h("div", {}, figure.name.startsWith("counter.") ? h("p", { class: "quiet" }, "A host's counters have no history by step.") : h("p", { class: "quiet" }, "Reading…"));
    const replica = found.tensor[cell] >= 0;
    fill(
      side,
      h(
        "section",
        { class: "panel", "aria-label": `rank ${rank}` },
        h("div", { class: "head" }, h("h2", {}, `Rank ${rank}`), h("button", { type: "button", class: "small", onclick: () => {
          chosen = null;
          address.set({ rank: null });
          list();
        } }, "All outliers")),
        h("dl", {},
          h("dt", {}, "host"), h("dd", {}, found.hosts[host]),
          replica ? [h("dt", {}, "place"), h("dd", {}, `tensor ${found.tensor[cell]}, stage ${found.pipeline[cell]}, data ${found.data[cell]}`)] : null,
          h("dt", {}, "value"), h("dd", {}, inUnit(found.value[cell], figure.unit)),
          h("dt", {}, "z-score"), h("dd", {}, `${short(found.z[cell], 3)}${Math.abs(found.z[cell] ?? 0) > (found.limit ?? Infinity) ? ", an outlier" : ""}`)),
        h("p", {}, h("a", { href: address.link("timeline", [run], { ranks: rank }) }, "timeline of this rank")),
      ),
      h("section", { class: "panel", "aria-label": "history" }, h("h2", {}, "By step"), past),
      h("section", { class: "panel", "aria-label": "ranks of the host" }, h("h2", {}, `Ranks of ${found.hosts[host]}`),
        h("ul", { class: "outliers" }, mates.slice(0, 64).map((/** @type {number} */ i) =>
          h("li", {}, h("button", { type: "button", "aria-current": i === cell, onclick: () => open(found.rank[i]) }, h("span", {}, `rank ${found.rank[i]}`), h("b", {}, inUnit(found.value[i], figure.unit))))))),
    );
    if (figure.name.startsWith("counter.")) return;
    try {
      const told = await ask("history", { run, figure: figure.name, rank }, signal);
      if (chosen !== rank) return;
      group.close();
      const chart = new LineChart(group, figure.label, figure.unit);
      chart.set([
        { name: "all ranks", colour: runColour(6), dash: [4, 3], series: { x: told.step, mean: told.median, low: told.low, high: told.high } },
        { name: `rank ${rank}`, colour: runColour(1), dash: [], series: { x: told.step, mean: told.own, low: told.own, high: told.own } },
      ], []);
      fill(past, chart.element, h("p", { class: "quiet" }, "dashed: median of all ranks; shaded: lowest to highest"));
    } catch (error) {
      if (!signal.aborted) fill(past, h("p", { class: "note" }, /** @type {Error} */ (error).message));
    }
  }

  const watch = new ResizeObserver(() => lay());
  watch.observe(map.canvas);
  onTheme(() => map.drawing.later());
  signal.addEventListener("abort", () => {
    watch.disconnect();
    map.close();
    group.close();
  });
  void read().then(page.ready);

  let rows = -1;
  let last = 0;
  return ({ pulse }) => {
    // A window that is the newest steps moves on with the run; one that was chosen stays.
    if (pulse.error || address.number("last") !== null) return;
    const now = Date.now();
    if (rows >= 0 && pulse.rows !== rows && now - last > 3000) {
      last = now;
      void read();
    }
    rows = pulse.rows;
  };
}
