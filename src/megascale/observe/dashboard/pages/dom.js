// Elements without markup: every string becomes text, so nothing of a run can become a part of the page.

/** @typedef {Node | string | number | null | undefined | false} Child */

/**
 * An element. Properties: `class`, `on...` listeners, everything else an attribute (false and null: none).
 * @template {keyof HTMLElementTagNameMap} T
 * @param {T} tag
 * @param {Record<string, any>} [properties]
 * @param {...(Child | Child[])} children
 * @returns {HTMLElementTagNameMap[T]}
 */
export function h(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on") && typeof value === "function") made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : String(value));
  }
  add(made, ...children);
  return made;
}

/**
 * @param {Element} to
 * @param {...(Child | Child[])} children
 */
export function add(to, ...children) {
  for (const child of children.flat()) {
    if (child === null || child === undefined || child === false) continue;
    to.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

/**
 * Replace all that an element holds.
 * @param {Element} to
 * @param {...(Child | Child[])} children
 */
export function fill(to, ...children) {
  to.replaceChildren();
  add(to, ...children);
}

/**
 * What a view without spans needs, for the message of a server that has none of a run; else null.
 * @param {string} run @param {string} view @param {string} message
 */
export function teachSpans(run, view, message) {
  if (!message.includes("holds no spans")) return null;
  return h("section", { class: "panel teach", "aria-label": "what this view needs" },
    h("h2", {}, `The ${view} needs spans`),
    h("p", {}, "Each rank records timings of every step, and all its spans every 100 steps. They appear after the first steps of a run with ", h("code", {}, "observe.timers=true"), ", which is the default."),
    h("ul", { class: "plainlist" },
      h("li", {}, h("code", {}, "--observe.spans=20"), " records spans more often."),
      h("li", {}, h("code", {}, `megascale spans ${run}`), " lists the recorded steps."),
      h("li", {}, "The overview shows losses, speed and events without spans.")));
}

/**
 * A labelled choice.
 * @param {string} label
 * @param {{value: string, text: string}[]} options
 * @param {string} chosen
 * @param {(value: string) => void} changed
 */
export function choice(label, options, chosen, changed) {
  const select = h("select", { "aria-label": label, onchange: () => changed(select.value) });
  for (const option of options) {
    select.append(h("option", { value: option.value, selected: option.value === chosen }, option.text));
  }
  return h("label", { class: "field" }, h("span", {}, label), select);
}

/**
 * A table with a caption that only readers of the page hear.
 * @param {string} caption
 * @param {string[]} heads
 * @param {(Child | Child[])[][]} rows
 * @param {string} [kind] class
 */
export function table(caption, heads, rows, kind = "") {
  return h(
    "table",
    { class: kind },
    h("caption", { class: "unseen" }, caption),
    h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col" }, head)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell) => h("td", {}, ...(Array.isArray(cell) ? cell : [cell])))))),
  );
}
