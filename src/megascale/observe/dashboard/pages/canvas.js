// What every drawing shares: sharp pixels, one drawing a frame, and how long a frame took.

import { css } from "./colours.js";

/** Durations in ms of the last frames drawn, for `megascale bench dashboard`. @type {number[]} */
export const frames = [];
/** @type {any} */ (window).megascaleFrames = frames;

export class Drawing {
  /**
   * @param {HTMLCanvasElement} canvas fills its parent's width
   * @param {(context: CanvasRenderingContext2D, width: number, height: number) => void} draw
   */
  constructor(canvas, draw) {
    this.canvas = canvas;
    this.draw = draw;
    this.width = 0;
    this.height = 0;
    this.pending = false;
    const context = canvas.getContext("2d", { alpha: false });
    if (!context) throw new Error("this browser does not support canvas");
    this.context = context;
    this.watch = new ResizeObserver(() => this.later());
    this.watch.observe(canvas);
  }

  /** Draw in the next frame. */
  later() {
    if (this.pending) return;
    this.pending = true;
    requestAnimationFrame(() => {
      this.pending = false;
      if (this.canvas.isConnected) this.now();
    });
  }

  now() {
    const began = performance.now();
    const ratio = Math.min(2, devicePixelRatio || 1);
    const box = this.canvas.getBoundingClientRect();
    this.width = box.width;
    this.height = box.height;
    const wide = Math.max(1, Math.round(box.width * ratio));
    const high = Math.max(1, Math.round(box.height * ratio));
    if (this.canvas.width !== wide || this.canvas.height !== high) {
      this.canvas.width = wide;
      this.canvas.height = high;
    }
    // The last column of a width that is no whole number, too.
    this.context.setTransform(1, 0, 0, 1, 0, 0);
    this.context.fillStyle = css("panel");
    this.context.fillRect(0, 0, wide, high);
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.draw(this.context, box.width, box.height);
    frames.push(performance.now() - began);
    if (frames.length > 2000) frames.splice(0, 1000);
  }

  close() {
    this.watch.disconnect();
  }
}
