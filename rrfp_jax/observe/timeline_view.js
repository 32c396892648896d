// Draws panels and answers the pointer and the keys. Two canvases: `base` has what the
// view alone decides, `marks` what is pointed at, so that pointing redraws little.

const data = JSON.parse(document.getElementById("data").textContent);
const panels = data.panels.map(indexed);
const longest = Math.max(...panels.map((panel) => panel.makespan)) || 1;
const unit = unitFor(longest);
const FONT = "system-ui, sans-serif";
const RIGHT = 14, MOST_ARROWS = 400, SLACK = 3; // pixels, transfers, pixels
const byId = (id) => document.getElementById(id);
const [base, marks, tip] = [byId("base"), byId("marks"), byId("tip")];
const [onBase, onMarks] = [base.getContext("2d"), marks.getContext("2d")];

let view = { from: 0, to: longest };
let layout, width, left, theme; // of the page as it is
let pointed = null; // {panel, rank, task, bubble, time}: what the pointer is at
let kept = null; // {panel, task}: what was clicked
let drag = null; // {x, y, moved}: where the button went down, or the last move

const toX = (time) =>
  left + ((time - view.from) / (view.to - view.from)) * (width - left - RIGHT);
const toTime = (x) =>
  view.from + ((x - left) / (width - left - RIGHT)) * (view.to - view.from);

function measure() {
  const style = getComputedStyle(document.documentElement);
  theme = {};
  for (const name of ["ground", "ink", "faint", "idle", "idle-strong", "memory",
    "memory-edge"]) theme[name] = style.getPropertyValue(`--${name}`).trim();
  theme.causes = causeFills(theme);
  width = byId("stage").clientWidth;
  const above = byId("stage").getBoundingClientRect().top + window.scrollY;
  layout = arrange(panels, window.innerHeight - above - 50);
  onBase.font = `11px ${FONT}`;
  const names = panels.flatMap((panel) => panel.ranks);
  left = 10 + Math.max(52, ...names.map((name) => onBase.measureText(name).width));
  for (const [canvas, pen] of [[base, onBase], [marks, onMarks]]) {
    const ratio = window.devicePixelRatio || 1;
    [canvas.width, canvas.height] = [width * ratio, layout.height * ratio];
    [canvas.style.width, canvas.style.height] = [`${width}px`, `${layout.height}px`];
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  }
}

/** Shades and hatchings by cause: none of them is a colour of a task. */
function causeFills(theme) {
  const hatched = (draw) => {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 6;
    const pen = tile.getContext("2d");
    pen.fillStyle = theme.idle;
    pen.fillRect(0, 0, 6, 6);
    pen.strokeStyle = theme.faint;
    pen.beginPath();
    draw(pen);
    pen.stroke();
    return onBase.createPattern(tile, "repeat");
  };
  const slanted = (pen) => {
    for (const x of [-6, 0, 6]) { pen.moveTo(x - 1, 7); pen.lineTo(x + 7, -1); }
  };
  const crossed = (pen) => { pen.moveTo(0, 3); pen.lineTo(6, 3); pen.moveTo(3, 0);
    pen.lineTo(3, 6); };
  return { fill: theme.idle, drain: theme.idle, input: theme["idle-strong"],
    transfer: hatched(slanted), held: hatched(crossed) };
}

function drawBase() {
  onBase.clearRect(0, 0, width, layout.height);
  let num = 0;
  panels.forEach((panel, p) => {
    drawFrame(panel, layout.places[p]);
    clipped(onBase, () => {
      panel.ranks.forEach((_, rank) => drawRank(panel, layout.places[p], rank));
      drawChart(panel, layout.places[p]);
    });
    num += byId("moves").checked ? transfersIn(panel, view).length : 0;
  });
  const few = num <= MOST_ARROWS;
  byId("status").textContent = few ? ""
    : `${num} transfers are in view; zoom in until they are at most ${MOST_ARROWS}`;
  if (num && few) clipped(onBase, () => panels.forEach((panel, p) =>
    transfersIn(panel, view).forEach((i) => drawArrow(onBase, panel, p, i, 0.7))));
  drawMarks();
}

function clipped(pen, draw) {
  pen.save();
  pen.beginPath();
  pen.rect(left, 0, width - left - RIGHT + 1, layout.height);
  pen.clip();
  draw();
  pen.restore();
}

/** The title, the names of ranks, and the time axis with its lines. */
function drawFrame(panel, { top, bottom, chart }) {
  onBase.textBaseline = "middle";
  onBase.fillStyle = theme.ink;
  onBase.font = `bold 12px ${FONT}`;
  onBase.textAlign = "left";
  onBase.fillText(shortened(panel.title, width - left - RIGHT - 200), left, top - 12);
  onBase.font = `11px ${FONT}`;
  onBase.textAlign = "right";
  onBase.fillText(`makespan ${timeInWords(panel.makespan, unit)}`, width - RIGHT,
    top - 12);
  const every = Math.ceil(11 / layout.row);
  panel.ranks.forEach((name, rank) => {
    if (rank % every === 0)
      onBase.fillText(name, left - 6, top + (rank + 0.5) * layout.row);
  });
  const { values, digits } = ticks(view, unit, (width - left) / 90);
  onBase.textAlign = "center";
  for (const value of values) {
    const x = toX(value / unit.scale);
    onBase.fillStyle = theme.idle;
    onBase.fillRect(x, bottom, 1, chart.bottom - bottom);
    onBase.fillStyle = theme.ink;
    const words = `${value.toFixed(digits)} ${unit.name}`;
    const half = onBase.measureText(words).width / 2;
    onBase.fillText(words, Math.min(x, width - half), chart.bottom + 10);
  }
}

function shortened(text, room) {
  if (onBase.measureText(text).width <= room) return text;
  let length = text.length;
  while (length > 1 && onBase.measureText(`${text.slice(0, length)}…`).width > room)
    length -= Math.ceil(length / 20);
  return `${text.slice(0, length)}…`;
}

function drawRank(panel, { top }, rank) {
  const { tasks, bubbles } = panel;
  const y = top + rank * layout.row, height = layout.row - (layout.row > 9 ? 2 : 1);
  const end = Math.min(toX(panel.makespan), width);
  onBase.fillStyle = theme.idle;
  onBase.fillRect(toX(0), y, end - toX(0), height);
  if (byId("causes").checked)
    eachInView(bubbles, rank, (i, x, across) => {
      onBase.fillStyle = theme.causes[bubbles.cause[i]];
      onBase.fillRect(x, y, across, height);
    });
  onBase.font = `${Math.min(11, height - 1)}px ${FONT}`;
  onBase.textAlign = "center";
  eachInView(tasks, rank, (i, x, across) => {
    const [shade, ink] = shadesOf(panel, i);
    onBase.fillStyle = shade;
    onBase.fillRect(x, y, across > 3 ? across - 1 : across, height);
    if (across < 14 || height < 9) return;
    onBase.fillStyle = ink;
    const name = nameOf(panel, i), short = String(tasks.microbatch[i]);
    const words = across > 7 * name.length + 4 ? name : short;
    const middle = (Math.max(x, left) + Math.min(x + across, width - RIGHT)) / 2;
    if (across > 7 * words.length) onBase.fillText(words, middle, y + height / 2 + 1);
  });
}

/** Calls `draw` for what is in view of a rank, once for what shares a pixel. */
function eachInView(columns, rank, draw) {
  const last = columns.first[rank + 1];
  let painted = -Infinity;
  let i = firstAbove(columns.end, view.from, columns.first[rank], last);
  for (; i < last && columns.start[i] <= view.to; i++) {
    const x = toX(columns.start[i]), end = Math.max(toX(columns.end[i]), x + 1);
    if (end <= painted + 0.5) continue;
    draw(i, x, end - x);
    painted = end;
  }
}

function shadesOf({ tasks, chunks, shades }, i) {
  return shades[tasks.kind[i]][chunks[tasks.stage[i]]][tasks.microbatch[i]];
}

/** Levels of all ranks over time; the one of the rank that is pointed at is marked. */
function drawChart(panel, { chart }) {
  onBase.globalAlpha = 0.55;
  panel.ranks.forEach((_, rank) => {
    onBase.strokeStyle = theme["memory-edge"];
    onBase.lineWidth = 1;
    stroke(onBase, staircase(panel, rank, chart));
  });
  onBase.globalAlpha = 1;
  const top = topOf(panel);
  if (data.limit_bytes && panel.measure === "bytes") {
    const y = heightOf(chart, data.limit_bytes, top);
    onBase.strokeStyle = onBase.fillStyle = theme.ink;
    onBase.setLineDash([5, 4]);
    stroke(onBase, [[toX(0), y], [toX(panel.makespan), y]]);
    onBase.setLineDash([]);
  }
  onBase.fillStyle = theme.ink;
  onBase.textAlign = "left";
  onBase.font = `10px ${FONT}`;
  const limit = data.limit_bytes && panel.measure === "bytes"
    ? `, limit ${levelInWords(data.limit_bytes, "bytes")}` : "";
  const what = panel.measure === "bytes" ? "residuals" : "microbatches";
  onBase.fillText(`${what} of each rank, at most ` +
    `${levelInWords(Math.max(0, ...panel.peaks), panel.measure)}${limit}`,
  left + 4, chart.top - 5);
  onBase.strokeStyle = theme.faint;
  stroke(onBase, [[left, chart.bottom], [width, chart.bottom]]);
}

const tops = {};
function topOf({ measure }) {
  return (tops[measure] ??= topLevel(panels, measure, data.limit_bytes));
}

function heightOf(chart, level, top) {
  return chart.bottom - (level / top) * (chart.bottom - chart.top);
}

function staircase(panel, rank, chart) {
  const { tasks } = panel, top = topOf(panel), points = [];
  let y = heightOf(chart, levelAt(panel, rank, view.from), top);
  points.push([Math.max(left, toX(0)), y]);
  let i = firstAbove(tasks.start, view.from, tasks.first[rank], tasks.first[rank + 1]);
  for (; i < tasks.first[rank + 1] && tasks.start[i] <= view.to; i++) {
    const x = toX(tasks.start[i]);
    points.push([x, y], [x, (y = heightOf(chart, tasks.level[i], top))]);
  }
  points.push([Math.min(width, toX(panel.makespan)), y]);
  return points;
}

function stroke(pen, points) {
  pen.beginPath();
  points.forEach(([x, y]) => pen.lineTo(x, y));
  pen.stroke();
}

/** A transfer, from the row of its sender when it began to that of its receiver. */
function drawArrow(pen, panel, p, i, thickness) {
  const { transfers } = panel, { top } = layout.places[p];
  const rows = [transfers.source[i], transfers.target[i]].map((t) => panel.rank[t]);
  const [from, to] = rows.map((row) => top + (row + 0.5) * layout.row);
  const [x, y] = [toX(transfers.end[i]), to];
  const begin = [toX(transfers.start[i]), from];
  const angle = Math.atan2(y - begin[1], x - begin[0]), size = 4 + 3 * thickness;
  const corner = (turn) => [x - size * Math.cos(angle + turn),
    y - size * Math.sin(angle + turn)];
  for (const [colour, more] of [[theme.ground, 2.5], [theme.ink, 0]]) {
    pen.strokeStyle = colour;
    pen.lineWidth = thickness + more;
    stroke(pen, [begin, [x, y]]);
    stroke(pen, [corner(0.45), [x, y], corner(-0.45)]);
  }
}

/** What is pointed at and what was clicked. */
function drawMarks() {
  onMarks.clearRect(0, 0, width, layout.height);
  clipped(onMarks, () => {
    if (pointed) drawPointed(pointed);
    for (const { panel: p, task } of [kept, pointed].filter((at) => at?.task >= 0)) {
      const panel = panels[p];
      outline(p, panel.rank[task], panel.tasks, task);
      for (const i of [...panel.incoming[task], ...panel.outgoing[task]])
        drawArrow(onMarks, panel, p, i, 1.6);
    }
  });
}

function drawPointed({ panel: p, rank, task, bubble, time }) {
  const panel = panels[p], { chart } = layout.places[p];
  onMarks.fillStyle = theme.faint;
  onMarks.fillRect(toX(time), 0, 1, layout.height);
  if (bubble >= 0 && task < 0) outline(p, rank, panel.bubbles, bubble);
  const curve = staircase(panel, rank, chart);
  onMarks.strokeStyle = theme["memory-edge"];
  onMarks.lineWidth = 2;
  stroke(onMarks, curve);
  onMarks.lineTo(curve.at(-1)[0], chart.bottom);
  onMarks.lineTo(curve[0][0], chart.bottom);
  onMarks.globalAlpha = 0.45;
  onMarks.fillStyle = theme.memory;
  onMarks.fill();
  onMarks.globalAlpha = 1;
}

function outline(p, rank, columns, i) {
  const x = toX(columns.start[i]), y = layout.places[p].top + rank * layout.row;
  onMarks.strokeStyle = theme.ink;
  onMarks.lineWidth = 2;
  onMarks.strokeRect(x, y, Math.max(toX(columns.end[i]) - x - 1, 2), layout.row - 1);
}
