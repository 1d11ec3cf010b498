// Played in the page of the labelling tool by test_label_masks.py; calls back with what it saw, and the things it used.
const done = arguments[0], said = {};
Element.prototype.setPointerCapture = () => {};
function tool(number, kind, content, draft = `draft ${number}`) {
  const root = Object.assign(document.createElement("div"), { id: `c${number}`, className: "editor" }), sent = [];
  document.body.append(root);
  root.addEventListener("drawn", (event) => sent.push(event.detail));
  const about = { source: "", alt: "", width: 64, height: 64, classes: ["background", "a"], content, ground: 0, draft, since: 7 };
  kind.open(number, about);
  const svg = root.querySelector("svg");
  svg.getBoundingClientRect = () => ({ left: 0, top: 0, width: 64, height: 64 });
  const mouse = (name, x, y, on = svg) =>
    on.dispatchEvent(new PointerEvent(name, { clientX: x, clientY: y, pointerId: 1, bubbles: true, cancelable: true }));
  return {
    root, svg, sent, mouse,
    keys: (...keys) => keys.forEach((key) => svg.dispatchEvent(new KeyboardEvent("keydown", { key, cancelable: true }))),
    held: (key) => svg.dispatchEvent(new KeyboardEvent("keydown", { key, ctrlKey: true, cancelable: true })),
    click: (x, y) => { mouse("pointerdown", x, y); mouse("pointerup", x, y); },
    save() { this.held("s"); return this.sent.at(-1); },
    press: (words) => [...root.querySelectorAll("button")].find((each) => each.textContent === words).click(),
    get dirty() { return root.dataset.dirty === "1"; },
  };
}
const outline = (...polygon) => ({ label: 1, polygon });
const three = [outline(2, 2, 12, 2, 12, 12), outline(20, 20, 30, 20, 30, 30), outline(40, 40, 60, 40, 60, 60)];

// an outline that is not closed
let one = tool(9001, masking, []);
for (const [x, y] of [[5, 5], [30, 5], [30, 30]]) one.click(x, y);
one.held("s");
said.open = [one.sent.length, one.dirty, one.root.querySelector("[role=status]").textContent];
one.keys("Enter");
said.closed = one.save().content;

// changes after what was sent: of many, and with a step back
one = tool(9002, masking, three);
one.keys("n");
const answer = (detail) => editing.saved(9002, detail.change, 8);
for (let i = 0; i < 205; i++) one.keys("ArrowRight", "ArrowLeft");
let detail = one.save();
one.keys("ArrowDown");
answer(detail);
said.many = one.dirty;
detail = one.save();
one.held("z");
one.keys("ArrowUp");
answer(detail);
said.back = one.dirty;
answer(one.save());
said.all = one.dirty;

// what is dragged is deleted, or another is chosen
said.dragged = [[masking, three], [boxing, three.map(({ polygon: [x, y] }) => [x, y, x + 10, y + 10, 1, 0])]].map(
  ([kind, content], i) => ["Delete", "n"].map((key, j) => {
    const each = tool(9010 + 2 * i + j, kind, content);
    each.keys("v");
    const on = kind === boxing ? each.svg.querySelector("[data-index='0']") : each.svg;
    each.mouse("pointerdown", 9, 4, on);
    each.keys(key);
    each.mouse("pointermove", 14, 8);
    each.mouse("pointerup", 14, 8);
    return each.save().content.map((thing) => (thing.polygon ?? thing).slice(0, 2));
  }));

// the eraser beside an outline, and on it
one = tool(9020, masking, [outline(2, 2, 30, 2, 2, 30)]);
one.keys("e", "Escape");
one.click(28, 28);
said.beside = Object.keys(one.save().content[0]);
one.click(5, 5);
said.on = Object.keys(one.save().content[0]);

// a draft that is on offer
const draft = JSON.stringify({ since: 3, content: three });
localStorage.setItem("draft 9030", draft);
one = tool(9030, masking, []);
for (const [x, y] of [[5, 5], [30, 5], [30, 30], [5, 5]]) one.click(x, y);
editing.saved(9030, one.save().change, 8);
one.keys("v", "n", "ArrowRight");
setTimeout(() => {
  said.kept = localStorage.getItem("draft 9030") === draft;
  one.press("Restore it");
  const { since, content } = one.save();
  said.restored = [since, content];
  editing.saved(9030, one.sent.at(-1).change, 9);
  said.left = localStorage.getItem("draft 9030");
  said.since = [one.sent[0].since, one.save().since];
  done([said, three]);
}, 600);
