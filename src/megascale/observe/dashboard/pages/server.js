// Asks the server, with the token for reading where it wants one, and follows its live stream.

/** Kept for this tab, so that a reload does not ask again; never in an address that is sent, nor in a cookie. */
const KEPT = "megascale-read-token";
let readToken = sessionStorage.getItem(KEPT) ?? "";

export class Refused extends Error {
  /** @param {number} status @param {string} words */
  constructor(status, words) {
    super(words);
    this.status = status;
  }
}

/** @param {string} token */
export function setReadToken(token) {
  readToken = token.trim();
  sessionStorage.setItem(KEPT, readToken);
}

/** Take the token out of the address that the server's command printed: `#token=...`, which browsers do not send. */
export function takeTokenFromAddress() {
  const token = new URLSearchParams(location.hash.slice(1)).get("token");
  if (token === null) return;
  setReadToken(token);
  history.replaceState(null, "", location.pathname + location.search);
}

/** @param {Record<string, string>} [more] */
function headers(more = {}) {
  return readToken ? { Authorization: `Bearer ${readToken}`, ...more } : more;
}

/** @param {Response} answer */
async function checked(answer) {
  if (answer.ok) return answer;
  let words = `HTTP ${answer.status}`;
  try {
    const told = await answer.json();
    words = typeof told.detail === "string" ? told.detail : JSON.stringify(told.detail);
  } catch {
    // no JSON: the status says it
  }
  throw new Refused(answer.status, words);
}

/**
 * @param {string} path such as overview
 * @param {Record<string, string | number | string[] | null | undefined>} question
 * @param {AbortSignal} [signal]
 * @returns {Promise<any>}
 */
export async function ask(path, question = {}, signal) {
  const words = new URLSearchParams();
  for (const [name, value] of Object.entries(question)) {
    if (Array.isArray(value)) value.forEach((each) => words.append(name, each));
    else if (value !== null && value !== undefined && value !== "") words.set(name, String(value));
  }
  const answer = await fetch(`/api/${path}?${words}`, { headers: headers(), signal });
  return (await checked(answer)).json();
}

/**
 * Hand an order to a run's driver.
 * @param {string} token the run's acting token
 * @param {{run: string, action: string, node?: string, why: string}} order
 */
export async function act(token, order) {
  const answer = await fetch("/api/act", {
    method: "POST",
    headers: { Authorization: `Bearer ${token.trim()}`, "Content-Type": "application/json" },
    body: JSON.stringify(order),
  });
  return (await checked(answer)).json();
}

/**
 * Follow runs until the signal aborts; comes back by itself when the server was away.
 * @param {string[]} runs
 * @param {(told: {run: string, pulse: any}) => void} heard
 * @param {(open: boolean) => void} state
 * @param {AbortSignal} signal
 */
export async function follow(runs, heard, state, signal) {
  let wait = 500;
  while (!signal.aborted) {
    try {
      const words = new URLSearchParams(runs.map((run) => ["run", run]));
      const answer = await checked(await fetch(`/api/live?${words}`, { headers: headers(), signal }));
      if (!answer.body) throw new Error("no stream");
      state(true);
      wait = 500;
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done) break;
        const parts = (rest + value).split("\n\n");
        rest = parts.pop() ?? "";
        for (const part of parts) {
          const data = part.split("\n").find((line) => line.startsWith("data: "));
          if (data) heard(JSON.parse(data.slice(6)));
        }
      }
    } catch {
      if (signal.aborted) return;
    }
    state(false);
    await new Promise((go) => setTimeout(go, wait));
    wait = Math.min(10_000, wait * 2);
  }
}
