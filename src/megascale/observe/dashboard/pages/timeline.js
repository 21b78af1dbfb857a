// A step of some ranks: where it went, and for whom each wait was.

import * as address from "./address.js";
import { onTheme } from "./colours.js";
import { choice, fill, h, table, teachSpans } from "./dom.js";
import { duration, percent } from "./format.js";
import { ask } from "./server.js";
import { TrackView } from "./track_view.js";

/** @typedef {import("./track_view.js").Hit} Hit */
const KINDS = [["forward", "forward"], ["backward", "backward"], ["update", "optimizer"], ["other", "other"], ["bubble", "bubble: the other side was late"], ["exposed", "exposed communication"], ["samples", "waits for samples"]];

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
  const tip = h("div", { class: "told", "aria-hidden": "true", hidden: true });
  let later = 0;
  const view = new TrackView({
    chosen: (hit) => explain(hit),
    pointed: (hit, x, y) => point(hit, x, y),
    moved: (from, to) => {
      clearTimeout(later);
      later = window.setTimeout(() => {
        const all = !found || (from <= 0 && to >= found.length);
        address.set({ from: all ? null : Math.round(from), to: all ? null : Math.round(to) });
      }, 200);
    },
  });
  const controls = h("div", { class: "bar" });
  const side = h("div", { class: "side" });
  const notes = h("div", { class: "notes" }, h("p", { class: "quiet" }, "Reading spans…"));
  const legend = h("ul", { class: "legend above-canvas", "aria-label": "colours" }, KINDS.map(([name, words]) => h("li", {}, h("i", { class: `key k-${name}` }), words)), h("li", {}, h("i", { class: "key k-plan" }), "below each rank: the planned schedule, on the same time axis"));
  const split = h("div", { class: "split" }, h("div", { class: "canvas" }, view.canvas, tip), side);
  fill(
    place,
    h("h1", { class: "unseen" }, `Timeline of ${run}`),
    notes,
    controls,
    legend,
    split,
  );

  async function read() {
    let answer;
    try {
      answer = await ask("timeline", { run, step: address.number("step"), ranks: address.get("ranks"), view: address.get("view") }, signal);
    } catch (error) {
      if (signal.aborted) return;
      const { message } = /** @type {Error} */ (error);
      const teaching = found ? null : teachSpans(run, "timeline", message);
      fill(notes, h("p", { class: "note" }, message), teaching);
      legend.hidden = split.hidden = teaching !== null;
      if (!found && !teaching) bar([], null);
      return;
    }
    found = answer;
    legend.hidden = split.hidden = false;
    fill(notes);
    view.tracks = found.tracks;
    view.messages = found.messages;
    view.length = found.length;
    view.virtual = found.virtual;
    view.fit();
    view.chain = [];
    view.at = null;
    view.top = 0;
    [view.from, view.to] = [address.number("from") ?? 0, address.number("to") ?? found.length];
    view.drawing.later();
    bar(found.steps, found.step);
    summary();
  }

  /** @param {number[]} steps @param {number | null} step */
  function bar(steps, step) {
    const ranks = h("input", { type: "text", value: address.get("ranks"), placeholder: "0-7,16 or all", "aria-label": "ranks", size: 14 });
    fill(
      controls,
      choice("Step", steps.map((each) => ({ value: String(each), text: String(each) })), String(step), (value) => pick({ step: value, from: null, to: null })),
      h("form", { class: "field", onsubmit: (/** @type {Event} */ event) => {
        event.preventDefault();
        pick({ ranks: ranks.value.trim(), from: null, to: null });
      } }, h("span", {}, "Ranks"), ranks, h("button", { class: "small" }, "Show")),
      choice("Ordered along", ["pipeline", "tensor", "data"].map((value) => ({ value, text: value })), found?.view ?? address.get("view", "pipeline"), (value) => pick({ view: value, from: null, to: null })),
      h("button", { type: "button", class: "small", onclick: () => view.show(0, view.length) }, "Whole step"),
      h("span", { class: "hint" }, "wheel zooms, drag moves, click explains"),
    );
  }

  /** @param {Record<string, string | number | null>} changed */
  function pick(changed) {
    address.set(changed);
    void read();
  }

  function summary() {
    view.chain = [];
    const names = ["compute", "bubble", "samples", "optimizer", "other"];
    const mean = new Map();
    for (const track of found.tracks) {
      for (const [name, seconds] of Object.entries(track.seconds)) mean.set(name, (mean.get(name) ?? 0) + /** @type {number} */ (seconds) / found.tracks.length);
    }
    const whole = [...mean.values()].reduce((a, b) => a + b, 0);
    const order = [...mean.keys()].sort((a, b) => (names.indexOf(a) + 9) % 9 - (names.indexOf(b) + 9) % 9);
    const bubbles = found.bubbles.reduce((/** @type {number} */ sum, /** @type {[number, number]} */ each) => sum + each[1], 0);
    const longest = found.tracks.flatMap((/** @type {any} */ track, /** @type {number} */ i) => track.waits.map((/** @type {any} */ wait, /** @type {number} */ index) => ({ hit: { kind: "wait", track: i, index }, wait, rank: track.rank })))
      .sort((/** @type {any} */ a, /** @type {any} */ b) => b.wait[3] - b.wait[2] - (a.wait[3] - a.wait[2])).slice(0, 8);
    fill(
      side,
      h("section", { class: "panel", "aria-label": "the step" },
        h("h2", {}, `Step ${found.step}: ${duration(found.length / 1e6)}`),
        found.planned_seconds !== null ? h("p", {}, `Pipeline ${duration(found.pipeline_seconds)}, planned ${duration(found.planned_seconds)} (${percent(Math.abs(found.pipeline_seconds / found.planned_seconds - 1))} ${found.pipeline_seconds >= found.planned_seconds ? "longer" : "shorter"})`) : null,
        table("where a rank's step goes", ["mean of a rank", "time", "share"], order.map((name) => [name, duration(mean.get(name)), percent(mean.get(name) / whole)]), "figures"),
        found.clock_error ? h("p", { class: "quiet" }, `clocks agree to ${duration(found.clock_error / 1e6)}`) : null),
      bubbles > 0 ? h("section", { class: "panel", "aria-label": "bubbles" }, h("h2", {}, "Bubbles began with"),
        table("bubbles by the rank that they began with", ["rank", "share"], found.bubbles.slice(0, 6).map((/** @type {[number, number]} */ [rank, seconds]) => [`rank ${rank}`, percent(seconds / bubbles)]), "figures")) : null,
      longest.length ? h("section", { class: "panel", "aria-label": "longest waits" }, h("h2", {}, "Longest waits"),
        h("ul", { class: "outliers" }, longest.map((/** @type {any} */ one) => h("li", {}, h("button", { type: "button", onclick: () => {
          view.choose(one.hit);
          view.reveal(one.hit);
        } }, h("span", {}, `rank ${one.rank}, ${one.wait[0]}`), h("b", {}, duration((one.wait[3] - one.wait[2]) / 1e6)), h("span", {}, `in ${one.wait[6]}`)))))) : null,
    );
    view.drawing.later();
  }

  /** The waits behind a wait, down to where it began. @param {Hit} hit @returns {Hit[]} */
  function causes(hit) {
    /** @type {Hit[]} */
    const chain = [];
    const seen = new Set([hit.track]);
    let wait = view.tracks[hit.track].waits[hit.index];
    while (wait[0] === "bubble") {
      const track = view.tracks.findIndex((each) => each.rank === wait[4]);
      if (track < 0 || seen.has(track)) break;
      seen.add(track);
      let [best, most] = [-1, 0];
      view.tracks[track].waits.forEach((other, index) => {
        const over = Math.min(other[3], wait[3]) - Math.max(other[2], wait[2]);
        if (other[0] === "bubble" && over > most) [best, most] = [index, over];
      });
      if (best < 0 || 2 * most < wait[3] - wait[2]) break;
      chain.push({ kind: "wait", track, index: best });
      wait = view.tracks[track].waits[best];
    }
    return chain;
  }

  /** @param {Hit | null} hit */
  function explain(hit) {
    if (!hit) {
      if (found) summary();
      return;
    }
    const track = view.tracks[hit.track];
    const back = h("button", { type: "button", class: "small", onclick: () => {
      view.at = null;
      summary();
    } }, "Whole step");
    if (hit.kind !== "wait") {
      view.chain = [];
      const words = hit.kind === "act" ? actWords(track.acts[hit.index]) : plannedWords(track.planned[hit.index]);
      const [from, to] = view.span(hit);
      const inside = hit.kind === "act" ? track.waits.filter((wait) => wait[2] >= from - 1 && wait[3] <= to + 1) : [];
      fill(side, h("section", { class: "panel", "aria-label": "what was chosen" }, h("div", { class: "head" }, h("h2", {}, `Rank ${track.rank}: ${words}`), back),
        h("dl", {}, h("dt", {}, "from"), h("dd", {}, duration(from / 1e6)), h("dt", {}, "took"), h("dd", {}, duration((to - from) / 1e6)),
          hit.kind === "act" ? [h("dt", {}, "waited in it"), h("dd", {}, duration(inside.reduce((sum, wait) => sum + wait[3] - wait[2], 0) / 1e6))] : null)));
      return;
    }
    const wait = track.waits[hit.index];
    view.chain = causes(hit);
    const ends = view.chain.length ? view.chain[view.chain.length - 1] : hit;
    const origin = wait[5] >= 0 ? wait[5] : wait[4];
    fill(
      side,
      h("section", { class: "panel", "aria-label": "what it waited for" },
        h("div", { class: "head" }, h("h2", {}, `Rank ${track.rank} waited ${duration((wait[3] - wait[2]) / 1e6)}`), back),
        h("p", {}, `${wait[0] === "bubble" ? "Bubble" : wait[0] === "exposed" ? "Exposed communication" : "Samples"}${wait[1] ? ` along ${wait[1]}` : ""}, in ${wait[6]}, from ${duration(wait[2] / 1e6)}.`),
        h("p", {}, wait[7], "."),
        wait[0] === "bubble" && origin >= 0 ? h("p", {}, h("b", {}, `It began with rank ${origin}.`), " ", h("a", { href: address.link("heatmap", [run], { rank: origin }) }, "its history")) : null),
      view.chain.length ? h("section", { class: "panel", "aria-label": "chain of causes" }, h("h2", {}, "Chain to its origin"),
        h("ol", {}, [hit, ...view.chain].map((each) => {
          const one = view.tracks[each.track];
          const its = one.waits[each.index];
          return h("li", {}, h("button", { type: "button", class: "small", onclick: () => view.reveal(each) }, `rank ${one.rank}`), ` waited ${duration((its[3] - its[2]) / 1e6)} for rank ${its[4]}`);
        }), h("li", {}, `rank ${view.tracks[ends.track].waits[ends.index][4]} came last`))) : null,
    );
    view.drawing.later();
  }

  /** @param {Hit | null} hit @param {number} x @param {number} y */
  function point(hit, x, y) {
    tip.hidden = !hit;
    if (!hit) return;
    const track = view.tracks[hit.track];
    const [from, to] = view.span(hit);
    const words = hit.kind === "wait" ? `${track.waits[hit.index][0]}: ${track.waits[hit.index][7]}` : hit.kind === "act" ? actWords(track.acts[hit.index]) : plannedWords(track.planned[hit.index]);
    fill(tip, h("b", {}, `rank ${track.rank}`), ` ${duration((to - from) / 1e6)}`, h("div", {}, words));
    const right = x > view.drawing.width / 2;
    tip.style.left = right ? "auto" : `${x + 14}px`;
    tip.style.right = right ? `${view.drawing.width - x + 14}px` : "auto";
    tip.style.top = `${Math.min(y + 14, view.drawing.height - 70)}px`;
  }

  onTheme(() => view.drawing.later());
  signal.addEventListener("abort", () => {
    clearTimeout(later);
    view.close();
  });
  void read().then(page.ready);
  return () => {};
}

/** @param {import("./track_view.js").Act} act */
function actWords([action, chunk, batch]) {
  return `${action.replaceAll("_", " ")}${batch >= 0 ? ` of micro-batch ${batch}` : ""}${chunk > 0 ? `, chunk ${chunk}` : ""}`;
}

/** @param {import("./track_view.js").Planned} planned */
function plannedWords([backward, chunk, batch]) {
  return `planned ${backward ? "backward" : "forward"} of micro-batch ${batch}${chunk > 0 ? `, chunk ${chunk}` : ""}`;
}
