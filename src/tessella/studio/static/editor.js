// What the labelling tools share: the picture, its bar of tools, undo and redo, drafts, and saving.
window.editing = (() => {
  const SVG = "http://www.w3.org/2000/svg";
  const COLORS = ["#e6194b", "#3cb44b", "#0082c8", "#f58230", "#911eb4", "#00a0a0", "#f032e6", "#808000"];
  const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  const MOST_STEPS = 200; // that can be undone
  const MOST_CHARACTERS = 900_000; // the server's socket takes a megabyte
  const DRAFT_AFTER_MS = 400;
  const MOST_ZOOM = 16, ZOOM_STEP = 1.25;
  const frames = new Map();

  const limit = (value, most) => Math.min(most, Math.max(0, value));

  // A name, or its beginning and its end: whole, a long one would lie over half of the picture.
  const shortened = (name) => (name.length <= 20 ? name : `${name.slice(0, 13)}…${name.slice(-6)}`);

  // The next of so many, or the one before; from none (-1) the first, or the last.
  const next = (here, step, count) => (here < 0 && step < 0 ? count - 1 : (here + step + count) % count);

  // A picture that is worked on. The tool has `read()` and `write(value)`, what can be undone; `plain()` and
  // `from(plain)`, what is saved; `draw()`; `act(event)`, which says whether it knew a key; and perhaps
  // `unmark()`, which takes back a step of what is not finished and says whether there was one, and `unfinished()`, which
  // says in words what keeps the picture from being saved. `since` is how many versions there were when the work began.
  class Frame {
    constructor(root, { source, alt, width, height, classes, draft, since }, title) {
      Object.assign(this, { root, width, height, classes, draft, since, past: [], future: [], tool: null });
      Object.assign(this, { changes: 0, offered: false, zoom: 1 });
      const image = Object.assign(document.createElement("img"), { src: source, alt });
      this.svg = document.createElementNS(SVG, "svg");
      this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      this.svg.setAttribute("tabindex", "0");
      this.svg.setAttribute("role", "application");
      this.svg.setAttribute("aria-label", title);
      this.stage = document.createElement("div");
      this.stage.className = "stage";
      this.stage.append(image, this.svg);
      this.window = document.createElement("div"); // what is seen of the stage, which may be larger
      this.window.className = "window";
      this.window.style.aspectRatio = `${width} / ${height}`;
      this.window.append(this.stage);
      this.bar = document.createElement("div");
      this.bar.className = "row-line wrap bar-of-tools";
      this.select = document.createElement("select");
      this.select.setAttribute("aria-label", "Class");
      classes.forEach((name, k) => this.select.append(new Option(name, k)));
      this.bar.append(this.select);
      this.state = Object.assign(document.createElement("span"), { className: "muted small" });
      this.state.setAttribute("role", "status");
      this.found = document.createElement("div");
      this.found.className = "row-line wrap bar-of-tools";
      root.replaceChildren(this.bar, this.found, this.window);
      this.svg.addEventListener("keydown", (event) => this.pressed(event));
      this.window.addEventListener("wheel", (event) => {
        if (!event.ctrlKey && !event.metaKey) return; // it moves the view
        event.preventDefault();
        this.magnify(event.deltaY < 0 ? ZOOM_STEP : 1 / ZOOM_STEP, event);
      }, { passive: false });
    }

    start(tool) {
      this.tool = tool;
      for (const [label, act] of [["Undo", "undo"], ["Redo", "redo"], ["Save", "save"]]) this.button(label, () => this[act]());
      for (const [label, factor, name] of [["−", 1 / ZOOM_STEP, "Zoom out"], ["+", ZOOM_STEP, "Zoom in"]])
        this.button(label, () => this.magnify(factor)).setAttribute("aria-label", name);
      this.bar.append(this.state);
      this.offer();
      tool.draw();
    }

    button(label, act, place = this.bar) {
      const button = Object.assign(document.createElement("button"), { type: "button", textContent: label });
      button.addEventListener("click", () => { act(); this.svg.focus(); });
      place.append(button);
      return button;
    }

    // Where the mouse or the finger is, in pixels of the picture.
    place(event) {
      const box = this.svg.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * this.width;
      const y = ((event.clientY - box.top) / box.height) * this.height;
      return [limit(x, this.width), limit(y, this.height)];
    }

    // Show the picture larger or smaller; what is under the mouse, or in the middle, stays there.
    magnify(factor, { clientX, clientY } = {}) {
      const seen = this.window, box = seen.getBoundingClientRect(), to = Math.min(MOST_ZOOM, Math.max(1, this.zoom * factor));
      const [x, y] = clientX === undefined ? [box.width / 2, box.height / 2] : [clientX - box.left, clientY - box.top];
      const [left, top] = [seen.scrollLeft + x, seen.scrollTop + y].map((place) => (place * to) / this.zoom);
      this.zoom = to;
      this.stage.style.width = `${100 * to}%`;
      seen.scrollTo(left - x, top - y);
      this.tool.draw();
    }

    shape(kind, attributes) {
      const made = document.createElementNS(SVG, kind);
      for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
      this.svg.append(made);
      return made;
    }

    // --- what can be undone: `keep` comes before each change --------------------------------
    keep() {
      this.past.push(this.tool.read());
      if (this.past.length > MOST_STEPS) this.past.shift();
      this.future.length = 0;
      this.changed();
    }
    undo() { if (!this.tool.unmark?.()) this.back(this.past, this.future); }
    redo() { this.back(this.future, this.past); }
    back(from, to) {
      if (!from.length) return;
      to.push(this.tool.read());
      this.tool.write(from.pop());
      this.changed();
      this.tool.draw();
    }

    changed() {
      this.changes++;
      this.root.dataset.dirty = "1";
      this.state.textContent = "not saved";
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.store(), DRAFT_AFTER_MS);
    }

    // --- drafts: what a crash of the browser would take; an earlier one stays while it is on offer
    store() {
      if (!this.root.dataset.dirty || this.offered) return;
      try {
        localStorage.setItem(this.draft, JSON.stringify({ since: this.since, content: this.tool.plain() }));
      } catch {
        // no room, or none allowed: the page still asks before it is left
      }
    }
    offer() {
      let draft = null;
      try {
        draft = JSON.parse(localStorage.getItem(this.draft));
      } catch {
        return;
      }
      if (!draft) return;
      const { since = 0, content = draft } = draft; // an older draft is the content alone
      this.offered = true;
      const words = Object.assign(document.createElement("span"), { textContent: "Work on this picture was not saved." });
      this.found.append(words);
      const answer = (label, act) => this.button(label, () => { this.offered = false; this.found.replaceChildren(); act(); }, this.found);
      answer("Restore it", () => { this.keep(); this.since = since; this.tool.from(content); this.tool.draw(); });
      answer("Forget it", () => { this.forget(); this.store(); });
    }

    save() {
      const unfinished = this.tool.unfinished?.();
      if (unfinished) {
        this.state.textContent = unfinished;
        return;
      }
      const content = this.tool.plain();
      if (JSON.stringify(content).length > MOST_CHARACTERS) {
        this.state.textContent = "too much to save: delete small things";
        return;
      }
      this.state.textContent = "saving …";
      const detail = { content, since: this.since, change: this.changes };
      this.root.dispatchEvent(new CustomEvent("drawn", { detail }));
    }
    saved(change, version) { // what was there after so many changes
      this.since = version;
      if (change !== this.changes) {
        this.state.textContent = "not saved";
        return this.store();
      }
      clearTimeout(this.timer);
      delete this.root.dataset.dirty;
      this.state.textContent = "saved";
      this.forget();
    }
    forget() {
      if (this.offered) return;
      try {
        localStorage.removeItem(this.draft);
      } catch {
        // none is allowed: there is nothing to forget
      }
    }

    pressed(event) {
      const held = event.ctrlKey || event.metaKey, key = event.key.toLowerCase();
      if (held && (key === "y" || (key === "z" && event.shiftKey))) this.redo();
      else if (held && key === "z") this.undo();
      else if (held && key === "s") this.save();
      else if (!held && "+=-".includes(key)) this.magnify(key === "-" ? 1 / ZOOM_STEP : ZOOM_STEP);
      else if (held || !this.tool.act(event)) return;
      event.preventDefault();
    }
  }

  // Open a tool on an element once it is there; one that is open already keeps what is drawn.
  function open(id, about, title, tool) {
    if (frames.has(id)) return;
    const root = getHtmlElement(id);
    if (!root) return void setTimeout(() => open(id, about, title, tool), 50);
    const frame = new Frame(root, about, title);
    frames.set(id, frame);
    frame.start(tool(frame, about));
  }

  window.addEventListener("beforeunload", (event) => {
    if (document.querySelector(".editor[data-dirty]")) event.preventDefault();
  });
  return {
    ARROWS, COLORS, limit, next, open, shortened,
    propose: (id, found) => frames.get(id)?.tool.propose(found),
    saved: (id, change, version) => frames.get(id)?.saved(change, version),
    refused: (id) => { const frame = frames.get(id); if (frame) frame.state.textContent = "not saved"; },
  };
})();
