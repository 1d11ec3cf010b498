// Boxes over a picture, drawn with a mouse, a finger or the keyboard.
// A box is {box: [x0, y0, x1, y1], label, crowd, score}; one with a score is a network's proposal.
window.boxing = (() => {
  const { ARROWS, COLORS, limit, next } = editing;
  const SAME = 0.5; // overlap from which a proposal says what is drawn already

  function overlap(one, other) {
    const area = ([x0, y0, x1, y1]) => Math.max(0, x1 - x0) * Math.max(0, y1 - y0);
    const low = [0, 1].map((n) => Math.max(one[n], other[n])), high = [2, 3].map((n) => Math.min(one[n], other[n]));
    const common = area([...low, ...high]);
    return common / (area(one) + area(other) - common || 1);
  }

  function tool(frame, { content }) {
    const { svg, select, width, height, classes } = frame;
    const keep = () => frame.keep();
    const plain = () => all.filter((b) => b.score === undefined).map((b) => [...b.box, b.label, b.crowd]);
    let all = [], chosen = -1, drag = null;
    from(content);

    function from(boxes) {
      all = boxes.map(([x0, y0, x1, y1, label, crowd]) => ({ box: [x0, y0, x1, y1], label, crowd }));
      chosen = -1;
    }
    select.addEventListener("change", () => relabel(Number(select.value)));
    for (const [label, act] of [["New box", add], ["Accept", accept], ["Accept all", acceptAll], ["Delete", remove]])
      frame.button(label, act);

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
    function acceptAll() {
      keep();
      for (const each of all) delete each.score;
      draw();
    }
    function add() {
      keep();
      all.push({ box: [width * 0.4, height * 0.4, width * 0.6, height * 0.6], label: Number(select.value), crowd: 0 });
      chosen = all.length - 1;
      draw();
    }
    function propose(found) {
      const sure = all.filter((each) => each.score === undefined);
      const isThere = ({ box, label }) => sure.some((each) => each.label === label && overlap(each.box, box) >= SAME);
      const made = found.map(([x0, y0, x1, y1, label, score]) => ({ box: [x0, y0, x1, y1], label, crowd: 0, score }));
      const fresh = made.filter((each) => !isThere(each));
      if (!fresh.length && sure.length === all.length) return; // nothing has changed
      keep();
      all = [...sure, ...fresh];
      draw();
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
    svg.addEventListener("pointerdown", (event) => {
      event.preventDefault();
      svg.focus();
      svg.setPointerCapture(event.pointerId);
      const start = frame.place(event);
      const { index, corner } = event.target.dataset;
      if (index !== undefined) chosen = Number(index);
      const drawn = index === undefined;
      drag = { from: start, corner: drawn ? 2 : Number(corner ?? -1), one: drawn ? null : all[chosen], start: null };
      draw();
    });
    svg.addEventListener("pointermove", (event) => {
      if (drag?.one && !all.includes(drag.one)) drag = null; // deleted or undone meanwhile
      if (!drag) return;
      const [x, y] = frame.place(event), [fx, fy] = drag.from;
      if (!drag.start) {
        if (Math.hypot(x - fx, y - fy) < 2) return; // a click, not a move
        keep();
        if (!drag.one) {
          drag.one = { box: [fx, fy, fx, fy], label: Number(select.value), crowd: 0 };
          chosen = all.push(drag.one) - 1;
        }
        drag.start = [...drag.one.box];
      }
      drag.one.box = moved(drag.start, drag.corner, x - fx, y - fy);
      frame.changed();
      draw();
    });
    const release = () => {
      if (drag && !drag.one) chosen = -1;
      drag = null;
      draw();
    };
    svg.addEventListener("pointerup", release);
    svg.addEventListener("pointercancel", release);

    // --- the keyboard --------------------------------------------------------------------
    function act(event) {
      const step = ARROWS[event.key], far = event.shiftKey ? 10 : 1;
      const known = {
        n: () => choose(1), p: () => choose(-1), b: add, Enter: accept, Delete: remove, Backspace: remove,
        Escape: () => { chosen = -1; draw(); },
      };
      if (step && chosen >= 0) {
        keep();
        all[chosen].box = moved(all[chosen].box, event.altKey ? 2 : -1, step[0] * far, step[1] * far);
        draw();
      } else if (/^[1-9]$/.test(event.key) && Number(event.key) <= classes.length) relabel(Number(event.key) - 1);
      else if (known[event.key]) known[event.key]();
      else return false;
      return true;
    }
    function choose(step) {
      if (all.length) chosen = next(chosen, step, all.length);
      draw();
    }

    // --- drawing -------------------------------------------------------------------------
    function draw() {
      svg.replaceChildren();
      const letter = Math.max(width, height) / 26 / frame.zoom;
      all.forEach(({ box: [x0, y0, x1, y1], label, crowd, score }, index) => {
        const color = COLORS[label % COLORS.length];
        const here = index === chosen;
        frame.shape("rect", {
          x: x0, y: y0, width: x1 - x0, height: y1 - y0, stroke: color, fill: color, "data-index": index,
          "fill-opacity": here ? 0.22 : 0.04, "stroke-width": here ? 3 : 2, "vector-effect": "non-scaling-stroke",
          "stroke-dasharray": score === undefined ? "none" : "6 4",
        });
        const words = editing.shortened(classes[label]) + (crowd ? " (crowd)" : "") + (score === undefined ? "" : ` ${score.toFixed(2)}`);
        frame.shape("text", {
          x: x0, y: y0 > letter ? y0 - letter * 0.25 : y0 + letter, fill: color, "font-size": letter, class: "name",
        }).textContent = words;
        if (!here) return;
        [[x0, y0], [x1, y0], [x1, y1], [x0, y1]].forEach(([x, y], corner) =>
          frame.shape("circle", { cx: x, cy: y, r: letter * 0.45, fill: "#fff", stroke: color, "data-index": index, "data-corner": corner,
            "vector-effect": "non-scaling-stroke" }));
      });
      if (chosen >= 0) select.value = all[chosen].label;
    }
    return {
      act, draw, from, plain, propose,
      read: () => JSON.stringify([all, chosen]),
      write: (kept) => { [all, chosen] = JSON.parse(kept); },
    };
  }

  return { open: (id, about) => editing.open(id, about, "Boxes of the picture", tool) };
})();
