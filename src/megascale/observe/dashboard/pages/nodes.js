// The job's nodes: how each does, what happened to it, and what a person may do about it.

import { fill, h, table } from "./dom.js";
import { bytes, duration, moment, whole } from "./format.js";
import { act, ask } from "./server.js";
import * as address from "./address.js";

/** Milliseconds after which the nodes are asked for again though nothing was told of the run. */
const UNTOLD = 3000;
/** What an order does, said before it is given. @type {Record<string, (node: string, ranks: number[]) => string>} */
const SAYS = {
  cordon: (node) => `${node} gets nothing new; what it runs goes on.`,
  uncordon: (node) => `${node} may be used again.`,
  evict: (node, ranks) => (ranks.length ? `The job saves and stops, ${node} is removed, and its rank${ranks.length > 1 ? "s" : ""} ${ranks.join(", ")} start${ranks.length > 1 ? "" : "s"} again on a spare or a new node. Training continues from that checkpoint.` : `${node} runs no rank; it is removed and not used until it is uncordoned.`),
  pause: () => "The job saves and stops; its nodes stay ready until it is resumed.",
  resume: () => "The job continues from its last checkpoint.",
  restart: () => "The job saves and stops; code is imported anew and the trainers start again from that checkpoint.",
};
const TITLES = { cordon: "Cordon", uncordon: "Uncordon", evict: "Evict", pause: "Pause", resume: "Resume", restart: "Restart" };
/** The acting token of each run, for as long as this page is open. @type {Map<string, string>} */
const tokens = new Map();

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
  let chosen = address.get("node");
  const notes = h("div", { class: "notes" });
  const job = h("section", { class: "panel jobbar", "aria-label": "job" });
  const list = h("section", { class: "panel", "aria-label": "nodes" });
  const side = h("div", { class: "side" });
  fill(place, h("h1", { class: "unseen" }, `Nodes of ${run}`), notes, job, h("div", { class: "split" }, list, side));

  async function read() {
    try {
      found = await ask("nodes", { run }, signal);
    } catch (error) {
      if (!signal.aborted) {
        const { message } = /** @type {Error} */ (error);
        const teaching = message.includes("megascale launch")
          ? h("section", { class: "panel teach", "aria-label": "what this view needs" },
              h("h2", {}, "Nodes belong to launched jobs"),
              h("p", {}, "A driver watches the nodes of a job, replaces those that fail and accepts orders here: cordon, evict, pause, restart."),
              h("p", {}, h("code", {}, "megascale launch FILE --nodes 4 --spares 1"), " starts one on this machine; ", h("code", {}, "--cluster slurm"), " or ", h("code", {}, "--cluster kubernetes"), " on a cluster."))
          : null;
        fill(notes, h("p", { class: "note" }, message), teaching);
        job.hidden = list.hidden = true;
      }
      return;
    }
    fill(notes, found.driver ? null : h("p", { class: "note" }, `${found.driver_error || "No driver is running"}: the journal's last state is shown, and orders are not possible.`));
    showJob();
    showList();
    showNode();
  }

  /** @param {string} action @param {string} [node] @param {boolean} [possible] */
  function button(action, node = "", possible = true) {
    return h("button", { type: "button", class: action === "evict" ? "danger" : "", disabled: !found.driver || !possible, onclick: () => confirm(action, node) }, TITLES[/** @type {keyof typeof TITLES} */ (action)]);
  }

  function showJob() {
    const one = found.job;
    if (!one) return;
    fill(
      job,
      h("div", {}, h("b", {}, one.phase), h("span", { class: "quiet" }, `  attempt ${one.attempt}, step ${whole(one.step)}, ${one.world} ranks on ${one.nodes.length} nodes, data parallelism ${one.data}`), h("div", { class: "quiet" }, one.why)),
      h("div", { class: "row" }, button("pause", "", ["running", "degraded", "starting"].includes(one.phase)), button("resume", "", one.phase === "paused"), button("restart", "", ["running", "degraded"].includes(one.phase))),
    );
  }

  function showList() {
    const nodes = [...found.nodes].sort((a, b) => (a.ranks[0] ?? 1e9) - (b.ranks[0] ?? 1e9) || a.name.localeCompare(b.name, "en", { numeric: true }));
    const rows = nodes.slice(0, 3000).map((node) => {
      const doing = [...new Set(node.workers.map((/** @type {any} */ w) => `${w.phase || w.state} ${w.step}`))].join(", ");
      const wrong = node.state !== "up";
      return h("tr", { class: node.name === chosen ? "chosen" : "" },
        h("td", {}, h("button", { type: "button", class: "plain link", "aria-pressed": String(node.name === chosen), onclick: () => {
          chosen = node.name;
          address.set({ node: chosen });
          showList();
          showNode();
        } }, node.name)),
        h("td", {}, h("span", { class: `tag ${wrong ? "wrong" : "good"}` }, node.state), node.cordoned ? [" ", h("span", { class: "tag" }, "cordoned")] : null),
        h("td", {}, ranksText(node.ranks)),
        h("td", {}, doing || (node.ranks.length ? "" : node.state === "up" ? "spare" : "")),
        h("td", {}, node.seen === null ? "–" : `${duration(node.seen)} ago`),
        h("td", {}, node.checks));
    });
    const focused = document.activeElement instanceof HTMLElement && list.contains(document.activeElement) ? document.activeElement.textContent : null;
    const before = list.querySelector(".scroll")?.scrollTop ?? 0;
    fill(list, h("h2", {}, `${nodes.length} node${nodes.length === 1 ? "" : "s"}`), h("div", { class: "scroll tall", tabindex: 0, role: "region", "aria-label": "list of nodes" },
      h("table", {}, h("caption", { class: "unseen" }, "Nodes"), h("thead", {}, h("tr", {}, ["node", "state", "ranks", "doing", "heartbeat", "self-checks"].map((head) => h("th", { scope: "col" }, head)))), h("tbody", {}, rows))));
    const scroll = list.querySelector(".scroll");
    if (scroll) scroll.scrollTop = before;
    if (focused !== null) [...list.querySelectorAll("button")].find((each) => each.textContent === focused)?.focus();
  }

  function showNode() {
    const node = found.nodes.find((/** @type {any} */ each) => each.name === chosen);
    if (!node) {
      fill(side, h("section", { class: "panel" }, h("p", { class: "quiet" }, "Select a node to see its ranks, facts, history and actions.")));
      return;
    }
    const facts = flat(node.facts);
    fill(
      side,
      h("section", { class: "panel", "aria-label": `node ${node.name}` },
        h("h2", {}, node.name),
        h("dl", {}, h("dt", {}, "state"), h("dd", {}, node.state), h("dt", {}, "why"), h("dd", {}, node.why || "–"), h("dt", {}, "address"), h("dd", {}, node.address || "–")),
        h("div", { class: "row" }, node.cordoned || node.state === "evicted" ? button("uncordon", node.name) : button("cordon", node.name), button("evict", node.name, node.state !== "evicted"))),
      node.workers.length ? h("section", { class: "panel", "aria-label": "ranks" }, h("h2", {}, "Ranks"),
        table("ranks of the node", ["rank", "does", "step", "memory"], node.workers.map((/** @type {any} */ w) => [h("a", { href: address.link("heatmap", [run], { rank: w.rank }) }, String(w.rank)), w.phase || w.state, String(w.step), bytes(w.rss)]), "figures")) : null,
      h("section", { class: "panel", "aria-label": "history" }, h("h2", {}, "History"),
        node.history.length ? h("ol", { class: "events" }, node.history.map((/** @type {any} */ one) => h("li", {}, h("time", {}, moment(one.time).slice(5)), h("span", { class: "kind" }, one.kind.replaceAll("_", " ")), one.action && one.action !== "none" ? h("span", { class: "tag" }, one.action) : null, one.evidence.map((/** @type {string} */ line) => h("div", { class: "evidence" }, line))))) : h("p", { class: "quiet" }, "Nothing happened to it.")),
      facts.length ? h("section", { class: "panel", "aria-label": "machine" }, h("h2", {}, "Machine"), h("dl", {}, facts.map(([key, value]) => [h("dt", {}, key), h("dd", {}, value)]).flat())) : null,
    );
  }

  /** Say what will happen, then do it. @param {string} action @param {string} node */
  function confirm(action, node) {
    const ranks = found.nodes.find((/** @type {any} */ each) => each.name === node)?.ranks ?? [];
    const why = h("input", { type: "text", maxlength: 500, placeholder: "reason for the journal", "aria-label": "why" });
    const token = h("input", { type: "password", autocomplete: "off", required: true, "aria-label": "acting token", value: tokens.get(run) ?? "" });
    const said = h("p", { class: "note", role: "alert", hidden: true });
    const go = h("button", { class: action === "evict" ? "danger" : "main" }, `${TITLES[/** @type {keyof typeof TITLES} */ (action)]} ${node || run}`);
    const dialog = h(
      "dialog",
      { "aria-label": `${action} ${node || run}`, onclose: () => dialog.remove() },
      h("h2", {}, `${TITLES[/** @type {keyof typeof TITLES} */ (action)]} ${node || `the job ${run}`}?`),
      h("p", {}, SAYS[action](node, ranks)),
      h("form", { onsubmit: async (/** @type {Event} */ event) => {
        event.preventDefault();
        go.disabled = true;
        try {
          const answer = await act(token.value, { run, action, node, why: why.value.trim() || "requested on the dashboard" });
          tokens.set(run, token.value);
          dialog.close();
          page.notice(`${action} ${node || run}: done; the job is ${answer.phase}`);
          void read();
        } catch (error) {
          said.hidden = false;
          fill(said, /** @type {Error} */ (error).message);
          go.disabled = false;
        }
      } },
        h("label", { class: "field" }, h("span", {}, "Why"), why),
        h("label", { class: "field" }, h("span", {}, `Acting token: the text of ${run}/driver/token.act; kept until this page is closed`), token),
        said,
        h("div", { class: "row" }, h("button", { type: "button", onclick: () => dialog.close() }, "Cancel"), go)),
    );
    document.body.append(dialog);
    dialog.showModal();
    (token.value ? why : token).focus();
  }

  let timer = 0;
  let last = 0;
  let told = false;

  /** @param {number} milliseconds */
  function readIn(milliseconds) {
    clearTimeout(timer);
    timer = window.setTimeout(async () => {
      told = false;
      last = Date.now();
      await read();
      // Also when nothing is told: the answer may be older than what was told, and heartbeats grow old.
      if (!told && !signal.aborted) readIn(UNTOLD);
    }, milliseconds);
  }

  signal.addEventListener("abort", () => clearTimeout(timer));
  void read().then(page.ready);
  return () => {
    // Heartbeats change all the time: once in two seconds is enough for people.
    if (told || signal.aborted) return;
    told = true;
    readIn(Math.max(0, 2000 - (Date.now() - last)));
  };
}

/** @param {number[]} ranks */
function ranksText(ranks) {
  if (!ranks.length) return "–";
  const [first, last] = [ranks[0], ranks[ranks.length - 1]];
  return ranks.length > 2 && last - first === ranks.length - 1 ? `${first}–${last}` : ranks.join(" ");
}

/** Facts in facts as one list. @param {Record<string, any>} facts @param {string} [before] @returns {[string, string][]} */
function flat(facts, before = "") {
  return Object.entries(facts ?? {}).flatMap(([key, value]) =>
    value && typeof value === "object" && !Array.isArray(value) ? flat(value, `${before}${key} `) : [/** @type {[string, string]} */ ([`${before}${key}`.replaceAll("_", " "), String(value)])]).slice(0, 60);
}
