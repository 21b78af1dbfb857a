// The address holds the view and all that was chosen in it: a link shows the same to whoever follows it.

/** The view, or nothing at the server's front page. @returns {string} */
export function view() {
  return location.pathname.slice(1);
}

export function runs() {
  return new URLSearchParams(location.search).getAll("run");
}

/** @param {string} name @param {string} [without] */
export function get(name, without = "") {
  return new URLSearchParams(location.search).get(name) ?? without;
}

/** @param {string} name @returns {number | null} */
export function number(name) {
  const text = get(name);
  const value = Number(text);
  return text !== "" && Number.isFinite(value) ? value : null;
}

/**
 * An address.
 * @param {string} to a view
 * @param {string[]} ofRuns
 * @param {Record<string, string | number | null | undefined>} [more]
 */
export function link(to, ofRuns, more = {}) {
  const words = new URLSearchParams(ofRuns.map((run) => ["run", run]));
  for (const [name, value] of Object.entries(more)) {
    if (value !== null && value !== undefined && value !== "") words.set(name, String(value));
  }
  const text = words.toString();
  return `/${to}${text ? `?${text}` : ""}`;
}

/**
 * Put choices of this view into the address; null and "" take them out. No new entry in the browser's history.
 * @param {Record<string, string | number | null | undefined>} changed
 */
export function set(changed) {
  const words = new URLSearchParams(location.search);
  for (const [name, value] of Object.entries(changed)) {
    if (value === null || value === undefined || value === "") words.delete(name);
    else words.set(name, String(value));
  }
  const text = words.toString();
  history.replaceState(null, "", `${location.pathname}${text ? `?${text}` : ""}`);
}

/** Go to another address of this page. @param {string} to */
export function go(to) {
  history.pushState(null, "", to);
  window.dispatchEvent(new PopStateEvent("popstate"));
}
