// The first view: how a run does, and several over each other.

import * as address from "./address.js";
import { DASHES, onTheme, runColour } from "./colours.js";
import { choice, fill, h, table } from "./dom.js";
import { showExperts } from "./expert_map.js";
import { bytes, duration, inUnit, moment, percent, short, whole } from "./format.js";
import { ChartGroup, LineChart } from "./line_chart.js";
import { ask } from "./server.js";

/** [keys, title, unit]; keys in one chart are curves of it. @type {[string[], string, string][]} */
const CHARTS = [
  [["loss"], "loss", ""],
  [["valid_loss"], "held-out loss", ""],
  [["grad_norm"], "gradient norm", ""],
  [["tokens_per_second"], "tokens per second", ""],
  [["mfu"], "MFU", "%"],
  [["seconds"], "step time", "s"],
  [["learning_rate"], "learning rate", ""],
  [["memory_gib"], "memory, GiB", ""],
  [["expert_rank_load_max", "expert_load_max"], "largest load of a rank and an expert, relative to the mean", ""],
  [["expert_entropy"], "entropy of the experts' load, relative to an even load", ""],
  [["dead_experts"], "experts without tokens", ""],
];
/** Titles of charts whose curves vary from step to step: they are averaged, and a few extreme points may be outside. */
const NOISY = new Set(["loss", "gradient norm", "tokens per second", "MFU", "step time"]);
const SMOOTHINGS = [["0", "none"], ["0.6", "0.6"], ["0.9", "0.9"], ["0.97", "0.97"]];
/** @type {Record<string, [string, string]>} */
const TILES = {
  loss: ["loss", ""], valid_loss: ["held-out loss", ""], tokens_per_second: ["tokens/s", ""], mfu: ["MFU", "%"],
  seconds: ["step", "s"], grad_norm: ["gradient norm", ""], memory_gib: ["memory", "GiB"],
};
const CAUSES = ["ok", "c1", "c2", "c3", "c4", "c5", "c6", "c7"];

/**
 * @param {HTMLElement} place
 * @param {import("./main.js").Page} page
 * @returns {(told: {run: string, pulse: any}) => void} takes live updates
 */
export function show(place, page) {
  const { runs, signal } = page;
  /** @type {Map<string, any>} */
  const about = new Map();
  /** @type {Map<string, any>} */
  const curves = new Map();
  let log = address.get("log") === "1";
  let x = address.get("x", "step");
  /** @type {LineChart[]} */
  let charts = [];
  let laid = false;

  const group = new ChartGroup((low, high) => {
    address.set({ low: low === null ? null : Number(low.toPrecision(8)), high: high === null ? null : Number(high.toPrecision(8)) });
    reset.hidden = low === null;
    runs.forEach((run) => void readCurves(run));
  });
  const told = () => {
    group.tell = x === "time" ? (at) => moment(at).slice(5, 19) : (at) => short(Math.round(at), 6);
  };
  told();
  group.smoothing = Number(address.get("smooth", "0.6")) || 0;
  const heads = h("div", { class: "tiles" });
  const chartsAt = h("div", { class: "charts" });
  const spent = h("section", { class: "panel", "aria-label": "where the time went" });
  const recovered = h("section", { class: "panel", "aria-label": "recoveries", hidden: true });
  const saved = h("section", { class: "panel", "aria-label": "checkpoints" });
  const events = h("section", { class: "panel wide", "aria-label": "events" });
  const experts = h("section", { class: "panel wide", "aria-label": "experts" });
  const notes = h("div", { class: "notes" });
  const reset = h("button", { class: "small", type: "button", hidden: address.number("low") === null, onclick: () => group.zoomed(null, null) }, "Whole run");
  const bar = h(
    "div",
    { class: "bar" },
    choice("Along", [{ value: "step", text: "step" }, { value: "tokens", text: "tokens" }, { value: "time", text: "time" }], x, (value) => {
      x = value;
      address.set({ x: value === "step" ? null : value, low: null, high: null });
      told();
      reset.hidden = true;
      runs.forEach((run) => void readCurves(run));
    }),
    h("label", { class: "field" }, h("input", { type: "checkbox", checked: log, onchange: (/** @type {Event} */ event) => {
      log = /** @type {HTMLInputElement} */ (event.target).checked;
      address.set({ log: log ? 1 : null });
      draw();
    } }), h("span", {}, "log scale of losses")),
    choice("Smoothing", SMOOTHINGS.map(([value, text]) => ({ value, text })), String(group.smoothing), (value) => {
      group.smoothing = Number(value);
      address.set({ smooth: value });
      draw();
    }),
    reset,
    runs.length > 1 ? legend(runs) : null,
    h("span", { class: "hint" }, "drag to zoom, double-click to reset"),
  );
  fill(place, h("h1", { class: "unseen" }, "Overview"), notes, heads, bar, chartsAt, h("div", { class: "below" }, experts, spent, recovered, saved, events));
  const readExperts = showExperts(experts, runs[0], signal);

  /** @param {string} run */
  async function readAbout(run) {
    try {
      about.set(run, await ask("overview", { run }, signal));
      if (run === runs[0]) showAbout();
      layCharts();
    } catch (error) {
      if (!signal.aborted) page.notice(`${run}: ${/** @type {Error} */ (error).message}`);
    }
  }

  /** @param {string} run */
  async function readCurves(run) {
    const keys = [...new Set(CHARTS.flatMap(([names]) => names))];
    try {
      const found = await ask("series", { run, key: keys, x, points: 480, low: address.number("low"), high: address.number("high") }, signal);
      curves.set(run, found.series);
      layCharts();
    } catch (error) {
      if (!signal.aborted) page.notice(`${run}: ${/** @type {Error} */ (error).message}`);
    }
  }

  async function readEvents() {
    try {
      const found = await ask("events", { run: runs[0], count: 200 }, signal);
      showEvents(events, found.events, found.count);
    } catch (error) {
      if (!signal.aborted) page.notice(/** @type {Error} */ (error).message);
    }
  }

  function layCharts() {
    const wanted = CHARTS.filter(([keys]) => [...curves.values()].some((series) => keys.some((key) => series[key]?.x.length)));
    if (!laid || charts.map((chart) => chart.title).join() !== wanted.map(([, title]) => title).join()) {
      laid = curves.size > 0;
      group.close();
      charts = wanted.map(([, title, unit]) => new LineChart(group, title, unit, NOISY.has(title)));
      chartsAt.className = `charts ${charts.length % 4 && charts.length % 3 === 0 ? "threes" : ""}`;
      fill(chartsAt, charts.map((chart) => chart.element), charts.length || !laid ? null : h("p", { class: "panel teach" }, "No step has ended yet. Curves appear after the first step, which includes compilation. ", h("code", {}, `megascale logs ${runs[0]}`), " shows what the ranks do, and ", h("code", {}, `megascale hang ${runs[0]}`), " names a rank that the others wait for."));
    }
    draw();
  }

  function draw() {
    for (const chart of charts) {
      const keys = CHARTS.find(([, title]) => title === chart.title)?.[0] ?? [];
      chart.log = log && chart.title.includes("loss");
      chart.set(
        runs.flatMap((run, i) => keys.filter((key) => curves.get(run)?.[key]).map((key) => ({ name: run, colour: runColour(i), dash: DASHES[i % DASHES.length], series: curves.get(run)[key] }))),
        (about.get(runs[0])?.marks ?? []).filter(() => x !== "tokens").map((/** @type {any} */ mark) => ({ x: x === "time" ? mark.time : mark.step, text: mark.event })),
      );
    }
  }

  function showAbout() {
    const found = about.get(runs[0]);
    fill(notes, found.notes.map((/** @type {string} */ note) => h("p", { class: "note" }, note)));
    const lost = Object.entries(found.nonfinite).filter(([, steps]) => /** @type {number[]} */ (steps).length);
    lost.forEach(([key, steps]) => notes.append(h("p", { class: "note" }, `${key.replace("_", " ")} was NaN or infinite at step ${/** @type {number[]} */ (steps).join(", ")}`)));
    showTiles(found);
    showSpent(spent, found.effective, found.now);
    showRecoveries(recovered, found.recoveries);
    showCheckpoints(saved, found.checkpoints);
  }

  /** @param {any} found */
  function showTiles(found) {
    const { now } = found;
    const left = now.steps && now.step !== null && found.tiles.seconds ? (now.steps - now.step) * found.tiles.seconds : null;
    fill(
      heads,
      h(
        "div",
        { class: `tile now ${now.alive ? "alive" : ""} phase-${/^[a-z]+$/.test(now.phase) ? now.phase : "other"}` },
        h("span", { class: "what" }, now.launched ? `attempt ${now.attempt}` : "run"),
        h("b", {}, now.phase),
        h("span", { class: "more" }, `step ${whole(now.step)}${now.steps ? ` of ${whole(now.steps)}` : ""}${now.alive && left ? `, ${duration(left)} left` : ""}`),
        now.why ? h("span", { class: "more why", title: now.why }, now.why) : null,
      ),
      h("div", { class: "tile" }, h("span", { class: "what" }, "effective time"), h("b", {}, percent(found.effective.share)), h("span", { class: "more" }, `of ${duration(found.effective.total)}`)),
      Object.entries(TILES).filter(([key]) => key in found.tiles).map(([key, [name, unit]]) =>
        h("div", { class: "tile" }, h("span", { class: "what" }, name), h("b", {}, unit === "GiB" ? short(found.tiles[key], 3) : inUnit(found.tiles[key], unit)), h("span", { class: "more" }, unit === "GiB" ? "GiB, fullest rank" : ""))),
    );
  }

  /** @type {Map<string, {rows: number, events: number, phase: string}>} */
  const seen = new Map();
  /** @type {Set<string>} */
  const due = new Set();
  let timer = 0;

  function refresh() {
    timer = 0;
    for (const run of due) {
      void readCurves(run);
      void readAbout(run);
      if (run === runs[0]) void Promise.all([readEvents(), readExperts()]);
    }
    due.clear();
  }

  onTheme(draw);
  signal.addEventListener("abort", () => {
    clearTimeout(timer);
    group.close();
  });
  void Promise.all([...runs.flatMap((run) => [readCurves(run), readAbout(run)]), readEvents(), readExperts()]).then(page.ready);

  return ({ run, pulse }) => {
    if (pulse.error) return;
    const before = seen.get(run);
    seen.set(run, { rows: pulse.rows, events: pulse.events, phase: pulse.now.phase });
    if (!before || (before.rows === pulse.rows && before.events === pulse.events && before.phase === pulse.now.phase)) return;
    due.add(run);
    timer ||= window.setTimeout(refresh, 250);
  };
}

/** @param {string[]} runs */
function legend(runs) {
  return h("ul", { class: "legend", "aria-label": "runs" }, runs.map((run, i) => {
    const key = h("i", { class: "key" });
    key.style.background = runColour(i);
    return h("li", {}, key, run);
  }));
}

/** @param {Element} at @param {any} effective @param {any} now */
function showSpent(at, effective, now) {
  const parts = Object.entries(effective.seconds);
  const stripe = h("div", { class: "stripe", role: "img", "aria-label": parts.map(([name, seconds]) => `${name} ${percent(/** @type {number} */ (seconds) / effective.total)}`).join(", ") });
  parts.forEach(([name, seconds], i) => {
    const part = h("span", { class: CAUSES[Math.min(i, CAUSES.length - 1)], title: `${name}: ${duration(/** @type {number} */ (seconds))}` });
    part.style.flexGrow = String(/** @type {number} */ (seconds));
    stripe.append(part);
  });
  fill(
    at,
    h("h2", {}, "Where the time went"),
    parts.length
      ? [stripe, table("Where the time went", ["cause", "time", "share"], parts.map(([name, seconds], i) => [[h("i", { class: `key ${CAUSES[Math.min(i, CAUSES.length - 1)]}` }), name], duration(/** @type {number} */ (seconds)), percent(/** @type {number} */ (seconds) / effective.total)]), "figures")]
      : h("p", { class: "quiet" }, now.alive ? "The run has recorded nothing yet." : "Neither steps nor events are recorded."),
  );
}

const PHASES = ["detect", "decide", "processes", "groups", "state", "first step"];

/** @param {Element} at @param {any[]} recoveries */
function showRecoveries(at, recoveries) {
  at.toggleAttribute("hidden", !recoveries.length);
  const rows = recoveries.map((one) => {
    const stripe = h("div", { class: "stripe", role: "img", "aria-label": PHASES.map((name) => `${name} ${duration(one.seconds[name] ?? 0)}`).join(", ") });
    PHASES.forEach((name, i) => {
      const part = h("span", { class: CAUSES[Math.min(i, CAUSES.length - 1)], title: `${name}: ${duration(one.seconds[name] ?? 0)}` });
      part.style.flexGrow = String(one.seconds[name] ?? 0);
      stripe.append(part);
    });
    const kept = one.reused_ranks.length ? `${one.reused_ranks.length} ranks` : "none";
    return [moment(one.time), one.cause.replaceAll("_", " "), duration(one.total), stripe, one.lost_steps < 0 ? "unknown" : String(one.lost_steps), kept];
  });
  const key = h("ul", { class: "legend", "aria-label": "phases" }, PHASES.map((name, i) => h("li", {}, h("i", { class: `key ${CAUSES[Math.min(i, CAUSES.length - 1)]}` }), name)));
  fill(at, h("h2", {}, "Recoveries"), key, h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "list of recoveries" }, table("Recoveries", ["when (UTC)", "cause", "fault to next step", "phases", "steps lost", "kept"], rows, "figures")));
}

/** @param {Element} at @param {any[]} checkpoints */
function showCheckpoints(at, checkpoints) {
  fill(
    at,
    h("h2", {}, "Checkpoints"),
    checkpoints.length
      ? h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "list of checkpoints" }, table("Checkpoints", ["step", "when (UTC)", "size"], checkpoints.slice(0, 50).map((one) => [String(one.step), one.complete ? moment(one.time) : "not committed", bytes(one.bytes)]), "figures"))
      : h("p", { class: "quiet" }, "The run folder holds no checkpoint. ", h("code", {}, "checkpoint.interval"), " sets the steps between saves; ", h("code", {}, "checkpoint.location"), " may name another folder."),
  );
}

const HIDDEN = new Set(["time", "date", "event", "evidence", "by", "nodes", "ranks", "attempt", "action"]);
const BAD = /fail|lost|exit|killed|hang|fault|error|evict|damag|memory|nonfinite|full|slow|missed|drop/;

/** @param {Element} at @param {any[]} found @param {number} count */
export function showEvents(at, found, count) {
  const wanted = h("input", { type: "search", placeholder: "filter", "aria-label": "filter events", oninput: () => list() });
  const place = h("ol", { class: "events" });
  const list = () => {
    const word = wanted.value.toLowerCase();
    const shown = found.filter((one) => !word || JSON.stringify(one).toLowerCase().includes(word));
    fill(place, shown.map((one) => event(one)), shown.length ? null : h("li", { class: "quiet" }, found.length ? "No event contains this text." : "No events. Starts, saves, faults and decisions of the driver appear here with their evidence."));
  };
  const before = at.querySelector("input");
  if (before instanceof HTMLInputElement) wanted.value = before.value;
  const focused = before !== null && document.activeElement === before;
  fill(at, h("div", { class: "head" }, h("h2", {}, "Events"), h("span", { class: "quiet" }, count > found.length ? `the newest ${found.length} of ${count}` : `${count}`), wanted), h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "list of events" }, place));
  list();
  if (focused) wanted.focus();
}

/** Units by the end of a detail's name. @type {[RegExp, (value: number) => string][]} */
const UNITS = [
  [/(^|_)(seconds|stall)$/, duration],
  [/(^|_)(ms|milliseconds)$/, (value) => duration(value / 1e3)],
  [/(^|_)bytes$/, bytes],
  [/(^|_)gib$/, (value) => `${short(value)} GiB`],
  [/bits_per_byte$/, (value) => `${short(value)} bits per byte`],
  [/per_second$/, (value) => `${short(value)} per second`],
  [/(^|_)(share|mfu)$/, percent],
  [/(^|_)loss$/, (value) => `${short(value)} nats per token`],
  [/(^|_)(step|steps|tokens|samples)$/, whole],
];
/** Names of which nothing but a unit would be left. @type {Record<string, string>} */
const BARE = { seconds: "took", bytes: "size" };
/** The end of a name that its value's unit repeats. */
const NAMED = /_?(seconds|ms|milliseconds|bytes|gib|bits_per_byte|per_second)$/;

/** A detail of an event with its unit. @param {string} key @param {unknown} value */
export function detail(key, value) {
  if (typeof value === "number") {
    const unit = UNITS.find(([end]) => end.test(key));
    const name = (BARE[key] ?? key.replace(NAMED, "")).replaceAll("_", " ");
    return `${name} ${unit ? unit[1](value) : short(value, 6)}`.trim();
  }
  return `${key.replaceAll("_", " ")} ${typeof value === "string" ? value : JSON.stringify(value)}`;
}

/** @param {any} one */
function event(one) {
  const more = Object.entries(one).filter(([key, value]) => !HIDDEN.has(key) && value !== null).map(([key, value]) => detail(key, value));
  const who = [...(Array.isArray(one.nodes) ? one.nodes : []), ...(Array.isArray(one.ranks) && one.ranks.length ? [`rank ${one.ranks.join(", ")}`] : [])];
  const lines = [...(Array.isArray(one.evidence) ? one.evidence : []), ...(more.length ? [more.join(", ")] : [])];
  return h(
    "li",
    { class: BAD.test(one.event) ? "bad" : one.by === "driver" ? "decision" : "" },
    h("time", { title: `${moment(one.time)} UTC` }, `${moment(one.time).slice(5)}`),
    h("span", { class: "kind" }, String(one.event).replaceAll("_", " ")),
    who.length ? h("span", { class: "who" }, who.join(" ")) : null,
    typeof one.action === "string" && one.action && one.action !== "none" ? h("span", { class: "tag" }, one.action) : null,
    lines.map((line) => h("div", { class: "evidence" }, String(line))),
  );
}

