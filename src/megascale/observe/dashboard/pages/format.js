// Numbers for people.

/** @param {number | null | undefined} value @param {number} [digits] */
export function short(value, digits = 4) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e15)) return value.toExponential(2);
  for (const [unit, scale] of /** @type {[string, number][]} */ ([["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e4]])) {
    if (size >= scale) return `${plain(value / (unit === "k" ? 1e3 : scale), digits)}${unit}`;
  }
  return plain(value, digits);
}

/** @param {number} value @param {number} digits */
function plain(value, digits) {
  if (Number.isInteger(value)) return String(value);
  return String(Number(value.toPrecision(digits)));
}

/** A whole number, such as a step, with all of its digits. @param {number | null | undefined} value */
export function whole(value) {
  return value === null || value === undefined || !Number.isFinite(value) ? "–" : Math.round(value).toLocaleString("en");
}

/** @param {number | null | undefined} seconds */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  const size = Math.abs(seconds);
  if (size === 0) return "0 s";
  if (size < 1e-3) return `${plain(seconds * 1e6, 3)} µs`;
  if (size < 1) return `${plain(seconds * 1e3, 4)} ms`;
  if (size < 120) return `${plain(seconds, 4)} s`;
  const minutes = Math.floor(size / 60);
  if (minutes < 120) return `${minutes} min ${Math.round(size % 60)} s`;
  const hours = Math.floor(minutes / 60);
  return hours < 72 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

/** @param {number | null | undefined} count */
export function bytes(count) {
  if (count === null || count === undefined || !Number.isFinite(count)) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let at = 0;
  let left = count;
  while (Math.abs(left) >= 1024 && at < units.length - 1) {
    left /= 1024;
    at += 1;
  }
  return `${plain(left, 4)} ${units[at]}`;
}

/** @param {number | null | undefined} share */
export function percent(share) {
  return share === null || share === undefined || !Number.isFinite(share) ? "–" : `${(100 * share).toFixed(1).replace(/^-(0\.0)$/, "$1")}%`;
}

/** @param {number | null | undefined} value @param {string} unit */
export function inUnit(value, unit) {
  if (unit === "s") return duration(value);
  if (unit === "bytes") return bytes(value);
  if (unit === "%") return percent(value);
  return unit ? `${short(value)} ${unit}` : short(value);
}

/** A time as text, UTC. @param {number | null | undefined} seconds since 1970 */
export function moment(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  const date = new Date(seconds * 1000);
  return Number.isNaN(date.getTime()) ? "–" : date.toISOString().replace("T", " ").slice(0, 19);
}

/** How long ago. @param {number} seconds since 1970 */
export function ago(seconds) {
  const since = Date.now() / 1000 - seconds;
  return since < 0 ? "now" : since < 1.5 ? "now" : `${duration(Math.round(since))} ago`;
}

/**
 * Round values for an axis.
 * @param {number} low @param {number} high @param {number} count
 */
export function ticks(low, high, count) {
  const span = high - low;
  if (!(span > 0)) return [low];
  const raw = span / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= raw) ?? raw;
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) {
    found.push(Math.abs(at) < step * 1e-9 ? 0 : at);
  }
  return found;
}
