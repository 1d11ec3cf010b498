// Masks of pixels for the labelling tool. A mask is {x, y, w, h, bits}: a byte for each pixel of its box.
// Run lengths are COCO's: column by column, zeros first, each count less the one before the last, five bits a character.
window.runs = (() => {
  function cropped(bits, width, height) {
    let left = width, top = height, right = -1, bottom = -1;
    for (let y = 0, at = 0; y < height; y++)
      for (let x = 0; x < width; x++, at++)
        if (bits[at]) {
          if (x < left) left = x;
          if (x > right) right = x;
          if (y < top) top = y;
          bottom = y;
        }
    if (right < 0) return null;
    const w = right + 1 - left, h = bottom + 1 - top, out = new Uint8Array(w * h);
    for (let y = 0; y < h; y++) {
      const from = (top + y) * width + left;
      out.set(bits.subarray(from, from + w), y * w);
    }
    return { x: left, y: top, w, h, bits: out };
  }

  function each(mask, visit) { // of every pixel that is inside: its column and row
    for (let y = 0, at = 0; y < mask.h; y++)
      for (let x = 0; x < mask.w; x++, at++) if (mask.bits[at]) visit(mask.x + x, mask.y + y);
  }

  function full(mask, width, height) {
    const bits = new Uint8Array(width * height);
    each(mask, (x, y) => { bits[y * width + x] = 1; });
    return bits;
  }

  // The pixels whose middle lies in an outline [[x, y], …].
  function filled(points, width, height) {
    const bits = new Uint8Array(width * height);
    for (let row = 0; row < height; row++) {
      const y = row + 0.5, crossed = [];
      points.forEach(([x0, y0], i) => {
        const [x1, y1] = points[(i + 1) % points.length];
        if (y0 <= y !== y1 <= y) crossed.push(x0 + ((y - y0) / (y1 - y0)) * (x1 - x0));
      });
      crossed.sort((a, b) => a - b);
      for (let i = 0; i + 1 < crossed.length; i += 2) {
        const from = Math.max(0, Math.ceil(crossed[i] - 0.5)), to = Math.min(width, Math.ceil(crossed[i + 1] - 0.5));
        if (to > from) bits.fill(1, row * width + from, row * width + to);
      }
    }
    return cropped(bits, width, height);
  }

  // The pixels whose middle is at most `radius` from the line between two places, and those at its ends.
  function stroke(bits, width, height, [x0, y0], [x1, y1], radius) {
    const dx = x1 - x0, dy = y1 - y0, long = dx * dx + dy * dy;
    const [left, right] = [Math.min(x0, x1), Math.max(x0, x1)].map(Math.floor);
    const [top, bottom] = [Math.min(y0, y1), Math.max(y0, y1)].map(Math.floor);
    const far = Math.ceil(radius) + 1;
    for (const [x, y] of [[x0, y0], [x1, y1]])
      bits[Math.min(height - 1, Math.floor(y)) * width + Math.min(width - 1, Math.floor(x))] = 1;
    for (let y = Math.max(0, top - far); y <= Math.min(height - 1, bottom + far); y++)
      for (let x = Math.max(0, left - far); x <= Math.min(width - 1, right + far); x++) {
        const px = x + 0.5 - x0, py = y + 0.5 - y0;
        const along = long ? Math.min(1, Math.max(0, (px * dx + py * dy) / long)) : 0;
        if (Math.hypot(px - along * dx, py - along * dy) <= radius) bits[y * width + x] = 1;
      }
  }

  function written(mask, width, height) {
    const counts = [];
    let end = 0, inside = false;
    const turn = (place) => { counts.push(place - end); end = place; inside = !inside; };
    for (let x = 0; x < mask.w; x++)
      for (let y = 0; y <= mask.h; y++) {
        const place = (mask.x + x) * height + mask.y + y;
        const set = y < mask.h && mask.bits[y * mask.w + x] === 1;
        if (y === mask.h && mask.h === height && x + 1 < mask.w) continue; // the next column goes on at once
        if (set !== inside) turn(place);
      }
    if (end < width * height) counts.push(width * height - end);
    return counts.map((count, i) => characters(i > 2 ? count - counts[i - 2] : count)).join("");
  }
  function characters(value) {
    let out = "", more = true;
    while (more) {
      const low = value & 31;
      value >>= 5;
      more = value !== (low & 16 ? -1 : 0);
      out += String.fromCharCode((low | (more ? 32 : 0)) + 48);
    }
    return out;
  }

  function read(text, width, height) {
    const counts = [];
    for (let at = 0; at < text.length; ) {
      let value = 0, bit = 0, code;
      do {
        code = text.charCodeAt(at++) - 48;
        value |= (code & 31) << bit;
        bit += 5;
      } while (code & 32);
      if (code & 16 && bit < 32) value |= -1 << bit;
      counts.push(counts.length > 2 ? value + counts[counts.length - 2] : value);
    }
    const bits = new Uint8Array(width * height);
    let place = 0;
    counts.forEach((count, i) => {
      if (i % 2) for (let p = place; p < place + count; p++) bits[(p % height) * width + Math.floor(p / height)] = 1;
      place += count;
    });
    return cropped(bits, width, height);
  }

  return { cropped, each, filled, full, read, stroke, written };
})();
