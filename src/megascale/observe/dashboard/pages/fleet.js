// All runs of the folder: how each does, filtered and sorted.

import * as address from "./address.js";
import { choice, fill, h } from "./dom.js";
import { ago, moment, percent, short, whole } from "./format.js";
import { ask } from "./server.js";

/** Milliseconds between two looks, and while effective times are being measured. */
const PERIOD = 5000;
const MEASURING_PERIOD = 500;
/** Phases of a run that ended as it should, or by request. */
const ENDED = ["done", "interrupted"];

/** @typedef {Record<string, any>} Row */

/** @type {{name: string, text: string, figure: boolean, order: (row: Row) => any}[]} */
const COLUMNS = [
  { name: "name", text: "run", figure: false, order: (row) => row.name },
  { name: "state", text: "state", figure: false, order: (row) => groupOf(row) + row.phase },
  { name: "step", text: "step", figure: true, order: (row) => row.step },
  { name: "progress", text: "progress", figure: true, order: (row) => row.step / row.steps },
  { name: "loss", text: "loss", figure: true, order: (row) => row.loss },
  { name: "mfu", text: "MFU", figure: true, order: (row) => row.mfu },
  { name: "speed", text: "tokens/s", figure: true, order: (row) => row.tokens_per_second },
  { name: "effective", text: "effective time", figure: true, order: (row) => row.effective },
  { name: "event", text: "last event", figure: false, order: (row) => row.event_time },
];

/** The group by which the choice of states filters. @param {Row} row */
function groupOf(row) {
  if (row.alive) return "running";
  return ENDED.includes(row.phase) ? "ended" : "attention";
}

/**
 * @param {HTMLElement} place
 * @param {{signal: AbortSignal, notice: (words: string) => void, ready: () => void, follows: (event: MouseEvent) => void}} page
 */
export function show(place, page) {
  const { signal } = page;
  /** @type {Row[]} */
  let rows = [];
  let unmeasured = 0;
  let group = address.get("state", "all");
  let sorted = address.get("sort", "event");
  let descending = address.get("order", "down") === "down";
  const count = h("span", { class: "hint", role: "status" });
  const text = h("input", { type: "search", placeholder: "name, state or event", "aria-label": "filter runs", value: address.get("filter"), oninput: () => {
    address.set({ filter: text.value });
    draw();
  } });
  const state = choice("State", [
    { value: "all", text: "all" }, { value: "running", text: "running" },
    { value: "attention", text: "failed or silent" }, { value: "ended", text: "done or interrupted" },
  ], group, (value) => {
    group = value;
    address.set({ state: value === "all" ? null : value });
    draw();
  });
  const head = h("tr");
  const body = h("tbody");
  const list = h("div", { class: "scroll fleet", tabindex: 0, role: "region", "aria-label": "list of runs" },
    h("table", {}, h("caption", { class: "unseen" }, "Runs"), h("thead", {}, head), body));
  const tiles = h("div", { class: "tiles" });
  fill(place, h("h1", { class: "unseen" }, "Runs"), tiles, h("div", { class: "bar" }, text, state, count), h("section", { class: "panel", "aria-label": "runs" }, list));

  function drawHead() {
    fill(head, COLUMNS.map((column) => {
      const isSorted = column.name === sorted;
      const order = descending ? "descending" : "ascending";
      return h("th", { scope: "col", class: column.figure ? "figure" : "", "aria-sort": isSorted ? order : null },
        h("button", { type: "button", class: "plain small", onclick: () => {
          descending = isSorted ? !descending : column.name !== "name";
          sorted = column.name;
          address.set({ sort: sorted, order: descending ? "down" : "up" });
          drawHead();
          draw();
          /** @type {HTMLElement | null} */ (head.querySelector("[aria-sort] button"))?.focus();
        } }, column.text, isSorted ? (descending ? " ↓" : " ↑") : ""));
    }));
  }

  function drawTiles() {
    /** @type {Record<string, number>} */
    const counts = { running: 0, attention: 0, ended: 0 };
    rows.forEach((row) => { counts[groupOf(row)] += 1; });
    const speed = rows.reduce((sum, row) => sum + (row.alive && row.tokens_per_second ? row.tokens_per_second : 0), 0);
    fill(tiles, [["runs", whole(rows.length)], ["running", whole(counts.running)], ["failed or silent", whole(counts.attention)], ["done or interrupted", whole(counts.ended)], ["tokens/s of running", short(speed)]].map(([what, value]) =>
      h("div", { class: "tile" }, h("span", { class: "what" }, what), h("b", {}, value))));
  }

  function draw() {
    const word = text.value.trim().toLowerCase();
    const shown = rows.filter((row) => (group === "all" || groupOf(row) === group)
      && (!word || `${row.name} ${row.phase} ${row.why} ${row.event.replaceAll("_", " ")}`.toLowerCase().includes(word)));
    const column = COLUMNS.find((each) => each.name === sorted) ?? COLUMNS[COLUMNS.length - 1];
    const key = (/** @type {Row} */ row) => {
      const value = column.order(row);
      return value === null || value === undefined || Number.isNaN(value) ? null : value;
    };
    shown.sort((left, right) => {
      const [a, b] = [key(left), key(right)];
      if (a === null || b === null) return a === b ? 0 : a === null ? 1 : -1;
      const order = typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b;
      return descending ? -order : order;
    });
    const measuring = unmeasured ? `; effective time of ${unmeasured} follows` : "";
    fill(count, `${whole(shown.length)} of ${whole(rows.length)} runs${measuring}`);
    const focused = document.activeElement instanceof HTMLElement && body.contains(document.activeElement) ? document.activeElement.textContent : null;
    fill(body, shown.map(drawRow), shown.length ? null : h("tr", {}, h("td", { colspan: COLUMNS.length, class: "quiet" }, "No run matches.")));
    if (focused !== null) [...body.querySelectorAll("a")].find((link) => link.textContent === focused)?.focus();
  }

  /** @param {Row} row */
  function drawRow(row) {
    const kind = { running: "good", attention: "wrong", ended: "" }[groupOf(row)];
    const figure = (/** @type {string} */ words) => h("td", { class: "figure" }, words);
    return h("tr", {},
      h("td", {}, h("a", { href: address.link("overview", [row.name]), onclick: page.follows }, row.name)),
      h("td", {}, h("span", { class: `tag ${kind}`, title: row.why || null }, row.phase), row.attempt > 1 ? h("span", { class: "quiet" }, ` attempt ${row.attempt}`) : null),
      figure(whole(row.step)),
      figure(row.steps && row.step !== null ? percent(row.step / row.steps) : "–"),
      figure(short(row.loss)),
      figure(percent(row.mfu)),
      figure(short(row.tokens_per_second)),
      figure(percent(row.effective)),
      h("td", {}, row.event ? [row.event.replaceAll("_", " "), " ", h("span", { class: "quiet", title: `${moment(row.event_time)} UTC` }, row.event_time ? ago(row.event_time) : "")] : "–"));
  }

  async function read() {
    try {
      const answer = await ask("fleet", {}, signal);
      rows = answer.runs;
      unmeasured = answer.unmeasured;
      drawTiles();
      draw();
    } catch (error) {
      if (!signal.aborted) page.notice(/** @type {Error} */ (error).message);
    }
  }

  async function keepReading() {
    while (!signal.aborted) {
      if (!document.hidden) await read();
      page.ready();
      await new Promise((go) => setTimeout(go, unmeasured ? MEASURING_PERIOD : PERIOD));
    }
  }

  drawHead();
  void keepReading();
}
