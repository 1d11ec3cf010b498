// Masks over a picture, drawn with a mouse, a finger or the keyboard.
// A thing is {label, points: [[x, y], …]}, an outline, or {label, mask}, pixels that a brush has painted; later things lie
// over earlier ones. One with `proposed` is a network's and counts when it is accepted. Things are never changed, but
// replaced, so that a list of them is a state that undoing can come back to. Where `ground` is null, each is an instance:
// they are `apart`, each with an edge, a name and perhaps `crowd`, and the smallest are shown above the others.
window.masking = (() => {
  const { ARROWS, COLORS, limit, next } = editing;
  const NO_CLASS = 255; // pixels from which nothing is learned
  const TOOLS = { v: "Choose", a: "Outline", b: "Brush", e: "Eraser" };
  const SAME = 0.5; // overlap from which a proposal says what is drawn already
  const SPECK = 6; // pixels on the screen within which a click means a point

  // The color that pictures of classified pixels have (`taught` of tasks/segmentation/answers.py).
  function hued(label) {
    const sixth = Math.floor((label * 137.5) % 180) / 30;
    const part = (n) => 255 - 220 * limit(Math.min((n + sixth) % 6, 4 - ((n + sixth) % 6)), 1);
    return "#" + [5, 3, 1].map((n) => Math.round(part(n)).toString(16).padStart(2, "0")).join("");
  }

  function tool(frame, { content, ground }) {
    const { svg, select, width, height, classes } = frame;
    const apart = ground === null;
    let things = [], chosen = -1, point = -1; // the chosen thing, and the chosen point of its outline
    let using = "a", radius = Math.max(1, Math.round(Math.max(width, height) / 40));
    let outline = [], stroke = null, drag = null, hover = null;
    let cursor = [width / 2, height / 2]; // of the keyboard
    const fills = new WeakMap(); // the pixels of outlines that were drawn before
    const owner = new Int32Array(width * height); // the thing that each pixel shows, or -1
    const canvas = Object.assign(document.createElement("canvas"), { width, height });
    svg.before(canvas);
    if (!apart) select.append(new Option("no class", NO_CLASS));
    select.value = !apart && classes.length > 1 ? 1 : 0;

    select.addEventListener("change", () => relabel(Number(select.value)));
    const tools = Object.entries(TOOLS).map(([key, name]) => [key, frame.button(name, () => use(key))]);
    const size = Object.assign(document.createElement("input"), { type: "range", min: 1, max: Math.ceil(Math.max(width, height) / 4) });
    size.setAttribute("aria-label", "Width of the brush");
    size.addEventListener("input", () => widen(Number(size.value) / 2));
    frame.bar.append(size);
    for (const [name, act] of [["Close", close], ["Accept", accept], ["Accept all", acceptAll], ["Delete", remove]]) frame.button(name, act);
    if (apart) for (const [name, act] of [["Crowd", crowd], ["Take from others", takeFromOthers]]) frame.button(name, act);

    const thing = (label, mask) => ({ label, mask });
    const sizes = new WeakMap(); // pixels of masks that were counted before
    function pixelsOf(mask) {
      if (!sizes.has(mask)) sizes.set(mask, mask.bits.reduce((sum, bit) => sum + bit, 0));
      return sizes.get(mask);
    }
    function maskOf({ mask, points }) {
      if (mask) return mask;
      if (!fills.has(points)) fills.set(points, runs.filled(points, width, height));
      return fills.get(points);
    }
    const isSure = (one) => !one.proposed;

    // --- what is saved: an outline as numbers, pixels as run lengths ------------------------
    function plain() {
      return things.filter(isSure).map(({ label, points, mask, crowd = 0 }) => ({
        label, ...(points ? { polygon: points.flat() } : { rle: runs.written(mask, width, height) }), ...(apart ? { crowd } : {}),
      }));
    }
    function parsed({ label, polygon, rle, crowd }) {
      if (!polygon) return { label, mask: runs.read(rle, width, height), crowd };
      return { label, crowd, points: Array.from({ length: polygon.length / 2 }, (_, i) => polygon.slice(2 * i, 2 * i + 2)) };
    }
    function from(list) {
      things = list.map(parsed).filter((one) => one.points || one.mask);
      chosen = point = -1;
    }
    function propose(found) {
      const sure = things.filter(isSure);
      const isThere = (one) => sure.some((each) => each.label === one.label && overlap(maskOf(each), maskOf(one)) >= SAME);
      const made = found.map((one) => ({ ...parsed(one), proposed: true }));
      const fresh = apart ? made.filter((one) => !isThere(one)) : made;
      if (fresh.length || sure.length < things.length) set([...sure, ...fresh], -1);
    }
    function overlap(one, other) {
      if (!one || !other || !meets(one, other)) return 0;
      const all = runs.full(one, width, height);
      let common = 0;
      runs.each(other, (x, y) => { common += all[y * width + x]; });
      return common / (pixelsOf(one) + pixelsOf(other) - common);
    }

    // --- changes: each can be undone ------------------------------------------------------
    function set(next, choice = chosen, of = -1) {
      frame.keep();
      [things, chosen, point] = [next, Math.min(choice, next.length - 1), of];
      draw();
    }
    const replaced = (index, made) => things.toSpliced(index, 1, ...(made ? [made] : []));

    function relabel(label) {
      if (chosen >= 0) set(replaced(chosen, { ...things[chosen], label }));
      else draw();
    }
    function remove() {
      if (chosen < 0) return;
      const points = things[chosen].points;
      if (point < 0 || points.length <= 3) return set(replaced(chosen, null), -1);
      set(replaced(chosen, { ...things[chosen], points: points.toSpliced(point, 1) }), chosen, Math.min(point, points.length - 2));
    }
    function accept() {
      if (things[chosen]?.proposed) set(replaced(chosen, { ...things[chosen], proposed: false }));
    }
    function acceptAll() {
      set(things.map((one) => ({ ...one, proposed: false })), -1);
    }
    function close() {
      if (outline.length < 3) return;
      const made = { label: Number(select.value), points: outline };
      if (apart && !maskOf(made)) return void (frame.state.textContent = "an outline without a pixel in it");
      outline = [];
      set([...things, made], things.length);
    }
    // A stroke of the brush goes into the chosen thing, or is a new one; one of the eraser takes from it, or from all.
    function paint({ bits, erases }) {
      const made = runs.cropped(bits, width, height);
      if (!made) return;
      if (!erases && chosen < 0) return set([...things, thing(Number(select.value), made)], things.length);
      const kept = [];
      let choice = chosen;
      things.forEach((one, index) => {
        const meant = chosen < 0 ? isSure(one) : index === chosen;
        const left = meant ? painted(one, made, !erases) : one;
        if (left) kept.push(left);
        else choice = -1;
      });
      if (!erases && choice >= 0) choice = kept.push(...kept.splice(choice, 1)) - 1; // above all: what is painted is seen
      set(kept, choice);
    }
    // A thing with the pixels of a mask, or without them; itself where that changes nothing, null where none are left.
    function painted(one, made, adds) {
      const mask = maskOf(one);
      if (!mask || (!adds && !meets(mask, made))) return one;
      const all = runs.full(mask, width, height);
      let changes = false;
      runs.each(made, (x, y) => {
        const at = y * width + x, value = adds ? 1 : 0;
        if (all[at] !== value) changes = true;
        all[at] = value;
      });
      if (!changes) return one; // an outline stays one
      const left = runs.cropped(all, width, height);
      return left && { label: one.label, mask: left, proposed: one.proposed, crowd: one.crowd };
    }
    function crowd() {
      if (apart && chosen >= 0) set(replaced(chosen, { ...things[chosen], crowd: things[chosen].crowd ? 0 : 1 }));
    }
    function takeFromOthers() { // what the chosen thing covers
      const mine = apart && things[chosen] ? maskOf(things[chosen]) : null;
      if (!mine) return;
      const left = things.map((one, index) => (index === chosen || !isSure(one) ? one : painted(one, mine, false)));
      set(left.filter(Boolean), left.slice(0, chosen).filter(Boolean).length);
    }
    const meets = (a, b) => a.x < b.x + b.w && b.x < a.x + a.w && a.y < b.y + b.h && b.y < a.y + a.h;

    function use(key) {
      using = key;
      if (key !== "a") outline = [];
      if (key === "a") chosen = point = -1;
      draw();
    }
    function widen(to) {
      radius = Math.min(Math.max(width, height) / 8, Math.max(0.5, to));
      draw();
    }

    // --- moving ---------------------------------------------------------------------------
    function movedBy(one, dx, dy, of) {
      const bound = ([x, y]) => [limit(x, width), limit(y, height)];
      if (of >= 0) return { ...one, points: one.points.map(([x, y], i) => (i === of ? bound([x + dx, y + dy]) : [x, y])) };
      if (one.mask) {
        const { mask } = one, [x, y] = [Math.round(mask.x + dx), Math.round(mask.y + dy)];
        return { ...one, mask: { ...mask, x: Math.min(width - mask.w, Math.max(0, x)), y: Math.min(height - mask.h, Math.max(0, y)) } };
      }
      const xs = one.points.map((p) => p[0]), ys = one.points.map((p) => p[1]);
      const right = Math.min(width - Math.max(...xs), Math.max(-Math.min(...xs), dx));
      const down = Math.min(height - Math.max(...ys), Math.max(-Math.min(...ys), dy));
      return { ...one, points: one.points.map(([x, y]) => [x + right, y + down]) };
    }

    // --- the mouse and the finger -----------------------------------------------------------
    const near = (a, b) => Math.hypot(a[0] - b[0], a[1] - b[1]) * (svg.getBoundingClientRect().width / width) <= SPECK;
    const pixel = ([x, y]) => Math.min(height - 1, Math.floor(y)) * width + Math.min(width - 1, Math.floor(x));

    svg.addEventListener("pointerdown", (event) => {
      event.preventDefault();
      svg.focus();
      svg.setPointerCapture(event.pointerId);
      const place = frame.place(event);
      cursor = place;
      if (using === "a") add(place);
      else if (using === "v") grasp(event, place);
      else begin(place);
    });
    svg.addEventListener("pointermove", (event) => {
      hover = frame.place(event);
      if (stroke) go(hover);
      else if (drag) pull(hover);
      else if (using !== "v") draw();
    });
    const release = () => {
      if (stroke) end();
      drag = null;
      draw();
    };
    svg.addEventListener("pointerup", release);
    svg.addEventListener("pointercancel", release);
    svg.addEventListener("pointerleave", () => { hover = null; draw(); });
    svg.addEventListener("dblclick", close);

    function add(place) {
      if (outline.length > 2 && near(place, outline[0])) return close();
      if (outline.length && near(place, outline.at(-1))) return; // the second click of two
      if (!outline.length) chosen = point = -1;
      outline = [...outline, place];
      frame.changed();
      draw();
    }
    function grasp(event, place) {
      const { point: of, middle } = event.target.dataset;
      let adds = null;
      if (of !== undefined) point = Number(of);
      else if (middle !== undefined) [point, adds] = [Number(middle), place];
      else [chosen, point] = [owner[pixel(place)], -1];
      const one = things[chosen];
      drag = one ? { from: place, index: chosen, point, start: one, last: one, adds, kept: false } : null;
      draw();
    }
    function pull(place) {
      if (things[drag.index] !== drag.last) return void (drag = null); // deleted, undone or changed meanwhile
      const [dx, dy] = [place[0] - drag.from[0], place[1] - drag.from[1]];
      if (!drag.kept) {
        if (Math.hypot(dx, dy) < 1) return; // a click, not a move
        frame.keep();
        drag.kept = true;
        if (drag.adds) drag.start = { ...drag.start, points: drag.start.points.toSpliced(drag.point, 0, drag.adds) };
      }
      drag.last = movedBy(drag.start, dx, dy, drag.point);
      things = replaced(drag.index, drag.last);
      frame.changed();
      draw();
    }
    function begin(place) {
      stroke = { bits: new Uint8Array(width * height), erases: using === "e", at: place };
      go(place);
    }
    function go(place) {
      runs.stroke(stroke.bits, width, height, stroke.at, place, radius);
      stroke.at = place;
      draw();
    }
    function end() {
      const done = stroke;
      stroke = null;
      paint(done);
    }

    // --- the keyboard -----------------------------------------------------------------------
    function act(event) {
      const step = ARROWS[event.key], far = event.shiftKey ? 10 : 1, { key } = event;
      const known = {
        n: () => choose(1), p: () => choose(-1), ".": () => choosePoint(1), ",": () => choosePoint(-1),
        "[": () => widen(radius - 0.5), "]": () => widen(radius + 0.5), " ": mark, i: insert, Delete: remove,
        Enter: () => (outline.length ? close() : accept()), Backspace: () => unmark() || remove(),
        Escape: () => { outline = []; chosen = point = -1; draw(); }, c: crowd, u: takeFromOthers,
      };
      if (step) shift(step[0] * far, step[1] * far);
      else if ((apart ? /^[1-9]$/ : /^[0-9]$/).test(key) && Number(key) <= classes.length) {
        select.value = key === "0" ? NO_CLASS : Number(key) - 1;
        relabel(Number(select.value));
      } else if (TOOLS[key]) use(key);
      else if (known[key]) known[key]();
      else return false;
      return true;
    }
    function shift(dx, dy) {
      if (using === "v" && chosen >= 0) return set(replaced(chosen, movedBy(things[chosen], dx, dy, point)), chosen, point);
      cursor = [limit(cursor[0] + dx, width), limit(cursor[1] + dy, height)];
      hover = cursor;
      draw();
    }
    function mark() { // a point of an outline, a dab of the brush, or the thing under the cursor
      if (using === "a") return add(cursor);
      if (using === "v") [chosen, point] = [owner[pixel(cursor)], -1];
      else { begin(cursor); end(); }
      draw();
    }
    function unmark() {
      if (!outline.length) return false;
      outline = outline.slice(0, -1);
      draw();
      return true;
    }
    function insert() { // a point half way to the next one
      const points = things[chosen]?.points;
      if (!points || point < 0) return;
      const [[x0, y0], [x1, y1]] = [points[point], points[(point + 1) % points.length]];
      const made = { ...things[chosen], points: points.toSpliced(point + 1, 0, [(x0 + x1) / 2, (y0 + y1) / 2]) };
      set(replaced(chosen, made), chosen, point + 1);
    }
    function choose(step) {
      if (things.length) [chosen, point] = [next(chosen, step, things.length), -1];
      using = "v";
      draw();
    }
    function choosePoint(step) {
      const count = things[chosen]?.points?.length;
      if (count) point = next(point, step, count);
      draw();
    }

    // --- drawing ------------------------------------------------------------------------------
    const colorOf = (label) => (label === NO_CLASS ? "#ffffff" : apart ? COLORS[label % COLORS.length] : hued(label));
    const rgb = (label) => [1, 3, 5].map((i) => parseInt(colorOf(label).slice(i, i + 2), 16));

    function draw() {
      paintPixels();
      svg.replaceChildren();
      const scale = width / (svg.getBoundingClientRect().width || width); // pixels of the picture in one of the screen
      const one = things[chosen];
      if (apart) things.forEach(named);
      if (one?.points && using === "v") handles(one, scale);
      if (outline.length) {
        frame.shape("polyline", { points: [...outline, ...(hover ? [hover] : [])].join(" "), class: "outline", "vector-effect": "non-scaling-stroke" });
        outline.forEach(([x, y]) => frame.shape("circle", { cx: x, cy: y, r: 4 * scale, class: "handle" }));
      }
      if (hover && using !== "v") {
        const r = using === "a" ? 2 * scale : radius;
        frame.shape("circle", { cx: hover[0], cy: hover[1], r, class: "cursor", "vector-effect": "non-scaling-stroke" });
      }
      if (one) select.value = one.label;
      size.value = 2 * radius;
      tools.forEach(([key, button]) => button.setAttribute("aria-pressed", key === using));
      svg.style.cursor = using === "v" ? "default" : "crosshair";
    }
    function named(one) {
      const mask = maskOf(one), letter = Math.max(width, height) / 26 / frame.zoom;
      if (!mask) return;
      const words = editing.shortened(classes[one.label]) + (one.crowd ? " (crowd)" : "");
      const y = mask.y > letter ? mask.y - letter * 0.25 : mask.y + letter;
      frame.shape("text", { x: mask.x, y, fill: colorOf(one.label), "font-size": letter, class: "name" }).textContent = words;
    }
    function handles({ points, label }, scale) {
      frame.shape("polygon", { points: points.join(" "), class: "outline", stroke: colorOf(label), "vector-effect": "non-scaling-stroke" });
      points.forEach(([x, y], i) => {
        const [x1, y1] = points[(i + 1) % points.length];
        frame.shape("circle", { cx: (x + x1) / 2, cy: (y + y1) / 2, r: 3 * scale, class: "middle", "data-middle": i + 1 });
      });
      points.forEach(([x, y], i) =>
        frame.shape("circle", { cx: x, cy: y, r: 5 * scale, class: i === point ? "handle here" : "handle", "data-point": i }));
    }
    // The things that have pixels, as they lie over one another.
    function inOrder() {
      const all = things.map((one, index) => [one, maskOf(one), index]).filter(([, mask]) => mask);
      return apart ? all.sort(([, a], [, b]) => pixelsOf(b) - pixelsOf(a)) : all;
    }
    function isEdge({ w, h, bits }, x, y) {
      if (x === 0 || y === 0 || x === w - 1 || y === h - 1) return true;
      const at = y * w + x;
      return !(bits[at - 1] && bits[at + 1] && bits[at - w] && bits[at + w]);
    }
    function paintPixels() {
      const shown = new ImageData(width, height), view = new Uint32Array(shown.data.buffer);
      const packed = (label, alpha) => { const [r, g, b] = rgb(label); return ((alpha << 24) | (b << 16) | (g << 8) | r) >>> 0; };
      owner.fill(-1);
      for (const [one, mask, index] of inOrder()) {
        const strong = packed(one.label, index === chosen ? 190 : 120), weak = packed(one.label, 40);
        const edge = packed(one.label, 255);
        const nothing = one.label === ground && index !== chosen;
        runs.each(mask, (x, y) => {
          const at = y * width + x;
          owner[at] = index;
          const hatched = (one.proposed && ((x + y) & 3) > 1) || (one.crowd && (x ^ y) & 2);
          view[at] = nothing ? 0 : apart && isEdge(mask, x - mask.x, y - mask.y) ? edge : hatched ? weak : strong;
        });
      }
      if (stroke) {
        const color = stroke.erases ? 0 : packed(chosen < 0 ? Number(select.value) : things[chosen].label, 190);
        stroke.bits.forEach((set, at) => { if (set) view[at] = color; });
      }
      canvas.getContext("2d").putImageData(shown, 0, 0);
    }

    from(content);
    return {
      act, draw, from, plain, propose, unmark,
      unfinished: () => outline.length && "not saved: an outline is open; Enter closes it, Esc takes it away",
      read: () => [things, chosen, point],
      write: (kept) => { [things, chosen, point] = kept; outline = []; },
    };
  }

  return { open: (id, about) => editing.open(id, about, "Masks of the picture", tool) };
})();
