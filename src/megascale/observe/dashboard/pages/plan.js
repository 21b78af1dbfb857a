// What the layout was to cost, beside what is measured.

import * as address from "./address.js";
import { Drawing } from "./canvas.js";
import { css, onTheme } from "./colours.js";
import { choice, fill, h, table } from "./dom.js";
import { bytes, duration, percent, short } from "./format.js";
import { ask } from "./server.js";

const SHADES = ["forward", "backward", "exposed", "update", "bubble", "samples", "other"].map((name) => `k-${name}`);
/** A measured size beyond this many times the plan is told and not drawn: the plan would be too small to see. */
const DRAWN = 4;

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
  const controls = h("div", { class: "bar" });
  const notes = h("div", { class: "notes" });
  const body = h("div", { class: "below plan" });
  const canvas = h("canvas", { role: "img", "aria-label": "planned schedule by stage" });
  const drawing = new Drawing(canvas, (context, width, height) => found && bars(context, width, height, found.plan));
  fill(place, h("h1", { class: "unseen" }, `Plan of ${run}`), controls, notes, body);

  async function read() {
    fill(notes, h("p", { class: "quiet" }, "Planning…"));
    try {
      found = await ask("plan", { run, cluster: address.get("cluster") }, signal);
    } catch (error) {
      if (!signal.aborted) fill(notes, h("p", { class: "note" }, /** @type {Error} */ (error).message));
      return;
    }
    const { plan, measured } = found;
    fill(
      controls,
      choice("Predict for", [{ value: "", text: "no cluster" }, ...plan.clusters.map((/** @type {string} */ name) => ({ value: name, text: name }))], plan.cluster, (value) => {
        address.set({ cluster: value });
        void read();
      }),
      h("span", { class: "quiet" }, `${found.world ? `${found.world} rank${found.world === 1 ? "" : "s"}: ` : ""}tensor ${plan.layout.tensor} × pipeline ${plan.layout.pipeline} × data ${plan.layout.data}, ${plan.layout.microbatches} micro-batch${plan.layout.microbatches === 1 ? "" : "es"}, ZeRO-${plan.layout.zero}, ${plan.precision}`),
    );
    fill(notes, plan.not_predicted ? h("p", { class: "note" }, `Not predicted: ${plan.not_predicted}`) : null, plan.notes.map((/** @type {string} */ note) => h("p", { class: "note" }, note)));
    fill(body, step(plan, measured), memory(plan, measured), h("section", { class: "panel wide", "aria-label": "schedule" },
      h("h2", {}, `Schedule ${plan.schedule.name}`),
      h("p", { class: "quiet" }, `bubble ${percent(plan.schedule.bubble_replayed)} of the busiest stage's work, ${percent(plan.schedule.bubble_ideal)} ideal; a stage is idle ${percent(plan.schedule.idle)} of the step`),
      plan.bars.length ? h("div", { class: "schedule" }, canvas) : h("p", { class: "quiet" }, "too many actions to draw; megascale plan --plot draws them")));
    canvas.style.height = `${Math.min(420, 24 * plan.layout.pipeline + 8)}px`;
    drawing.later();
  }

  onTheme(() => drawing.later());
  signal.addEventListener("abort", () => drawing.close());
  void read().then(page.ready);
  return () => {};
}

/** @param {any} plan @param {any} measured */
function step(plan, measured) {
  const told = plan.predicted;
  /** @param {number | null | undefined} a @param {number | null | undefined} b */
  const off = (a, b) => (a && b ? `${b / a >= 1 ? "+" : ""}${percent(b / a - 1)}` : "–");
  const rows = [
    ["step time", told ? duration(told.seconds) : "–", duration(measured.seconds), off(told?.seconds, measured.seconds)],
    ["tokens per second", told ? short(told.tokens_per_second) : "–", short(measured.tokens_per_second), off(told?.tokens_per_second, measured.tokens_per_second)],
    ["MFU", told ? percent(told.mfu) : "–", percent(measured.mfu), off(told?.mfu, measured.mfu)],
  ];
  return h("section", { class: "panel", "aria-label": "step" },
    h("h2", {}, "Step: predicted and measured"),
    told && measured.seconds ? stepBars(told, measured.seconds) : null,
    table("the step", ["", "predicted", "measured, median of 200", "measured to predicted"], rows, "figures"),
    told ? [h("p", { class: "quiet" }, `P10 to P90: ${duration(told.low)} to ${duration(told.high)}`),
      table("parts of a predicted step", ["predicted part", "time", "share"], Object.entries(told.parts).filter(([, seconds]) => seconds).map(([name, seconds]) => [name.replaceAll("_", " "), duration(/** @type {number} */ (seconds)), percent(/** @type {number} */ (seconds) / told.seconds)]), "figures"),
      ...told.cautions.map((/** @type {string} */ words) => h("p", { class: "quiet" }, words))] : h("p", { class: "quiet" }, "Select the run's cluster for a prediction."),
    table("sizes", ["size", ""], [["parameters", short(plan.parameters)], ["tokens per step", short(plan.tokens_per_step, 7)], ["FLOPs per step", `${short(plan.flops.per_step / 1e12)} TFLOP`], ["FLOPs per GPU and step", `${short(plan.flops.per_step_and_gpu / 1e12)} TFLOP`]], "figures"));
}

/** Predicted and measured step on one scale. @param {any} told @param {number} seconds */
function stepBars(told, seconds) {
  const parts = Object.entries(told.parts).filter(([, part]) => part);
  const most = Math.max(told.seconds, told.high, seconds);
  const stripe = h("div", { class: "stripe", role: "img", "aria-label": `predicted ${duration(told.seconds)}: ${parts.map(([name, part]) => `${name.replaceAll("_", " ")} ${duration(/** @type {number} */ (part))}`).join(", ")}` });
  parts.forEach(([name, part], n) => {
    const span = h("span", { class: SHADES[n % SHADES.length], title: `${name.replaceAll("_", " ")}: ${duration(/** @type {number} */ (part))}` });
    span.style.width = `${(100 * /** @type {number} */ (part)) / most}%`;
    stripe.append(span);
  });
  return [
    h("div", { class: "stage" }, h("span", {}, "predicted"), stripe, h("b", {}, duration(told.seconds))),
    h("div", { class: "stage" }, h("span", {}, "measured"), measuredStripe(seconds, most), h("b", {}, duration(seconds))),
    h("ul", { class: "legend" }, parts.map(([name], n) => h("li", {}, h("i", { class: `key ${SHADES[n % SHADES.length]}` }), name.replaceAll("_", " ")))),
  ];
}

/** @param {any} plan @param {any} measured */
function memory(plan, measured) {
  const stages = plan.memory_by_stage;
  const kinds = Object.keys(stages[0]).filter((kind) => kind !== "total" && stages.some((/** @type {any} */ one) => one[kind]));
  const largest = Math.max(...stages.map((/** @type {any} */ one) => one.total));
  const size = (measured.memory_gib ?? 0) * 2 ** 30;
  // A CPU's process holds many times a small model: it would leave nothing of the plan to see.
  const drawn = size > 0 && size <= DRAWN * largest;
  const most = drawn ? Math.max(largest, size) : largest;
  const shown = stages.length <= 8 ? stages.map((/** @type {any} */ _, /** @type {number} */ i) => i) : [0, Math.floor(stages.length / 2), stages.length - 1];
  return h("section", { class: "panel", "aria-label": "memory" },
    h("h2", {}, "Memory per rank"),
    shown.map((/** @type {number} */ i) => {
      const stripe = h("div", { class: "stripe", role: "img", "aria-label": `stage ${i}: ${bytes(stages[i].total)}` });
      kinds.forEach((kind) => {
        const part = h("span", { class: `m-${kind}`, title: `${kind.replaceAll("_", " ")}: ${bytes(stages[i][kind])}` });
        part.style.width = `${(100 * stages[i][kind]) / most}%`;
        stripe.append(part);
      });
      return h("div", { class: "stage" }, h("span", {}, `stage ${i}`), stripe, h("b", {}, bytes(stages[i].total)));
    }),
    drawn ? h("div", { class: "stage" }, h("span", {}, "measured"), measuredStripe(size, most), h("b", {}, bytes(size))) : null,
    size && !drawn ? h("p", {}, `Measured: ${bytes(size)}, ${short(size / largest, 2)} times the plan, and therefore not drawn on its scale.`) : null,
    h("ul", { class: "legend" }, kinds.map((kind) => h("li", {}, h("i", { class: `key m-${kind}` }), `${kind.replaceAll("_", " ")} ${bytes(stages[0][kind])}`))),
    h("p", { class: "quiet" }, `The legend is for stage 0. ${plan.fits ? "Fits" : "Does not fit"} ${short(plan.device_gib)} GiB with ${short(plan.reserve_gib)} reserved for the device's driver. Measured is the memory of the fullest rank's device; on a CPU it is that of the process, including Python and its libraries.`));
}

/** @param {number} size @param {number} most */
function measuredStripe(size, most) {
  const part = h("span", { class: "ok" });
  part.style.width = `${Math.min(100, (100 * size) / most)}%`;
  return h("div", { class: "stripe", "aria-hidden": "true" }, part);
}

/** @param {CanvasRenderingContext2D} context @param {number} width @param {number} height @param {any} plan */
function bars(context, width, height, plan) {
  context.fillStyle = css("panel");
  context.fillRect(0, 0, width, height);
  const label = 58;
  const tall = (height - 8) / plan.layout.pipeline;
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  context.fillStyle = css("quiet");
  context.textAlign = "left";
  for (let stage = 0; stage < plan.layout.pipeline; stage++) context.fillText(`stage ${stage}`, 4, 4 + (stage + 0.5) * tall);
  context.textAlign = "center";
  const scale = (width - label - 6) / plan.makespan;
  for (const [stage, backward, chunk, batch, begin, end] of plan.bars) {
    const x = label + begin * scale;
    const w = Math.max(0.6, (end - begin) * scale - 0.5);
    context.fillStyle = css(backward ? "backward" : "forward");
    context.globalAlpha = chunk % 2 ? 0.65 : 1;
    context.fillRect(x, 4 + stage * tall + 1, w, tall - 3);
    context.globalAlpha = 1;
    if (w > 16) {
      context.fillStyle = "#fff";
      context.fillText(String(batch), x + w / 2, 4 + (stage + 0.5) * tall);
    }
  }
}
