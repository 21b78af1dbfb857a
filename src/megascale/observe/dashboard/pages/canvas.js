// What all drawings share: sharp pixels, one drawing per frame, the duration of a frame, and drags by a pointer.

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

/**
 * Return the handlers of a pointer over a canvas. A press that moves less than 4 pixels is a click, else a drag.
 * @param {{
 *   hover: (x: number, y: number) => void,
 *   drag: (dx: number, dy: number) => void,
 *   click: (x: number, y: number) => void,
 *   drop?: () => void,
 * }} on
 */
export function followPointer(on) {
  /** @type {{x: number, y: number, moved: boolean} | null} */
  let held = null;
  return {
    onpointerdown: (/** @type {PointerEvent} */ event) => {
      /** @type {Element} */ (event.currentTarget).setPointerCapture(event.pointerId);
      held = { x: event.offsetX, y: event.offsetY, moved: false };
    },
    onpointermove: (/** @type {PointerEvent} */ event) => {
      if (!held) {
        on.hover(event.offsetX, event.offsetY);
        return;
      }
      const [dx, dy] = [event.offsetX - held.x, event.offsetY - held.y];
      if (!held.moved && Math.hypot(dx, dy) < 4) return;
      held = { x: event.offsetX, y: event.offsetY, moved: true };
      on.drag(dx, dy);
    },
    onpointerup: (/** @type {PointerEvent} */ event) => {
      const isClick = held && !held.moved;
      held = null;
      if (isClick) on.click(event.offsetX, event.offsetY);
      else on.drop?.();
    },
    // The browser takes the pointer, for example to scroll. No pointerup follows.
    onpointercancel: () => {
      const isDrag = held?.moved;
      held = null;
      if (isDrag) on.drop?.();
    },
  };
}
