// The labelling tool: boxes over a picture, drawn with a mouse, a finger or the keyboard.
// A box is {box: [x0, y0, x1, y1], label, crowd, score}; one with a score is a network's proposal.
window.labelling = (() => {
  const SVG = "http://www.w3.org/2000/svg";
  const COLORS = ["#e6194b", "#3cb44b", "#0082c8", "#f58230", "#911eb4", "#00a0a0", "#f032e6", "#808000"];
  const KEYS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  const editors = new Map();

  function open(id, { source, alt, width, height, classes, boxes }) {
    if (editors.has(id)) return; // the socket came back: what is drawn stays
    const root = getHtmlElement(id);
    if (!root) return void setTimeout(() => open(id, { source, alt, width, height, classes, boxes }), 50);
    let all = boxes.map(([x0, y0, x1, y1, label, crowd]) => ({ box: [x0, y0, x1, y1], label, crowd }));
    let chosen = -1, drag = null;
    const past = [];

    const image = Object.assign(document.createElement("img"), { src: source, alt });
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("tabindex", "0");
    svg.setAttribute("role", "application");
    svg.setAttribute("aria-label", "Boxes of the picture");
    const stage = document.createElement("div");
    stage.className = "stage";
    stage.append(image, svg);
    const bar = document.createElement("div");
    bar.className = "row-line wrap bar-of-tools";
    const select = document.createElement("select");
    select.setAttribute("aria-label", "Class");
    classes.forEach((name, k) => select.append(new Option(name, k)));
    select.addEventListener("change", () => relabel(Number(select.value)));
    bar.append(select);
    for (const [label, act] of [
      ["New box", add], ["Accept", accept], ["Delete", remove], ["Undo", undo], ["Save", save],
    ]) {
      const button = Object.assign(document.createElement("button"), { type: "button", textContent: label });
      button.addEventListener("click", () => { act(); svg.focus(); });
      bar.append(button);
    }
    root.replaceChildren(bar, stage);

    // --- changes: each can be undone -----------------------------------------------------
    const keep = () => { past.push(JSON.stringify([all, chosen])); root.dataset.dirty = "1"; };
    const limit = (v, most) => Math.min(most, Math.max(0, v));

    function undo() {
      if (!past.length) return;
      [all, chosen] = JSON.parse(past.pop());
      draw();
    }
    function relabel(label) {
      if (chosen < 0) return;
      keep();
      all[chosen].label = label;
      draw();
    }
    function remove() {
      if (chosen < 0) return;
      keep();
      all.splice(chosen, 1);
      chosen = Math.min(chosen, all.length - 1);
      draw();
    }
    function accept() {
      if (all[chosen]?.score === undefined) return;
      keep();
      delete all[chosen].score;
      draw();
    }
    function add() {
      keep();
      all.push({ box: [width * 0.4, height * 0.4, width * 0.6, height * 0.6], label: Number(select.value), crowd: 0 });
      chosen = all.length - 1;
      draw();
    }
    function propose(found) {
      keep();
      all = all.filter((each) => each.score === undefined);
      for (const [x0, y0, x1, y1, label, score] of found) all.push({ box: [x0, y0, x1, y1], label, crowd: 0, score });
      draw();
    }
    function save() {
      const sure = all.filter((each) => each.score === undefined);
      root.dispatchEvent(new CustomEvent("boxes", { detail: sure.map((b) => [...b.box, b.label, b.crowd]) }));
    }
    function saved() {
      delete root.dataset.dirty;
    }

    // Move the whole box (corner -1), or one corner: 0 top left, 1 top right, 2 bottom right, 3 bottom left.
    function moved([x0, y0, x1, y1], corner, dx, dy) {
      if (corner < 0) {
        dx = Math.min(width - x1, Math.max(-x0, dx));
        dy = Math.min(height - y1, Math.max(-y0, dy));
        return [x0 + dx, y0 + dy, x1 + dx, y1 + dy];
      }
      const x = limit((corner === 1 || corner === 2 ? x1 : x0) + dx, width);
      const y = limit((corner >= 2 ? y1 : y0) + dy, height);
      const [fx, fy] = [corner === 1 || corner === 2 ? x0 : x1, corner >= 2 ? y0 : y1];
      const ends = (a, b, most) => {
        const low = Math.min(a, b, most - 1), high = Math.max(a, b);
        return [low, Math.max(high, low + 1)];
      };
      const [left, right] = ends(x, fx, width), [top, bottom] = ends(y, fy, height);
      return [left, top, right, bottom];
    }

    // --- the mouse and the finger --------------------------------------------------------
    function place(event) {
      const frame = svg.getBoundingClientRect();
      const x = ((event.clientX - frame.left) / frame.width) * width;
      const y = ((event.clientY - frame.top) / frame.height) * height;
      return [limit(x, width), limit(y, height)];
    }
    svg.addEventListener("pointerdown", (event) => {
      event.preventDefault();
      svg.focus();
      svg.setPointerCapture(event.pointerId);
      const from = place(event);
      const { index, corner } = event.target.dataset;
      if (index !== undefined) chosen = Number(index);
      const drawn = index === undefined;
      drag = { from, corner: drawn ? 2 : Number(corner ?? -1), drawn, before: null, start: null };
      draw();
    });
    svg.addEventListener("pointermove", (event) => {
      if (!drag) return;
      const [x, y] = place(event), [fx, fy] = drag.from;
      if (!drag.start) {
        if (Math.hypot(x - fx, y - fy) < 2) return; // a click, not a move
        keep();
        if (drag.drawn) {
          all.push({ box: [fx, fy, fx, fy], label: Number(select.value), crowd: 0 });
          chosen = all.length - 1;
        }
        drag.start = [...all[chosen].box];
      }
      all[chosen].box = moved(drag.start, drag.corner, x - fx, y - fy);
      draw();
    });
    const release = () => {
      if (drag?.drawn && !drag.start) chosen = -1;
      drag = null;
      draw();
    };
    svg.addEventListener("pointerup", release);
    svg.addEventListener("pointercancel", release);

    // --- the keyboard --------------------------------------------------------------------
    svg.addEventListener("keydown", (event) => {
      const step = KEYS[event.key], far = event.shiftKey ? 10 : 1;
      const known = {
        n: () => choose(1), p: () => choose(-1), b: add, Enter: accept, Delete: remove, Backspace: remove,
        Escape: () => { chosen = -1; draw(); },
      };
      if ((event.ctrlKey || event.metaKey) && event.key === "z") undo();
      else if ((event.ctrlKey || event.metaKey) && event.key === "s") save();
      else if (event.ctrlKey || event.metaKey) return;
      else if (step && chosen >= 0) {
        keep();
        all[chosen].box = moved(all[chosen].box, event.altKey ? 2 : -1, step[0] * far, step[1] * far);
        draw();
      } else if (/^[1-9]$/.test(event.key) && Number(event.key) <= classes.length) relabel(Number(event.key) - 1);
      else if (known[event.key]) known[event.key]();
      else return;
      event.preventDefault();
    });
    function choose(step) {
      if (all.length) chosen = (chosen + step + all.length) % all.length;
      draw();
    }

    // --- drawing -------------------------------------------------------------------------
    function shape(kind, attributes) {
      const made = document.createElementNS(SVG, kind);
      for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
      svg.append(made);
      return made;
    }
    function draw() {
      svg.replaceChildren();
      const letter = Math.max(width, height) / 26;
      all.forEach(({ box: [x0, y0, x1, y1], label, crowd, score }, index) => {
        const color = COLORS[label % COLORS.length];
        const here = index === chosen;
        shape("rect", {
          x: x0, y: y0, width: x1 - x0, height: y1 - y0, stroke: color, fill: color, "data-index": index,
          "fill-opacity": here ? 0.22 : 0.04, "stroke-width": here ? 3 : 2, "vector-effect": "non-scaling-stroke",
          "stroke-dasharray": score === undefined ? "none" : "6 4",
        });
        const words = classes[label] + (crowd ? " (crowd)" : "") + (score === undefined ? "" : ` ${score.toFixed(2)}`);
        shape("text", {
          x: x0, y: y0 > letter ? y0 - letter * 0.25 : y0 + letter, fill: color, "font-size": letter, class: "name",
        }).textContent = words;
        if (!here) return;
        [[x0, y0], [x1, y0], [x1, y1], [x0, y1]].forEach(([x, y], corner) =>
          shape("circle", { cx: x, cy: y, r: letter * 0.45, fill: "#fff", stroke: color, "data-index": index, "data-corner": corner,
            "vector-effect": "non-scaling-stroke" }));
      });
      if (chosen >= 0) select.value = all[chosen].label;
    }
    editors.set(id, { propose, saved });
    draw();
  }

  window.addEventListener("beforeunload", (event) => {
    if (document.querySelector(".editor[data-dirty]")) event.preventDefault();
  });
  return {
    open,
    propose: (id, found) => editors.get(id)?.propose(found),
    saved: (id) => editors.get(id)?.saved(),
  };
})();
