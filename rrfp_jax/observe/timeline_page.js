// The parts of the page around the canvases, and what the reader does.

/** Makes an element; what is not an element among its children is text. */
function element(tag, properties, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function fillTable() {
  const shortest = Math.min(...panels.map((panel) => panel.makespan)) || 1;
  const percent = (share) => `${(100 * share).toFixed(1)} %`;
  const columns = [
    ["run", (panel) => panel.title],
    ["makespan", (panel) => timeInWords(panel.makespan, unit)],
    ["over the shortest", (panel) => `${(panel.makespan / shortest).toFixed(3)}`],
    ["bubble", (panel) => percent(panel.shares.bubble)],
    ["fill, drain", (panel) => percent(panel.shares.fill_drain), "fill"],
    ["input", (panel) => percent(panel.shares.input), "input"],
    ["transfer", (panel) => percent(panel.shares.transfer), "transfer"],
    ["held", (panel) => percent(panel.shares.held), "held"],
    ["most in flight", (panel) => panel.peak_in_flight],
    ["most residuals", (panel) => panel.measure === "bytes"
      ? levelInWords(Math.max(0, ...panel.peaks), "bytes") : "not known"],
  ];
  byId("runs").tHead.replaceChildren(element("tr", {}, ...columns.map(
    ([name, , cause]) => element("th", { title: CAUSES[cause] ?? "" },
      ...(cause ? [swatch(theme.causes[cause])] : []), name))));
  byId("runs").tBodies[0].replaceChildren(...panels.map((panel) => element("tr", {},
    ...columns.map(([, of]) => element("td", {}, String(of(panel)))))));
}

function swatch(fill) {
  const made = element("canvas", { className: "swatch", width: 18, height: 12 });
  const pen = made.getContext("2d");
  pen.fillStyle = fill;
  pen.fillRect(0, 0, 18, 12);
  return made;
}

/** The shades of each kind and chunk, from the first microbatch to the last. */
function fillLegend() {
  const most = Math.max(...panels.map((panel) => panel.shades.F.length));
  const widest = panels.find((panel) => panel.shades.F.length === most);
  const kinds = Object.keys(KINDS).filter((kind) =>
    panels.some((panel) => panel.tasks.kind.includes(kind)));
  byId("legend").replaceChildren(...kinds.map((kind) => element("span", {},
    `${kind}: ${KINDS[kind]}`, ...widest.shades[kind].map((ramp, chunk) => {
      const ends = [ramp[0][0], ramp.at(-1)[0]].join(", ");
      const made = element("span", { className: "ramp", title: `chunk ${chunk} of a ` +
        "rank, from the first microbatch to the last" });
      made.style.background = `linear-gradient(to right, ${ends})`;
      return made;
    }))));
}

function whatIsAt(event) {
  const box = marks.getBoundingClientRect();
  const x = event.clientX - box.left, time = toTime(x);
  const place = placeAt(layout, event.clientY - box.top);
  const panel = place && panels[place.panel];
  if (!place || x < left || time < 0 || time > panel.makespan) return null;
  if (place.rank === null) {
    const rank = rankNear(panel, time, place.share * topOf(panel));
    return { panel: place.panel, rank, task: -1, bubble: -1, time };
  }
  const slack = ((view.to - view.from) / (width - left - RIGHT)) * SLACK;
  const bubble = intervalAt(panel.bubbles, place.rank, time, 0);
  const task = intervalAt(panel.tasks, place.rank, time, bubble < 0 ? slack : 0);
  return { ...place, task, bubble, time };
}

function showTip(event) {
  tip.hidden = !pointed;
  if (!pointed) return;
  const panel = panels[pointed.panel], { rank, task, bubble, time } = pointed;
  const level = levelInWords(levelAt(panel, rank, time), panel.measure);
  const lines = task >= 0 ? describeTask(panel, task, unit)
    : bubble >= 0 ? describeBubble(panel, bubble, time, unit)
      : [`${panel.ranks[rank]}: ${level}`, `at ${timeInWords(time, unit)}`];
  tip.replaceChildren(...lines.map((line) => element("div", {}, line)));
  const box = tip.getBoundingClientRect();
  const x = event.clientX + 16, y = event.clientY + 16;
  tip.style.left = `${Math.max(0, x + box.width > window.innerWidth
    ? event.clientX - box.width - 12 : x)}px`;
  tip.style.top = `${Math.max(0, y + box.height > window.innerHeight
    ? event.clientY - box.height - 12 : y)}px`;
}

let isDue = false;
function show(next) {
  view = next;
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => { isDue = false; drawBase(); });
}

function point(event) {
  pointed = event && !drag ? whatIsAt(event) : null;
  showTip(event);
  drawMarks();
}

marks.addEventListener("wheel", (event) => {
  event.preventDefault();
  const pixels = event.deltaMode ? 30 : 1;
  const [x, y] = [event.deltaX * pixels, event.deltaY * pixels];
  const sideways = event.shiftKey ? x || y : x;
  if (Math.abs(sideways) > Math.abs(y) || event.shiftKey)
    show(panned(view, sideways / (width - left), longest));
  else {
    const at = toTime(event.clientX - marks.getBoundingClientRect().left);
    show(zoomed(view, Math.exp(y * 0.0015), clamp(at, view.from, view.to), longest));
  }
}, { passive: false });

marks.addEventListener("pointerdown", (event) => {
  if (event.button !== 0) return;
  marks.setPointerCapture(event.pointerId);
  drag = { x: event.clientX, y: event.clientY, moved: 0 };
});

marks.addEventListener("pointermove", (event) => {
  if (!drag) return point(event);
  const [across, down] = [event.clientX - drag.x, event.clientY - drag.y];
  drag = { x: event.clientX, y: event.clientY,
    moved: drag.moved + Math.abs(across) + Math.abs(down) };
  if (drag.moved <= SLACK) return;
  marks.classList.add("dragging");
  point(null);
  show(panned(view, -across / (width - left - RIGHT), longest));
  window.scrollBy(0, -down);
});

marks.addEventListener("pointerup", (event) => {
  const wasClick = drag && drag.moved <= SLACK;
  drag = null;
  marks.classList.remove("dragging");
  point(event);
  if (wasClick) {
    const isSame = kept?.panel === pointed?.panel && kept?.task === pointed?.task;
    kept = pointed?.task >= 0 && !isSame ? pointed : null;
    drawMarks();
  }
});

marks.addEventListener("pointercancel", () => { drag = null; point(null); });
marks.addEventListener("pointerleave", () => { if (!drag) point(null); });
marks.addEventListener("dblclick", () => show({ from: 0, to: longest }));
byId("whole").addEventListener("click", () => show({ from: 0, to: longest }));
for (const id of ["causes", "moves"]) byId(id).addEventListener("change", drawBase);

const KEYS = {
  "+": () => zoomed(view, 1 / 1.4, pointed?.time ?? (view.from + view.to) / 2, longest),
  "-": () => zoomed(view, 1.4, pointed?.time ?? (view.from + view.to) / 2, longest),
  ArrowLeft: () => panned(view, -0.15, longest),
  ArrowRight: () => panned(view, 0.15, longest),
  0: () => ({ from: 0, to: longest }),
  Escape: () => { kept = null; return view; },
};
KEYS["="] = KEYS["+"];
window.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || !KEYS[event.key]) return;
  event.preventDefault();
  show(KEYS[event.key]());
});

/** Lays everything out anew: at first, and as the window or the theme changes. */
function restart() {
  measure();
  fillTable();
  fillLegend();
  measure(); // what stands above has its height now
  drawBase();
}
window.addEventListener("resize", restart);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", restart);
restart();
