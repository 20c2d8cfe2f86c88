// Two images in one frame with a slider between them: pan, zoom, swipe. Squares of 512 pixels are fetched as needed.

const SQUARE = 512;
const MOST_SQUARES = 160;
const FACTORS = [1, 2, 4, 8, 16, 32, 64, 128, 256];

export class SwipeMap {
  constructor({ canvas, handle, onPoint, onBroken }) {
    this.canvas = canvas;
    this.handle = handle;
    this.onPoint = onPoint;
    this.onBroken = onBroken;
    this.context = canvas.getContext("2d");
    this.grid = null;
    this.layers = { left: [], right: [] };
    this.background = null; // drawn under the image
    this.split = 0.5;
    this.scale = 1; // screen pixels (CSS) per image pixel
    this.x = 0; // image coordinates of the frame's upper left corner
    this.y = 0;
    this.squares = new Map();
    this.waiting = false;
    this.fitted = true;
    this.pointers = new Map();
    new ResizeObserver(() => this.resize()).observe(canvas);
    this.listen();
  }

  show(grid) {
    this.grid = grid;
    this.squares.clear();
    this.fit();
  }

  // left, right: the layers of each side, the lowest first; a layer is a function (factor, column, row) -> URL
  setLayers(left, right) {
    this.layers = { left, right };
    this.draw();
  }

  get size() {
    return [this.canvas.clientWidth, this.canvas.clientHeight];
  }

  resize() {
    const ratio = window.devicePixelRatio || 1;
    const [width, height] = this.size;
    this.canvas.width = Math.max(1, Math.round(width * ratio));
    this.canvas.height = Math.max(1, Math.round(height * ratio));
    if (this.fitted) this.fit();
    else this.draw();
  }

  fit() {
    if (!this.grid) return;
    const [width, height] = this.size;
    this.scale = Math.max(1e-4, Math.min(width / this.grid.width, height / this.grid.height));
    this.x = (this.grid.width - width / this.scale) / 2;
    this.y = (this.grid.height - height / this.scale) / 2;
    this.fitted = true;
    this.draw();
  }

  zoom(by, px, py) {
    if (!this.grid) return;
    const [width, height] = this.size;
    px ??= width / 2;
    py ??= height / 2;
    const least = Math.min(width / this.grid.width, height / this.grid.height) / 4;
    const scale = Math.min(40, Math.max(least, this.scale * by));
    this.x += px / this.scale - px / scale;
    this.y += py / this.scale - py / scale;
    this.scale = scale;
    this.fitted = false;
    this.draw();
  }

  pan(dx, dy) {
    if (!this.grid) return;
    const [width, height] = this.size;
    const keep = 40; // pixels of the image that stay in the frame
    this.x = Math.min(this.grid.width - keep / this.scale, Math.max((keep - width) / this.scale, this.x - dx / this.scale));
    this.y = Math.min(this.grid.height - keep / this.scale, Math.max((keep - height) / this.scale, this.y - dy / this.scale));
    this.fitted = false;
    this.draw();
  }

  setSplit(share) {
    this.split = Math.min(1, Math.max(0, share));
    this.handle.style.left = `${this.split * 100}%`;
    const percent = Math.round(this.split * 100);
    this.handle.setAttribute("aria-valuenow", percent);
    this.handle.setAttribute("aria-valuetext", `${percent} percent shows the left image`);
    this.draw();
  }

  // The image pixel at a point of the frame, or null outside the image.
  pixel(px, py) {
    if (!this.grid) return null;
    const column = Math.floor(this.x + px / this.scale);
    const row = Math.floor(this.y + py / this.scale);
    const inside = column >= 0 && row >= 0 && column < this.grid.width && row < this.grid.height;
    return inside ? { column, row } : null;
  }

  draw() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      this.paint();
    });
  }

  paint() {
    const { context, canvas, grid } = this;
    const ratio = window.devicePixelRatio || 1;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    const [width, height] = this.size;
    context.clearRect(0, 0, width, height);
    if (!grid) return;
    context.imageSmoothingEnabled = true;
    this.background?.paint(context, { x: this.x, y: this.y, scale: this.scale, width, height });
    context.imageSmoothingEnabled = this.scale < 1.5;
    const edge = this.split * width;
    for (const address of this.layers.left) this.paintSide(address, 0, edge, height);
    for (const address of this.layers.right) this.paintSide(address, edge, width, height);
    this.paintScale(width, height);
    canvas.dataset.drawn = String(Number(canvas.dataset.drawn || 0) + 1);
  }

  paintSide(address, from, to, height) {
    if (to <= from) return;
    const { context } = this;
    context.save();
    context.beginPath();
    context.rect(from, 0, to - from, height);
    context.clip();
    const ratio = window.devicePixelRatio || 1;
    const wanted = 1 / (this.scale * ratio);
    let level = 0;
    while (level + 1 < FACTORS.length && FACTORS[level + 1] <= wanted * 1.01) level += 1;
    // Loaded coarser squares are drawn first, so that nothing flickers while the fine ones load.
    for (let coarse = FACTORS.length - 1; coarse > level; coarse -= 1) this.paintLevel(address, FACTORS[coarse], from, to, height, false);
    this.paintLevel(address, FACTORS[level], from, to, height, true);
    context.restore();
  }

  paintLevel(address, factor, from, to, height, fetch) {
    const { context, grid, scale } = this;
    const step = SQUARE * factor;
    const first = Math.max(0, Math.floor((this.x + from / scale) / step));
    const last = Math.min(Math.ceil(grid.width / step) - 1, Math.floor((this.x + to / scale) / step));
    const top = Math.max(0, Math.floor(this.y / step));
    const bottom = Math.min(Math.ceil(grid.height / step) - 1, Math.floor((this.y + height / scale) / step));
    for (let row = top; row <= bottom; row += 1) {
      for (let column = first; column <= last; column += 1) {
        const image = this.square(address(factor, column, row), fetch);
        if (!image) continue;
        const left = (column * step - this.x) * scale;
        const up = (row * step - this.y) * scale;
        context.drawImage(image, left, up, image.naturalWidth * factor * scale, image.naturalHeight * factor * scale);
      }
    }
  }

  square(address, fetch) {
    const known = this.squares.get(address);
    if (known) {
      this.squares.delete(address);
      this.squares.set(address, known);
      return known.ready ? known.image : null;
    }
    if (!fetch) return null;
    const entry = { image: new Image(), ready: false };
    entry.image.onload = () => {
      entry.ready = true;
      this.draw();
    };
    entry.image.onerror = () => this.onBroken(address);
    entry.image.src = address;
    this.squares.set(address, entry);
    while (this.squares.size > MOST_SQUARES) this.squares.delete(this.squares.keys().next().value);
    return null;
  }

  // Map coordinates along two edges, and a scale bar of a round length.
  paintScale(width, height) {
    const { context, grid, scale } = this;
    const [a, b, c, d, e, f] = grid.transform;
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "alphabetic";
    const put = (text, x, y, align) => {
      context.textAlign = align;
      context.lineWidth = 3;
      context.strokeStyle = "#000b";
      context.strokeText(text, x, y);
      context.fillStyle = "#fff";
      context.fillText(text, x, y);
    };
    if (grid.crs && b === 0 && d === 0) {
      const step = round(110 / scale * Math.abs(a));
      const digits = grid.degrees ? Math.max(0, 1 - Math.floor(Math.log10(step))) : 0;
      const x0 = a * this.x + c, x1 = a * (this.x + width / scale) + c;
      for (let x = Math.ceil(Math.min(x0, x1) / step) * step; x <= Math.max(x0, x1); x += step) {
        const at = ((x - c) / a - this.x) * scale;
        line(context, at, height, at, height - 6);
        if (at > 40 && at < width - 40) put(label(x, digits, grid.degrees, "E"), at, height - 10, "center");
      }
      const y0 = e * this.y + f, y1 = e * (this.y + height / scale) + f;
      for (let y = Math.ceil(Math.min(y0, y1) / step) * step; y <= Math.max(y0, y1); y += step) {
        const at = ((y - f) / e - this.y) * scale;
        line(context, 0, at, 6, at);
        if (at > 50 && at < height - 30) put(label(y, digits, grid.degrees, "N"), 10, at + 4, "left");
      }
    }
    if (grid.crs && !grid.degrees) {
      const metres = round(100 / scale * Math.abs(a));
      const long = metres / Math.abs(a) * scale;
      context.fillStyle = "#000b";
      context.fillRect(9, height - 35, long + 2, 6);
      context.fillStyle = "#fff";
      context.fillRect(10, height - 34, long, 4);
      put(metres >= 1000 ? `${metres / 1000} km` : `${metres} m`, 10 + long + 6, height - 28, "left");
    }
  }

  listen() {
    const { canvas, handle } = this;
    const where = (event) => {
      const box = canvas.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      this.pointers.set(event.pointerId, where(event));
    });
    canvas.addEventListener("pointermove", (event) => {
      const [px, py] = where(event);
      const before = this.pointers.get(event.pointerId);
      if (before) {
        const others = [...this.pointers].filter(([id]) => id !== event.pointerId);
        if (others.length === 1) {
          const [ox, oy] = others[0][1];
          const far = Math.hypot(before[0] - ox, before[1] - oy);
          if (far > 5) this.zoom(Math.hypot(px - ox, py - oy) / far, (px + ox) / 2, (py + oy) / 2);
          this.pan((px - before[0]) / 2, (py - before[1]) / 2);
        } else {
          this.pan(px - before[0], py - before[1]);
        }
        this.pointers.set(event.pointerId, [px, py]);
      }
      this.onPoint(this.pixel(px, py));
    });
    for (const kind of ["pointerup", "pointercancel"]) {
      canvas.addEventListener(kind, (event) => this.pointers.delete(event.pointerId));
    }
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      this.zoom(Math.exp(-event.deltaY * (event.deltaMode ? 0.05 : 0.0015)), ...where(event));
    }, { passive: false });
    canvas.addEventListener("dblclick", (event) => this.zoom(2, ...where(event)));
    canvas.addEventListener("keydown", (event) => {
      const step = event.shiftKey ? 200 : 50;
      const keys = {
        ArrowLeft: () => this.pan(step, 0), ArrowRight: () => this.pan(-step, 0),
        ArrowUp: () => this.pan(0, step), ArrowDown: () => this.pan(0, -step),
        "+": () => this.zoom(1.5), "=": () => this.zoom(1.5), "-": () => this.zoom(1 / 1.5),
        0: () => this.fit(), "[": () => this.setSplit(this.split - 0.05), "]": () => this.setSplit(this.split + 0.05),
      };
      if (!keys[event.key] || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      keys[event.key]();
      const [width, height] = this.size;
      this.onPoint(this.pixel(width / 2, height / 2), true);
    });
    const drag = (event) => {
      const box = canvas.getBoundingClientRect();
      this.setSplit((event.clientX - box.left) / box.width);
    };
    handle.addEventListener("pointerdown", (event) => {
      event.preventDefault();
      handle.focus();
      handle.setPointerCapture(event.pointerId);
      const end = () => {
        handle.removeEventListener("pointermove", drag);
      };
      handle.addEventListener("pointermove", drag);
      handle.addEventListener("pointerup", end, { once: true });
      handle.addEventListener("pointercancel", end, { once: true });
    });
    // The handle covers part of the image; values are shown there too.
    handle.addEventListener("pointermove", (event) => this.onPoint(this.pixel(...where(event))));
    handle.addEventListener("keydown", (event) => {
      const step = event.shiftKey ? 0.1 : 0.02;
      const to = { ArrowLeft: this.split - step, ArrowDown: this.split - step, ArrowRight: this.split + step, ArrowUp: this.split + step, Home: 0, End: 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      this.setSplit(to);
    });
  }
}

function line(context, x0, y0, x1, y1) {
  context.strokeStyle = "#fff";
  context.lineWidth = 1.5;
  context.beginPath();
  context.moveTo(x0, y0);
  context.lineTo(x1, y1);
  context.stroke();
}

function label(value, digits, degrees, side) {
  return degrees ? `${value.toFixed(digits)}°` : `${Math.round(value)} ${side}`;
}

// The nearest of 1, 2, 5 times a power of ten.
function round(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  const part = value / power;
  return power * (part < 1.5 ? 1 : part < 3.5 ? 2 : part < 7.5 ? 5 : 10);
}
