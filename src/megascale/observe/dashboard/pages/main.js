// The frame of all views: which runs, which view, how the runs do at this moment.

import * as address from "./address.js";
import { recallTheme, toggleTheme } from "./colours.js";
import { fill, h } from "./dom.js";
import { whole } from "./format.js";
import { Refused, ask, follow, setReadToken, takeTokenFromAddress } from "./server.js";

/**
 * What a view is given. `ready` is called once its first answer is shown.
 * @typedef {{runs: string[], signal: AbortSignal, notice: (words: string) => void, ready: () => void}} Page
 */

/** Each view's name, key and module; a module is read when its view is first shown. */
const VIEWS = [
  { name: "overview", title: "Overview", key: "o", load: () => import("./overview.js") },
  { name: "heatmap", title: "Heat map", key: "h", load: () => import("./heat_map.js") },
  { name: "timeline", title: "Timeline", key: "t", load: () => import("./timeline.js") },
  { name: "grid", title: "Grid", key: "g", load: () => import("./grid.js") },
  { name: "nodes", title: "Nodes", key: "n", load: () => import("./nodes.js") },
  { name: "plan", title: "Plan", key: "p", load: () => import("./plan.js") },
];
/** The table of all runs, which is the front page of a folder of runs. */
const FLEET = { name: "fleet", title: "Runs", key: "r", load: () => import("./fleet.js") };
const MOST = 8;

recallTheme();
const top = /** @type {HTMLElement} */ (document.getElementById("top"));
const notices = /** @type {HTMLElement} */ (document.getElementById("notices"));
const place = /** @type {HTMLElement} */ (document.getElementById("view"));
const chip = h("span", { class: "chip", role: "status" });
/** @type {{runs: string[], place: string, single: boolean, version: string}} */
let known = { runs: [], place: "", single: false, version: "" };
let leaving = new AbortController();

function views() {
  return known.single ? VIEWS : [FLEET, ...VIEWS];
}

/** @param {string} words */
function notice(words) {
  if ([...notices.children].some((each) => each.firstChild?.textContent === words)) return;
  const made = h("p", {}, h("span", {}, words), h("button", { type: "button", "aria-label": "close this notice", onclick: () => made.remove() }, "×"));
  notices.append(made);
  while (notices.children.length > 3) notices.firstElementChild?.remove();
}

function chosen() {
  const asked = address.runs().slice(0, MOST);
  return asked.length ? asked : known.runs.slice(0, 1);
}

/** @param {string[]} runs @param {string} current */
function header(runs, current) {
  const picked = new Set(runs);
  const picker = h(
    "details",
    { class: "picker" },
    h("summary", {}, h("span", { class: "unseen" }, "Runs: "), runs.length ? runs[0] : "no run", runs.length > 1 ? ` +${runs.length - 1}` : ""),
    h(
      "div",
      { class: "menu" },
      h("p", { class: "quiet" }, known.single ? "this server shows one run folder" : `runs in ${known.place}; select several to compare them`),
      known.runs.slice(0, 300).map((run) =>
        h("div", { class: "row" },
          h("input", { type: "checkbox", "aria-label": `show ${run}`, checked: picked.has(run), onchange: (/** @type {Event} */ event) => {
            if (/** @type {HTMLInputElement} */ (event.target).checked) picked.add(run);
            else picked.delete(run);
            if (picked.size) address.go(address.link("overview", [...picked].slice(0, MOST)));
          } }),
          h("a", { href: address.link(current, [run]), onclick: follows }, run))),
    ),
  );
  fill(
    top,
    h("a", { class: "brand", href: known.single ? address.link("overview", runs) : address.link("fleet", []), onclick: follows }, "MegaScale"),
    current === FLEET.name ? null : picker,
    h("nav", { "aria-label": "views" }, views().map((view) =>
      h("a", { href: address.link(view.name, runs), onclick: follows, "aria-current": view.name === current ? "page" : null, "aria-keyshortcuts": view.key }, view.title))),
    chip,
    h("button", { class: "plain", type: "button", title: "dark or light (key: d)", "aria-label": "switch between dark and light", onclick: toggleTheme }, "◐"),
    h("button", { class: "plain keys", type: "button", title: "keys (key: ?)", "aria-label": "show keys", onclick: showKeys }, "?"),
  );
}

/** The runs that this server does not have, after a second look. @param {string[]} runs @returns {Promise<string[]>} */
async function findUnknown(runs) {
  const missing = () => runs.filter((run) => !known.runs.includes(run));
  if (missing().length) known = await ask("runs").catch(() => known);
  return missing();
}

/** @param {string[]} names */
function unknownRun(names) {
  return h("section", { class: "panel teach", "aria-label": "unknown run" },
    h("h1", {}, `There is no run ${names.join(", ")} in ${known.place}`),
    h("p", {}, "The address names a run that has been removed or renamed, or that another server shows."),
    known.runs.length ? [h("p", {}, "Runs here:"), h("ul", { class: "plainlist" }, known.runs.slice(0, 20).map((run) => h("li", {}, h("a", { href: address.link("overview", [run]), onclick: follows }, run))))] : null,
    known.runs.length > 20 ? h("p", {}, h("a", { href: address.link("fleet", []), onclick: follows }, `All ${known.runs.length} runs`)) : null);
}

/** @param {MouseEvent} event */
function follows(event) {
  if (event.metaKey || event.ctrlKey || event.shiftKey || event.button !== 0) return;
  event.preventDefault();
  address.go(/** @type {HTMLAnchorElement} */ (event.currentTarget).href);
}

function showKeys() {
  const dialog = h(
    "dialog",
    { "aria-label": "keys", onclose: () => dialog.remove() },
    h("h2", {}, "Keys"),
    h("dl", {},
      views().map((view) => [h("dt", {}, h("kbd", {}, view.key)), h("dd", {}, view.title)]).flat(),
      h("dt", {}, h("kbd", {}, "d")), h("dd", {}, "switch between dark and light"),
      h("dt", {}, h("kbd", {}, "← → ↑ ↓")), h("dd", {}, "move in the focused drawing"),
      h("dt", {}, h("kbd", {}, "+ −")), h("dd", {}, "zoom in and out"),
      h("dt", {}, h("kbd", {}, "Enter")), h("dd", {}, "open the selected item"),
      h("dt", {}, h("kbd", {}, "Esc")), h("dd", {}, "show the whole drawing, or close")),
    h("form", { method: "dialog" }, h("button", {}, "Close")),
  );
  document.body.append(dialog);
  dialog.showModal();
}

/** @param {string} run @param {any} now */
function showNow(run, now) {
  chip.className = `chip ${now.alive ? "alive" : ""}`;
  fill(chip, h("i", { "aria-hidden": "true" }, now.alive ? "●" : "○"), ` ${now.phase}, step ${whole(now.step)}`);
  document.title = `${run}: ${now.phase} – MegaScale`;
}

async function render() {
  leaving.abort();
  leaving = new AbortController();
  const { signal } = leaving;
  const name = address.view() || (address.runs().length ? VIEWS[0].name : FLEET.name);
  const isFleet = name === FLEET.name && !known.single;
  const current = VIEWS.find((view) => view.name === name) ?? VIEWS[0];
  const runs = chosen();
  const unknown = isFleet ? [] : await findUnknown(runs);
  if (signal.aborted) return;
  header(runs, isFleet ? FLEET.name : current.name);
  if (!runs.length) {
    fill(place, h("p", { class: "panel teach" }, `No run in ${known.place} yet. A run appears here with its first start, such as `, h("code", {}, "megascale train examples/stdlib.toml"), `, if train.runs names this folder.`));
    return;
  }
  if (unknown.length) {
    fill(chip);
    document.title = `${unknown[0]}: unknown – MegaScale`;
    fill(place, unknownRun(unknown));
    place.dataset.ready = "unknown";
    return;
  }
  fill(place, h("p", { class: "quiet" }, "Loading…"));
  delete place.dataset.ready;
  const ready = () => {
    if (!signal.aborted) place.dataset.ready = String(Math.round(performance.now()));
  };
  try {
    if (isFleet) {
      const { show } = await FLEET.load();
      fill(chip);
      document.title = "Runs – MegaScale";
      if (!signal.aborted) show(place, { signal, notice, ready, follows });
      return;
    }
    const module = await current.load();
    if (signal.aborted) return;
    const hears = module.show(place, { runs, signal, notice, ready });
    void follow(runs, (told) => {
      if (told.pulse.error) notice(`${told.run}: ${told.pulse.error}`);
      else if (told.run === runs[0]) showNow(told.run, told.pulse.now);
      hears(told);
    }, (open) => {
      if (!open && !signal.aborted) {
        chip.className = "chip off";
        fill(chip, "no connection to the dashboard's server");
      }
    }, signal);
  } catch (error) {
    if (!signal.aborted) fill(place, h("p", { class: "note" }, `This view cannot be shown: ${/** @type {Error} */ (error).message}`));
  }
}

function askToken() {
  const field = h("input", { type: "password", required: true, autocomplete: "off", "aria-label": "token" });
  fill(place, h("form", { class: "panel token", onsubmit: (/** @type {Event} */ event) => {
    event.preventDefault();
    setReadToken(field.value);
    void start();
  } }, h("h1", {}, "Token"), h("p", {}, "Open the link that the dashboard's command printed, or paste the token here. The token is the text of the file that the command named."), field, h("button", {}, "Continue")));
  field.focus();
}

async function start() {
  try {
    known = await ask("runs");
  } catch (error) {
    if (error instanceof Refused && error.status === 401) askToken();
    else fill(place, h("p", { class: "note" }, `The dashboard's server does not answer: ${/** @type {Error} */ (error).message}`));
    return;
  }
  await render();
}

window.addEventListener("popstate", () => void render());
document.addEventListener("keydown", (event) => {
  const at = /** @type {HTMLElement} */ (event.target);
  if (event.ctrlKey || event.metaKey || event.altKey || at.closest("input, select, textarea, dialog")) return;
  const view = views().find((each) => each.key === event.key);
  if (view) address.go(address.link(view.name, chosen()));
  else if (event.key === "d") toggleTheme();
  else if (event.key === "?") showKeys();
});
document.addEventListener("click", (event) => {
  const menu = top.querySelector("details[open]");
  if (menu && !menu.contains(/** @type {Node} */ (event.target))) menu.removeAttribute("open");
});
takeTokenFromAddress();
void start();
