// Optional background map under the scene: tiles of OpenStreetMap, warped to the scene's pixels. Missing tiles are left
// blank. The content security policy of the server allows images of this host only.

const TILES = "https://tile.openstreetmap.org";
const SIZE = 256;
const DEEPEST = 19;
const MOST_SHOWN = 90;
const MOST_KEPT = 300;
const STILL_MS = 200; // tiles are requested when the view has not moved for this long
const WORLD = 20037508.342789244;

export class Background {
  constructor({ onChange, onCredit }) {
    this.onChange = onChange;
    this.onCredit = onCredit;
    this.fit = null;
    this.tiles = new Map();
    this.timer = 0;
    this.last = "";
    this.ready = false;
    addEventListener("online", () => {
      this.forget();
      this.onChange();
    });
  }

  // fit: the server's polynomial from Web Mercator to pixels; null turns the map off.
  turn(fit) {
    this.fit = fit;
    this.forget();
    if (!fit) this.onCredit(false);
    this.onChange();
  }

  // A tile that failed to load is requested again only after the connection returns or the map is turned on again.
  forget() {
    for (const [name, tile] of this.tiles) if (tile.failed) this.tiles.delete(name);
  }

  // Column and row of a point of the rectangle; u and v run from -1 to 1.
  at(u, v) {
    const { degree, columns, rows } = this.fit;
    let column = 0, row = 0, k = 0, power = 1;
    for (let i = 0; i <= degree; i += 1) {
      let term = power;
      for (let j = 0; j <= degree - i; j += 1) {
        column += columns[k] * term;
        row += rows[k] * term;
        term *= v;
        k += 1;
      }
      power *= u;
    }
    return [column, row];
  }

  // Derivatives (column by u, column by v, row by u, row by v).
  slope(u, v) {
    const h = 1e-4;
    const [c1, r1] = this.at(u + h, v), [c0, r0] = this.at(u - h, v);
    const [c3, r3] = this.at(u, v + h), [c2, r2] = this.at(u, v - h);
    return [(c1 - c0) / (2 * h), (c3 - c2) / (2 * h), (r1 - r0) / (2 * h), (r3 - r2) / (2 * h)];
  }

  // The point of the rectangle at a column and row, by Newton iteration, clamped to the rectangle.
  invert(column, row) {
    let u = 0, v = 0;
    for (let step = 0; step < 8; step += 1) {
      const [c, r] = this.at(u, v);
      const [cu, cv, ru, rv] = this.slope(u, v);
      const scale = cu * rv - cv * ru;
      u = Math.max(-1, Math.min(1, u + (rv * (column - c) - cv * (row - r)) / scale));
      v = Math.max(-1, Math.min(1, v + (cu * (row - r) - ru * (column - c)) / scale));
    }
    return [u, v];
  }

  // view: x, y (column and row at the frame's upper left corner), scale (screen pixels per image pixel), width, height.
  paint(context, view) {
    if (!this.fit) return;
    const key = [view.x, view.y, view.scale, view.width, view.height].join();
    if (key !== this.last) {
      this.last = key;
      this.ready = false;
      clearTimeout(this.timer);
      this.timer = setTimeout(() => {
        this.ready = true;
        this.onChange();
      }, STILL_MS);
    }
    const { zoom, west, east, north, south } = this.range(view);
    let seen = false;
    for (let row = north; row <= south; row += 1) {
      for (let column = west; column <= east; column += 1) seen = this.paintTile(context, view, zoom, column, row) || seen;
    }
    this.onCredit(seen);
  }

  // The visible tiles: the zoom level at which a tile pixel is about a screen pixel, and the range of tile numbers.
  range(view) {
    const { centre, half } = this.fit;
    const right = view.x + view.width / view.scale, below = view.y + view.height / view.scale;
    const points = [];
    for (let i = 0; i <= 4; i += 1) {
      const column = view.x + (right - view.x) * i / 4, row = view.y + (below - view.y) * i / 4;
      points.push(this.invert(column, view.y), this.invert(column, below), this.invert(view.x, row), this.invert(right, row));
    }
    const us = points.map(([u]) => u), vs = points.map(([, v]) => v);
    const [cu, , ru] = this.slope((Math.min(...us) + Math.max(...us)) / 2, (Math.min(...vs) + Math.max(...vs)) / 2);
    const perMetre = Math.hypot(cu, ru) / half[0] * view.scale;
    let zoom = Math.max(0, Math.min(DEEPEST, Math.round(Math.log2(2 * WORLD * perMetre / SIZE))));
    for (;; zoom -= 1) {
      const count = 2 ** zoom;
      const number = (metres) => Math.floor((metres + WORLD) / (2 * WORLD) * count);
      const west = number(centre[0] + half[0] * Math.min(...us)), east = number(centre[0] + half[0] * Math.max(...us));
      const north = Math.max(0, number(-centre[1] - half[1] * Math.max(...vs)));
      const south = Math.min(count - 1, number(-centre[1] - half[1] * Math.min(...vs)));
      if (zoom === 0 || (east - west + 1) * (south - north + 1) <= MOST_SHOWN) return { zoom, west, east, north, south };
    }
  }

  paintTile(context, view, zoom, column, row) {
    const count = 2 ** zoom;
    const found = this.find(zoom, ((column % count) + count) % count, row);
    if (!found) return false;
    const { centre, half } = this.fit;
    const width = 2 * WORLD / count;
    // A part of the tile (0 to 1 along each side) on the screen.
    const place = (s, t) => {
      const u = (-WORLD + (column + s) * width - centre[0]) / half[0];
      const v = (WORLD - (row + t) * width - centre[1]) / half[1];
      const [c, r] = this.at(u, v);
      return [(c - view.x) * view.scale, (r - view.y) * view.scale];
    };
    // Drawn in one affine piece, or in as many as keep the error in the middle of each below a quarter of a screen pixel.
    const corners = [place(0, 0), place(1, 0), place(0, 1), place(1, 1)];
    const middle = place(0.5, 0.5);
    const off = Math.hypot(...[0, 1].map((axis) => corners.reduce((sum, point) => sum + point[axis], 0) / 4 - middle[axis]));
    const pieces = Math.max(1, Math.min(8, Math.ceil(Math.sqrt(off / 0.25))));
    for (let i = 0; i < pieces; i += 1) {
      for (let j = 0; j < pieces; j += 1) {
        const [x0, y0] = place(i / pieces, j / pieces);
        const [x1, y1] = place((i + 1) / pieces, j / pieces);
        const [x2, y2] = place(i / pieces, (j + 1) / pieces);
        const lap = 0.4 / Math.max(1, Math.hypot(x1 - x0, y1 - y0)); // neighbours overlap slightly, against dark seams
        const part = found.size / pieces;
        context.save();
        context.transform(x1 - x0, y1 - y0, x2 - x0, y2 - y0, x0, y0);
        context.drawImage(found.image, found.left + i * part, found.top + j * part, part, part, -lap, -lap, 1 + 2 * lap, 1 + 2 * lap);
        context.restore();
      }
    }
    return true;
  }

  // The tile, or the part of a loaded coarser one; missing tiles are requested once the view rests.
  find(zoom, column, row) {
    for (let up = 0; up <= Math.min(zoom, 5); up += 1) {
      const size = SIZE / 2 ** up;
      const tile = this.tile(zoom - up, column >> up, row >> up, up === 0);
      if (tile) return { image: tile, size, left: (column % 2 ** up) * size, top: (row % 2 ** up) * size };
    }
    return null;
  }

  tile(zoom, column, row, fetch) {
    const name = `${zoom}/${column}/${row}`;
    const known = this.tiles.get(name);
    if (known) {
      this.tiles.delete(name);
      this.tiles.set(name, known);
      return known.ready ? known.image : null;
    }
    if (!fetch || !this.ready || navigator.onLine === false) return null;
    const tile = { image: new Image(), ready: false, failed: false };
    tile.image.crossOrigin = "anonymous"; // without cookies, and the canvas stays readable
    tile.image.referrerPolicy = "origin"; // required by the usage policy of the tile server
    tile.image.onload = () => {
      tile.ready = true;
      this.onChange();
    };
    tile.image.onerror = () => { tile.failed = true; };
    tile.image.src = `${TILES}/${name}.png`;
    this.tiles.set(name, tile);
    while (this.tiles.size > MOST_KEPT) this.tiles.delete(this.tiles.keys().next().value);
    return null;
  }
}
