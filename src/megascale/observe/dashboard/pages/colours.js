// Colours that people of every colour vision tell apart, and what the theme says.

// Okabe and Ito's, darker for light backgrounds and lighter for dark ones; each run has a dash of its own, too.
const LIGHT = ["#0067a5", "#b34700", "#007a5a", "#a3447f", "#8a6000", "#2c7fa8", "#4b4b4b", "#7a3fb0"];
const DARK = ["#56b4e9", "#ff9d57", "#2fd1a5", "#f2a3d0", "#f0c24b", "#9ad1f5", "#d0d0d0", "#c9a2f2"];
export const DASHES = [[], [7, 3], [2, 3], [9, 3, 2, 3], [12, 4], [4, 2], [1, 2], [6, 2, 2, 2]];

// Cividis (Nuñez, Anderton and Renslow 2018), every sixteenth colour.
const CIVIDIS = [
  [0, 34, 78], [0, 42, 97], [5, 50, 112], [33, 59, 110], [52, 69, 108], [67, 78, 108], [81, 87, 109], [93, 97, 111],
  [106, 107, 113], [119, 117, 117], [133, 127, 120], [147, 138, 119], [162, 149, 116], [177, 161, 111], [193, 173, 104],
  [210, 187, 92], [228, 200, 76], [255, 234, 70],
];

const darkness = matchMedia("(prefers-color-scheme: dark)");

export function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : darkness.matches;
}

/** @param {() => void} changed */
export function onTheme(changed) {
  darkness.addEventListener("change", changed);
  document.addEventListener("theme", changed);
}

export function toggleTheme() {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  try {
    localStorage.setItem("theme", document.documentElement.dataset.theme);
  } catch {
    // a browser that keeps nothing
  }
  document.dispatchEvent(new Event("theme"));
}

export function recallTheme() {
  try {
    const kept = localStorage.getItem("theme");
    if (kept === "dark" || kept === "light") document.documentElement.dataset.theme = kept;
  } catch {
    // as above
  }
}

/** @param {number} index of a run */
export function runColour(index) {
  const colours = isDark() ? DARK : LIGHT;
  return colours[index % colours.length];
}

/** A colour of the style sheet. @param {string} name */
export function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** Of the scale from 0 to 1. @param {number} share @returns {string} */
export function scale(share) {
  const at = Math.max(0, Math.min(1, share)) * (CIVIDIS.length - 1);
  const low = Math.min(CIVIDIS.length - 2, Math.floor(at));
  const mixed = CIVIDIS[low].map((part, i) => Math.round(part + (CIVIDIS[low + 1][i] - part) * (at - low)));
  return `rgb(${mixed[0]},${mixed[1]},${mixed[2]})`;
}

/** 256 steps of the scale, for drawing many. */
export const SCALE = Array.from({ length: 256 }, (_, i) => scale(i / 255));

/** Black or white, whichever is read on that colour of the scale. @param {number} share */
export function inkOn(share) {
  return share > 0.5 ? "#000" : "#fff";
}

/** A colour of ours (rgb() or #rrggbb) as a pixel of image data. @param {string} colour @returns {number[]} */
export function parts(colour) {
  if (colour.startsWith("#")) return [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  return (colour.match(/[\d.]+/g) ?? ["0", "0", "0"]).slice(0, 3).map(Number);
}

/** Of `share` of one colour over another, as a pixel. @param {number[]} over @param {number[]} under @param {number} share */
export function pixel(over, under, share) {
  const [r, g, b] = over.map((part, i) => Math.round(part * share + under[i] * (1 - share)));
  return ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
}
