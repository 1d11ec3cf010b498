// The trials of a sweep: a plot with an axis for each setting and one for the score, and a table.
// The data come from /api/sweep, at first all and then again when they have changed.
window.trials = (() => {
  const SVG = "http://www.w3.org/2000/svg";
  const POLL_MS = 2000, MOST_ROWS = 1000, HEIGHT = 300, TOP = 44, BOTTOM = 22, SIDE = 56;
  const SHADES = [0.5, 0.8, 0.95]; // shares of the trials that are worse than one of each darker shade
  const MANY = 300; // trials whose lines are thinner
  const NEAR = 14; // pixels from an axis within which a press marks a range on it
  const LETTER = 6.4; // pixels of a label's letter

  // Called in the page's head: the trials are on their way while its elements are made.
  function open({ plot, table, ref }) {
    const asked = ask(ref, "");
    asked.catch(() => {}); // load tries again
    const begin = () => {
      const root = document.getElementById(`c${plot}`), rows = document.getElementById(`c${table}`);
      if (!root || !rows) return void setTimeout(begin, 10);
      const view = { root, rows, ref, data: null, ranges: new Map(), sort: ["rank", 1], chosen: null };
      new ResizeObserver(() => view.data && drawPlot(view)).observe(root);
      load(view, asked);
    };
    begin();
  }

  const ask = (ref, known) => fetch(`/api/sweep?${new URLSearchParams({ ref, known })}`);

  async function load(view, asked) {
    if (!view.root.isConnected) return;
    try {
      const response = await (asked ?? ask(view.ref, view.data?.stamp ?? ""));
      if (response.status === 200) {
        view.data = await response.json();
        view.data.trials = view.data.trials.map(([number, state, score, validations, seconds, error, values], rank) =>
          ({ number, state, score, validations, seconds, error, values, rank }));
        prepare(view);
        drawPlot(view);
        drawTable(view);
      } else if (response.status !== 204) {
        view.rows.textContent = (await response.json()).error ?? response.statusText;
      }
    } catch {
      // the server is away: ask again
    }
    setTimeout(() => load(view), document.hidden ? 5 * POLL_MS : POLL_MS);
  }

  // --- places on the axes: 0 is below, 1 above -------------------------------------------

  function prepare(view) {
    const { axes, trials } = view.data;
    const scores = trials.map((t) => t.score).filter((s) => s !== null).sort((a, b) => a - b);
    const low = scores[0] ?? 0, high = scores[scores.length - 1] ?? 1;
    view.scales = axes.map(scaleOf);
    view.scales.push({
      title: view.data.score.replace("/", " "), hint: "",
      place: (v) => (v === null ? null : high > low ? (v - low) / (high - low) : 0.5),
      labels: high > low ? [[0, shown(view, low)], [1, shown(view, high)]] : [[0.5, shown(view, low)]],
    });
    if (!scores.length) view.scales[axes.length].labels = [];
    for (const t of trials) {
      t.places = [...t.values, t.score].map((v, i) => view.scales[i].place(v));
      const better = t.score === null ? 0 : upTo(scores, t.score) / scores.length;
      t.shade = SHADES.filter((share) => better >= share).length;
      t.drawn = t.places.every((p) => p !== null);
    }
  }

  function scaleOf(axis) {
    const hint = axis.importance == null ? "" : `${Math.round(100 * axis.importance)} % of the differences`;
    const title = axis.path;
    if (axis.choices.length) {
      const last = axis.choices.length - 1;
      const at = new Map(axis.choices.map((c, i) => [String(c), last ? i / last : 0.5]));
      const step = Math.ceil((last + 1) / 12);
      const labels = axis.choices.map((c, i) => [at.get(String(c)), String(c)]).filter((_, i) => i % step === 0);
      return { title, hint, labels, place: (v) => at.get(String(v)) ?? null };
    }
    const f = axis.log ? Math.log : (v) => v;
    const low = f(axis.low), high = f(axis.high);
    const labels = [[0, brief(axis.low)], [1, brief(axis.high)]];
    return { title, hint, labels, place: (v) => (typeof v === "number" ? (f(v) - low) / (high - low) : null) };
  }

  function upTo(sorted, value) {
    let a = 0, b = sorted.length;
    while (a < b) {
      const middle = (a + b) >> 1;
      if (sorted[middle] <= value) a = middle + 1; else b = middle;
    }
    return a - 1;
  }

  const within = (view, t) =>
    [...view.ranges].every(([i, [low, high]]) => t.places[i] !== null && t.places[i] >= low && t.places[i] <= high);

  // --- the plot ------------------------------------------------------------------------------

  function make(name, attributes, text) {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    return element;
  }

  function drawPlot(view) {
    const { scales, data } = view;
    const width = Math.max(view.root.clientWidth, 2 * SIDE + 92 * (scales.length - 1));
    const gap = (width - 2 * SIDE) / Math.max(1, scales.length - 1), inner = HEIGHT - TOP - BOTTOM;
    view.x = (i) => SIDE + gap * i;
    view.y = (p) => TOP + inner * (1 - p);
    const svg = make("svg", { width, height: HEIGHT, role: "img", "aria-label": "Settings and score of each trial" });
    const kept = data.trials.filter((t) => t.drawn && within(view, t));
    const groups = Array.from({ length: SHADES.length + 2 }, () => []);
    svg.classList.toggle("many", kept.length > MANY);
    const inside = new Set(kept);
    for (const t of data.trials) if (t.drawn) groups[inside.has(t) ? t.shade + 1 : 0].push(line(view, t));
    groups.forEach((lines, i) => {
      if (lines.length) svg.append(make("path", { d: lines.join(""), class: i ? `line shade${i - 1}` : "line off" }));
    });
    const best = data.trials.find((t) => t.state === "complete");
    if (best?.drawn) svg.append(make("path", { d: line(view, best), class: "line best" }));
    view.mark = make("path", { class: "line marked" });
    svg.append(view.mark);
    scales.forEach((scale, i) => svg.append(axisOf(view, scale, i, gap)));
    svg.addEventListener("pointermove", (e) => point(view, svg, e, kept));
    svg.addEventListener("pointerleave", () => choose(view, null));
    svg.addEventListener("pointerdown", (e) => press(view, svg, e, inner));
    view.root.replaceChildren(svg);
    choose(view, view.chosen);
  }

  const line = (view, t) => "M" + t.places.map((p, i) => `${view.x(i).toFixed(1)},${view.y(p).toFixed(1)}`).join("L");

  function axisOf(view, scale, i, gap) {
    const x = view.x(i), g = make("g", { class: "axis" });
    g.append(make("line", { x1: x, x2: x, y1: view.y(1), y2: view.y(0) }));
    const anchor = i === view.scales.length - 1 ? "end" : i ? "middle" : "start";
    const at = anchor === "middle" ? x : anchor === "start" ? x - SIDE + 4 : x + SIDE - 4;
    const room = Math.floor(gap / LETTER) - 1;
    const title = make("text", { x: at, y: 14, class: "title", "text-anchor": anchor }, cut(scale.title, room));
    title.append(make("title", {}, scale.title));
    g.append(title);
    if (scale.hint) g.append(make("text", { x: at, y: 29, "text-anchor": anchor }, cut(scale.hint, room)));
    for (const [place, label] of scale.labels) {
      const most = i < view.scales.length - 1 ? gap - 16 : SIDE - 8;
      const text = make("text", { x: x + 7, y: view.y(place) + 4, class: "tick" }, cut(label, Math.floor(most / LETTER)));
      text.append(make("title", {}, label));
      g.append(text);
    }
    const range = view.ranges.get(i);
    if (range) g.append(make("rect", { class: "range", x: x - 6, width: 12, y: view.y(range[1]), height: Math.max(2, view.y(range[0]) - view.y(range[1])) }));
    return g;
  }

  // The trial whose line passes nearest to the pointer.
  function point(view, svg, event, kept) {
    if (view.dragging) return;
    const { left, top } = svg.getBoundingClientRect();
    const x = event.clientX - left, y = event.clientY - top, last = view.scales.length - 1;
    const at = Math.min(last, Math.max(0, (x - view.x(0)) / (view.x(1) - view.x(0) || 1)));
    const i = Math.min(last - 1, Math.floor(at)), share = at - i;
    let nearest = null, least = 12;
    for (const t of kept) {
      const away = Math.abs(view.y(t.places[i] * (1 - share) + t.places[i + 1] * share) - y);
      if (away < least) [nearest, least] = [t, away];
    }
    svg.style.cursor = Math.abs(at - Math.round(at)) * (view.x(1) - view.x(0)) < NEAR ? "ns-resize" : "default";
    choose(view, nearest?.number ?? null);
  }

  function choose(view, number) {
    view.chosen = number;
    const trial = view.data.trials.find((t) => t.number === number);
    view.mark?.setAttribute("d", trial?.drawn ? line(view, trial) : "");
    for (const row of view.rows.querySelectorAll("tr.here")) row.classList.remove("here");
    if (number !== null) view.rows.querySelector(`tr[data-number="${number}"]`)?.classList.add("here");
  }

  // A press near an axis marks a range on it as the pointer moves; without a move it lets go.
  function press(view, svg, event, inner) {
    const { left, top } = svg.getBoundingClientRect();
    const i = view.scales.findIndex((_, n) => Math.abs(event.clientX - left - view.x(n)) < NEAR);
    if (i < 0) return;
    event.preventDefault();
    const placeOf = (e) => Math.min(1, Math.max(0, 1 - (e.clientY - top - TOP) / inner));
    const from = placeOf(event);
    view.dragging = true;
    const move = (e) => {
      const to = placeOf(e);
      if (Math.abs(to - from) < 0.02) view.ranges.delete(i);
      else view.ranges.set(i, [Math.min(from, to) - 1e-9, Math.max(from, to) + 1e-9]);
      requestAnimationFrame(() => drawPlot(view));
    };
    const end = (e) => {
      view.dragging = false;
      window.removeEventListener("pointermove", move);
      move(e);
      drawTable(view);
    };
    window.addEventListener("pointermove", move);
    window.addEventListener("pointerup", end, { once: true });
  }

  // --- the table -------------------------------------------------------------------------------

  const COLUMNS = [
    ["trial", (t) => t.number], ["state", (t) => t.state], ["score", (t) => t.score],
    ["validations", (t) => t.validations], ["time", (t) => t.seconds],
  ];

  function drawTable(view) {
    const { data, sort } = view;
    const columns = [...COLUMNS, ...data.axes.map((axis, i) => [axis.path, (t) => t.values[i]])];
    const key = columns.find(([name]) => name === sort[0])?.[1];
    const kept = data.trials.filter((t) => within(view, t));
    if (sort[0] !== "rank") kept.sort((a, b) => compare(key(a), key(b), sort[1]) || a.rank - b.rank);
    const best = data.trials.find((t) => t.state === "complete");
    const isText = (i) => data.axes[i]?.choices.some((c) => typeof c === "string");
    const table = document.createElement("table");
    table.className = "t";
    const head = table.createTHead().insertRow();
    columns.forEach(([name], n) => {
      const cell = document.createElement("th");
      const title = n === 2 ? data.score.replace("/", " ") : name;
      const button = Object.assign(document.createElement("button"), { type: "button", title });
      button.textContent = cut(title, 28) + (sort[0] === name ? (sort[1] > 0 ? " ↓" : " ↑") : "");
      button.addEventListener("click", () => {
        view.sort = sort[0] === name ? [name, -sort[1]] : [name, 1];
        drawTable(view);
      });
      cell.setAttribute("aria-sort", sort[0] !== name ? "none" : sort[1] > 0 ? "descending" : "ascending");
      if (n > 1 && !isText(n - COLUMNS.length)) cell.className = "r";
      cell.append(button);
      head.append(cell);
    });
    const body = table.createTBody();
    for (const t of kept.slice(0, MOST_ROWS)) body.append(rowOf(view, t, t === best, isText));
    const boxed = Object.assign(document.createElement("div"), { className: "table-box" });
    boxed.append(table);
    const scrolled = view.rows.querySelector(".table-box")?.scrollTop ?? 0;
    const told = Object.assign(document.createElement("p"), { className: "muted small" });
    told.textContent = counted(view, kept);
    view.rows.replaceChildren(told, ...(data.trials.length ? [boxed] : []));
    boxed.scrollTop = scrolled;
  }

  function counted(view, kept) {
    const all = view.data.trials.length;
    if (!all) return "No trial has begun yet.";
    const count = kept.length === all ? `${all} trials` : `${kept.length} of ${all} trials are in the marked ranges`;
    const less = kept.length > MOST_ROWS ? `; the first ${MOST_ROWS} are listed` : "";
    const without = view.data.trials.filter((t) => !t.drawn).length;
    return count + less + (without ? `; ${without} without a score are not drawn` : "");
  }

  function rowOf(view, t, best, isText) {
    const row = document.createElement("tr");
    row.dataset.number = t.number;
    if (best) row.className = "chosen";
    const link = document.createElement("a");
    const folder = `${view.ref}/trial-${String(t.number).padStart(4, "0")}`;
    link.href = `/monitor?${new URLSearchParams({ run: folder })}`;
    link.textContent = t.number;
    row.insertCell().append(link);
    const badge = document.createElement("span");
    const look = { complete: "done", pruned: "", running: "running", failed: "failed" }[t.state] ?? "";
    badge.className = `badge ${look}`;
    badge.textContent = t.state === "pruned" ? "ended early" : t.state;
    if (t.error) badge.title = t.error;
    row.insertCell().append(badge);
    const texts = [t.score === null ? "" : shown(view, t.score), String(t.validations), t.seconds ? duration(t.seconds) : ""];
    [...texts, ...t.values.map((v) => (v === null ? "" : brief(v)))].forEach((text, n) => {
      const cell = row.insertCell();
      cell.textContent = text;
      cell.className = isText(n - texts.length) ? "nowrap" : "r";
      if (text.length > 28) Object.assign(cell, { textContent: cut(text, 28), title: text });
    });
    row.addEventListener("pointerenter", () => choose(view, t.number));
    return row;
  }

  // Numbers from the largest, texts from A; what is missing comes last in either direction.
  function compare(a, b, direction) {
    if (a === null || b === null) return (a === null) - (b === null);
    const order = typeof a === "number" && typeof b === "number" ? b - a : String(a).localeCompare(String(b));
    return direction * order;
  }

  const shown = (view, score) => (view.data.percent ? `${(100 * score).toFixed(2)} %` : String(+score.toPrecision(4)));
  const brief = (v) => (typeof v === "number" ? (v && Math.abs(v) < 1e-3 ? v.toExponential(2).replace(/\.?0+e/, "e") : String(+v.toPrecision(4))) : String(v));
  const duration = (s) => (s < 60 ? `${s.toFixed(s < 10 ? 1 : 0)} s` : s < 3600 ? `${Math.floor(s / 60)} min ${Math.floor(s % 60)} s` : `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`);
  const cut = (text, most) => (text.length <= most ? text : most < 3 ? "…" : `${text.slice(0, most - 1 - Math.floor(most / 3))}…${text.slice(-Math.floor(most / 3))}`);

  return { open };
})();
