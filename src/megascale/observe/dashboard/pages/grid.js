// The grid of ranks: who talks to whom, and in a hang who waits for whom.

import * as address from "./address.js";
import { SCALE, onTheme } from "./colours.js";
import { choice, fill, h, table } from "./dom.js";
import { bytes, duration, inUnit, moment } from "./format.js";
import { GridView } from "./grid_view.js";
import { ask } from "./server.js";

/** Axis, colour and dash of a partner's line. @type {[string, string, number[]][]} */
const AXES = [["tensor", "forward", []], ["pipeline", "exposed", [8, 3]], ["data", "samples", [2, 3]]];
const MOST_LINES = 400;

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
  /** @type {any} */
  let hang = null;
  let looks = 0;
  /** @type {Map<number, number>} */
  let row = new Map();
  let chosen = address.number("rank");
  const tip = h("div", { class: "told", "aria-hidden": "true", hidden: true });
  const view = new GridView({
    chosen: (cell) => choose(cell < 0 ? null : found.rank[cell]),
    pointed: (cell, x, y) => {
      tip.hidden = cell < 0;
      if (cell < 0) return;
      const several = found.context.some((/** @type {number} */ each) => each > 0);
      fill(tip, h("b", {}, `rank ${found.rank[cell]}`), ` ${found.hosts[found.host[cell]]}`, h("div", {}, `${inUnit(found.value[cell], found.figure.unit)}; tensor ${found.tensor[cell]}, stage ${found.pipeline[cell]}, data ${found.data[cell]}${several ? `, context ${found.context[cell]}` : ""}`));
      tip.style.left = x > view.drawing.width / 2 ? "auto" : `${x + 14}px`;
      tip.style.right = x > view.drawing.width / 2 ? `${view.drawing.width - x + 14}px` : "auto";
      tip.style.top = `${Math.min(y + 12, view.drawing.height - 60)}px`;
    },
  });
  const controls = h("div", { class: "bar" });
  const side = h("div", { class: "side" });
  const verdict = h("section", { class: "panel", "aria-label": "hang" });
  const about = h("div", { class: "stack" });
  const notes = h("div", { class: "notes" }, h("p", { class: "quiet" }, "Reading spans…"));
  fill(side, verdict, about);
  fill(place, h("h1", { class: "unseen" }, `Grid of ${run}`), notes, controls, h("div", { class: "split" }, h("div", { class: "canvas" }, view.canvas, tip), side));

  async function read() {
    try {
      found = await ask("heat", { run, figure: address.get("figure") }, signal);
    } catch (error) {
      if (!signal.aborted) fill(notes, h("p", { class: "note" }, /** @type {Error} */ (error).message));
      return;
    }
    fill(notes);
    if (found.tensor.some((/** @type {number} */ each) => each < 0)) {
      fill(notes, h("p", { class: "note" }, "The ranks' grid coordinates are not recorded: they are shown in a row."));
      found.data = found.rank.slice();
      found.tensor = found.pipeline = found.rank.map(() => 0);
    }
    if (!found.rank.length) fill(notes, h("p", { class: "note" }, "No timings of ranks are recorded yet."));
    row = new Map(found.rank.map((/** @type {number} */ rank, /** @type {number} */ i) => [rank, i]));
    view.set(found.rank, found.tensor, found.pipeline, found.data);
    const values = found.value.filter((/** @type {number | null} */ value) => value !== null).sort((/** @type {number} */ a, /** @type {number} */ b) => a - b);
    const middle = values[Math.floor(values.length / 2)] ?? 0;
    const low = Math.min(values[Math.floor(values.length * 0.005)] ?? 0, middle - 0.05 * Math.abs(middle));
    const high = Math.max(values[Math.ceil(values.length * 0.995) - 1] ?? 1, middle + 0.05 * Math.abs(middle));
    view.shares = Float32Array.from(found.value, (/** @type {number | null} */ value) => (value === null ? NaN : high > low ? Math.max(0, Math.min(1, (value - low) / (high - low))) : 0.5));
    bar(low, high);
    choose(chosen);
  }

  /** @param {number} low @param {number} high */
  function bar(low, high) {
    const ramp = h("canvas", { width: 256, height: 1, "aria-hidden": "true" });
    const context = ramp.getContext("2d");
    if (context) SCALE.forEach((colour, i) => {
      context.fillStyle = colour;
      context.fillRect(i, 0, 1, 1);
    });
    const field = h("input", { type: "number", min: 0, value: chosen ?? "", "aria-label": "rank" });
    fill(
      controls,
      choice("Coloured by", found.figures.map((/** @type {any} */ one) => ({ value: one.name, text: one.label })), found.figure.name, (value) => {
        address.set({ figure: value });
        void read();
      }),
      h("span", { class: "scale" }, inUnit(low, found.figure.unit), ramp, inUnit(high, found.figure.unit)),
      h("form", { class: "field", onsubmit: (/** @type {Event} */ event) => {
        event.preventDefault();
        choose(field.value === "" ? null : Number(field.value));
      } }, h("span", {}, "Rank"), field, h("button", { class: "small" }, "Show")),
      h("button", { type: "button", class: "small", onclick: () => void look() }, "Look for a hang"),
      h("span", { class: "hint" }, "drag to rotate, wheel to zoom, click to select a rank"),
    );
  }

  // A new look, which the job's phase may ask for too, leaves the verdict that a person reads in its place meanwhile.
  async function look() {
    const mine = ++looks;
    verdict.setAttribute("aria-busy", "true");
    if (!hang) fill(verdict, h("h2", {}, "Who waits for whom"), h("p", { class: "quiet" }, "Checking the ranks…"));
    let answer;
    let failed = "";
    try {
      answer = await ask("hang", { run }, signal);
    } catch (error) {
      failed = /** @type {Error} */ (error).message;
    }
    if (signal.aborted || mine !== looks) return;
    verdict.removeAttribute("aria-busy");
    if (failed) {
      fill(verdict, h("h2", {}, "Who waits for whom"), h("p", { class: "note" }, failed));
      return;
    }
    hang = answer;
    fill(
      verdict,
      h("h2", {}, "Who waits for whom"),
      hang.known
        ? [
          h("p", { class: hang.kind === "none" ? "" : "bad" }, h("b", { class: "kind" }, hang.headline)),
          h("ul", { class: "plainlist" }, hang.evidence.map((/** @type {string} */ line) => h("li", {}, line))),
          hang.ranks.length ? h("p", {}, "It began with ", hang.ranks.slice(0, 16).map((/** @type {number} */ rank) => h("button", { type: "button", class: "small", onclick: () => choose(rank) }, `rank ${rank}`))) : null,
          h("p", { class: "quiet" }, `${hang.waits.length} of ${hang.by_rank.length} ranks wait; ${hang.by_rank.filter((/** @type {any} */ one) => one.answered === false).length} silent; as of ${moment(hang.time)} UTC${hang.sent ? ", as seen by their agents" : ""}`),
        ]
        : h("p", { class: "quiet" }, hang.why),
    );
    choose(chosen);
  }

  /** @param {number | null} rank */
  function choose(rank) {
    chosen = rank !== null && row.has(rank) ? rank : null;
    address.set({ rank: chosen });
    view.links = [];
    view.rings = new Map();
    view.bright = null;
    if (hang && hang.kind !== "none") {
      for (const rank of hang.ranks) if (row.has(rank)) view.rings.set(/** @type {number} */ (row.get(rank)), "bad");
      const shown = chosen === null ? hang.waits : hang.waits.filter((/** @type {any} */ wait) => wait.rank === chosen || wait.on.includes(chosen));
      for (const wait of shown) {
        for (const on of wait.on.slice(0, 8)) {
          if (view.links.length < MOST_LINES && row.has(wait.rank) && row.has(on)) view.links.push({ from: /** @type {number} */ (row.get(wait.rank)), to: /** @type {number} */ (row.get(on)), colour: "bad", dash: [], arrow: true });
        }
      }
    }
    if (chosen === null) {
      fill(about, h("section", { class: "panel" }, h("p", { class: "quiet" }, `${found ? found.rank.length.toLocaleString("en") : "No"} ranks. Select one to see its partners, their traffic and its position.`)));
      view.drawing.later();
      return;
    }
    const cell = /** @type {number} */ (row.get(chosen));
    const bright = new Set([cell]);
    /** @type {number[][]} */
    const partners = AXES.map(() => []);
    for (let i = 0; i < found.rank.length; i++) {
      if (i === cell) continue;
      const same = [found.tensor[i] === found.tensor[cell], found.pipeline[i] === found.pipeline[cell], found.data[i] === found.data[cell]];
      if (same.filter(Boolean).length !== 2) continue;
      partners[same.indexOf(false)].push(i);
      bright.add(i);
    }
    AXES.forEach(([, colour, dash], axis) => partners[axis].forEach((to) => view.links.push({ from: cell, to, colour, dash, arrow: false })));
    view.bright = bright;
    if (!view.rings.has(cell)) view.rings.set(cell, "link");
    view.drawing.later();
    void describe(chosen, cell, partners);
  }

  /** @param {number} rank @param {number} cell @param {number[][]} partners */
  async function describe(rank, cell, partners) {
    const stands = hang?.by_rank.find((/** @type {any} */ one) => one.rank === rank);
    const wait = hang?.waits.find((/** @type {any} */ one) => one.rank === rank);
    const flows = h("section", { class: "panel", "aria-label": "data flow" }, h("p", { class: "quiet" }, "Reading…"));
    fill(
      about,
      h("section", { class: "panel", "aria-label": `rank ${rank}` },
        h("h2", {}, `Rank ${rank}`),
        h("dl", {}, h("dt", {}, "host"), h("dd", {}, found.hosts[found.host[cell]]),
          h("dt", {}, "place"), h("dd", {}, `tensor ${found.tensor[cell]}, stage ${found.pipeline[cell]}, data ${found.data[cell]}`),
          h("dt", {}, found.figure.label), h("dd", {}, inUnit(found.value[cell], found.figure.unit)),
          stands ? [h("dt", {}, "process"), h("dd", {}, stands.process), h("dt", {}, "stands at"), h("dd", {}, stands.place)] : null,
          wait ? [h("dt", {}, "waits"), h("dd", {}, `${duration(wait.seconds)} in ${wait.op} number ${wait.sequence} of ${wait.group}, for ${wait.all_came ? "no rank: all have joined" : `rank ${wait.on.slice(0, 8).join(", ")}`}`)] : null),
        stands?.stack.length ? h("details", {}, h("summary", {}, "stack"), h("pre", {}, stands.stack.join("\n"))) : null,
        h("p", {}, h("a", { href: address.link("heatmap", [run], { rank }) }, "history"), " · ", h("a", { href: address.link("timeline", [run], { ranks: rank }) }, "timeline"))),
      flows,
    );
    try {
      const told = await ask("rank", { run, rank }, signal);
      if (chosen !== rank) return;
      const of = (/** @type {string} */ action, /** @type {string} */ axis) => told.rows.find((/** @type {any[]} */ one) => one[0] === action && one[1] === axis);
      const shown = AXES.map(([axis, colour, dash], i) => ({ axis, colour, dash, count: partners[i].length }))
        .concat([...new Set(told.rows.filter((/** @type {any[]} */ one) => one[1] && !AXES.some(([axis]) => axis === one[1])).map((/** @type {any[]} */ one) => one[1]))].map((axis) => ({ axis: String(axis), colour: "", dash: [], count: -1 })));
      fill(flows, h("h2", {}, "Traffic with its partners"),
        table("traffic per step by axis", ["axis", "partners", "sent", "waited"], shown.map((one) => [
          [one.colour ? h("i", { class: `key k-${one.colour}` }) : null, one.axis], one.count < 0 ? "–" : String(one.count), bytes(of("transfer", one.axis)?.[4]), duration(of("wait", one.axis)?.[2])]), "figures"),
        h("p", { class: "quiet" }, `means per step, steps ${told.steps.first} to ${told.steps.last}; lines: solid tensor, dashed pipeline, dotted data`));
    } catch (error) {
      if (!signal.aborted) fill(flows, h("p", { class: "note" }, /** @type {Error} */ (error).message));
    }
  }

  onTheme(() => view.drawing.later());
  signal.addEventListener("abort", () => view.close());
  void read().then(() => {
    page.ready();
    return look();
  });
  let phase = "";
  return ({ pulse }) => {
    if (pulse.error) return;
    if (phase && phase !== pulse.now.phase) void look();
    phase = pulse.now.phase;
  };
}
