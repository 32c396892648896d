"use strict";
// What a timeline shows, where and in which words: functions of their arguments alone.
// A panel is a run, as html_timeline.py writes it: columns of tasks, transfers and
// bubbles. Tasks and bubbles are sorted by rank, then time; those of rank r are the
// ones from first[r] to first[r + 1]. Times are in seconds, positions in pixels.

const KINDS = { F: "forward", B: "backward", W: "weight gradient" };
const CAUSES = {
  fill: "before the first task of the rank",
  drain: "after the last task of the rank",
  input: "nothing was ready, and what the next task waited for did not exist yet",
  transfer: "what the next task waited for was under way",
  held: "some task was ready and yet not begun",
};
const TITLE = 24, AXIS = 20, GAP = 12, CHART = 78, LEAST_ROW = 6, LARGEST_ROW = 24;
const DEEPEST = 1e-6; // of the longest run: as far in as one can zoom

const clamp = (value, least, most) => Math.min(Math.max(value, least), most);

/** Adds to a panel what is looked up often: by task, its rank, its transfers in and
 * out, and when its last input was there. */
function indexed(panel) {
  const { tasks, transfers } = panel;
  const count = tasks.start.length;
  const incoming = Array.from({ length: count }, () => []);
  const outgoing = Array.from({ length: count }, () => []);
  transfers.source.forEach((source, i) => {
    outgoing[source].push(i);
    incoming[transfers.target[i]].push(i);
  });
  const rank = new Int32Array(count);
  panel.ranks.forEach((_, r) => rank.fill(r, tasks.first[r], tasks.first[r + 1]));
  const ready = tasks.local.map((local, task) =>
    Math.max(0, ...local.map((i) => tasks.end[i]),
      ...incoming[task].map((i) => transfers.end[i])));
  return { ...panel, incoming, outgoing, rank, ready };
}

/** The notation of a task, such as 3B17. */
function nameOf({ tasks }, i) {
  return `${tasks.stage[i]}${tasks.kind[i]}${tasks.microbatch[i]}`;
}

/** The index in from .. to of the first value above `limit`, of ascending ones. */
function firstAbove(values, limit, from, to) {
  while (from < to) {
    const middle = (from + to) >> 1;
    if (values[middle] > limit) to = middle;
    else from = middle + 1;
  }
  return from;
}

/** The task (or bubble) of a rank that holds `time`; else the nearest within `slack`,
 * so that what is narrower than a pixel can be pointed at; else -1. */
function intervalAt(columns, rank, time, slack) {
  const last = columns.first[rank + 1];
  let nearest = -1, least = Infinity;
  let i = firstAbove(columns.end, time - slack, columns.first[rank], last);
  for (; i < last && columns.start[i] <= time + slack; i++) {
    const off = Math.max(columns.start[i] - time, time - columns.end[i]);
    if (off < least) [nearest, least] = [i, off];
  }
  return nearest;
}

/** The launch of a rank that was the last one at `time`; -1 before the first. */
function launchAt({ tasks }, rank, time) {
  const first = tasks.first[rank];
  const next = firstAbove(tasks.start, time, first, tasks.first[rank + 1]);
  return next > first ? next - 1 : -1;
}

/** A view that is `factor` times as long, in which `at` stays where it is. */
function zoomed(view, factor, at, longest) {
  const length = view.to - view.from;
  const wanted = clamp(length * factor, longest * DEEPEST, longest);
  return within(at - ((at - view.from) * wanted) / length, wanted, longest);
}

/** The view moved by a part of its length. */
function panned(view, part, longest) {
  const length = view.to - view.from;
  return within(view.from + part * length, length, longest);
}

function within(from, length, longest) {
  from = clamp(from, 0, longest - length);
  return { from, to: from + length };
}

/** About `count` round times in view, and the digits that tell them apart. */
function ticks(view, unit, count) {
  const from = view.from * unit.scale, to = view.to * unit.scale;
  const rough = (to - from) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((each) => each * power >= rough);
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const found = [];
  for (let n = Math.ceil(from / step); n * step <= to; n++) found.push(n * step);
  return { values: found, digits };
}

/** The unit for times up to `longest`, and the digits that a single time gets. */
function unitFor(longest) {
  if (longest >= 10) return { name: "s", scale: 1, digits: 4 };
  if (longest >= 0.01) return { name: "ms", scale: 1e3, digits: 3 };
  return { name: "µs", scale: 1e6, digits: 2 };
}

function timeInWords(seconds, unit) {
  return `${(seconds * unit.scale).toFixed(unit.digits)} ${unit.name}`;
}

/** Bytes in three digits, such as 34.0 MiB, or a number of microbatches. */
function levelInWords(level, measure) {
  if (measure !== "bytes") return `${level} in flight`;
  let unit = 0;
  for (; level >= 1023.5 && unit < 5; unit++) level /= 1024;
  const words = unit ? level.toPrecision(level < 999.5 ? 3 : 4) : level;
  return `${words} ${["B", "KiB", "MiB", "GiB", "TiB", "PiB"][unit]}`;
}

/** Where panels go, one below another: as large as fits into `height`, in reason. */
function arrange(panels, height) {
  const rows = panels.reduce((sum, panel) => sum + panel.ranks.length, 0);
  const fixed = panels.length * (TITLE + GAP + CHART + AXIS + GAP);
  const row = clamp(Math.floor((height - fixed) / rows), LEAST_ROW, LARGEST_ROW);
  let at = 0;
  const places = panels.map((panel) => {
    const top = at + TITLE, bottom = top + row * panel.ranks.length;
    const chart = { top: bottom + GAP, bottom: bottom + GAP + CHART };
    at = chart.bottom + AXIS + GAP;
    return { top, bottom, chart };
  });
  return { row, places, height: at };
}

/** What is at a height: a panel, and of it a rank, or a share of its chart's height. */
function placeAt(layout, y) {
  for (const [panel, { top, bottom, chart }] of layout.places.entries()) {
    if (y >= top && y < bottom)
      return { panel, rank: Math.floor((y - top) / layout.row), share: null };
    if (y >= chart.top && y <= chart.bottom)
      return { panel, rank: null, share: (chart.bottom - y) / CHART };
  }
  return null;
}

/** The rank whose level at `time` is nearest to `level`. */
function rankNear(panel, time, level) {
  let nearest = 0, least = Infinity;
  panel.ranks.forEach((_, rank) => {
    const off = Math.abs(levelAt(panel, rank, time) - level);
    if (off < least) [nearest, least] = [rank, off];
  });
  return nearest;
}

function levelAt(panel, rank, time) {
  const launch = launchAt(panel, rank, time);
  return launch < 0 ? 0 : panel.tasks.level[launch];
}

/** The top of the charts of all panels with one measure: a little above all. */
function topLevel(panels, measure, limit) {
  let most = measure === "bytes" ? Math.max(limit, 1) : 1;
  for (const panel of panels)
    if (panel.measure === measure)
      for (const level of panel.tasks.level) most = Math.max(most, level);
  return 1.08 * most;
}

/** The transfers that are under way in a view. */
function transfersIn({ transfers }, view) {
  const found = [];
  for (let i = 0; i < transfers.start.length; i++)
    if (transfers.end[i] >= view.from && transfers.start[i] <= view.to) found.push(i);
  return found;
}

/** What there is to say of a task, a line each. */
function describeTask(panel, i, unit) {
  const { tasks, transfers } = panel;
  const [start, end] = [tasks.start[i], tasks.end[i]];
  const words = (seconds) => timeInWords(seconds, unit);
  const local = tasks.local[i].map((source) => [tasks.end[source],
    `input ${endedInWords(panel, source, unit)}`]);
  const come = panel.incoming[i].map((moved) => [transfers.end[moved],
    `input ${movedInWords(panel, moved, unit)}`]);
  const inputs = [...local, ...come].sort((a, b) => a[0] - b[0]).map((each) => each[1]);
  return [
    `${nameOf(panel, i)}: ${KINDS[tasks.kind[i]]} of stage ${tasks.stage[i]}, ` +
      `microbatch ${tasks.microbatch[i]}`,
    `${panel.ranks[panel.rank[i]]}, ${words(start)} to ${words(end)}: ` +
      words(end - start),
    ...(inputs.length ? inputs : ["needs no input"]),
    `began ${words(start - panel.ready[i])} after all was there`,
    ...panel.outgoing[i].map((moved) => `sent ${movedInWords(panel, moved, unit)}`),
    `${levelInWords(tasks.level[i], panel.measure)} on the rank after its launch`,
  ];
}

function endedInWords(panel, i, unit) {
  return `${nameOf(panel, i)}, of this rank, ended at ` +
    timeInWords(panel.tasks.end[i], unit);
}

function movedInWords(panel, i, unit) {
  const { tasks, transfers } = panel;
  const [source, target] = [transfers.source[i], transfers.target[i]];
  const words = (seconds) => timeInWords(seconds, unit);
  return `${nameOf(panel, source)} (rank ${panel.rank[source]}) to ` +
    `${nameOf(panel, target)} (rank ${panel.rank[target]}): ` +
    `ended at ${words(tasks.end[source])}, ` +
    `under way ${words(transfers.start[i])} to ${words(transfers.end[i])}`;
}

/** What there is to say of a bubble at a time in it, a line each. */
function describeBubble(panel, i, time, unit) {
  const { transfers, bubbles } = panel;
  const rank = firstAbove(bubbles.first, i, 0, bubbles.first.length) - 1;
  const [cause, until, awaited] = [bubbles.cause, bubbles.until, bubbles.awaited]
    .map((column) => column[i]);
  const [start, end] = [bubbles.start[i], bubbles.end[i]];
  const lines = [
    `${cause}: ${timeInWords(end - start, unit)}, ${CAUSES[cause]}`,
    `${panel.ranks[rank]} was idle ${timeInWords(start, unit)} to ` +
      timeInWords(end, unit),
  ];
  if (until >= 0) lines.push(`then came ${nameOf(panel, until)}`);
  if (awaited >= 0) {
    const moved = panel.incoming[until].find((t) => transfers.source[t] === awaited);
    lines.push(`the last of its inputs: ${moved === undefined
      ? endedInWords(panel, awaited, unit) : movedInWords(panel, moved, unit)}`);
  }
  const ready = cause === "held" ? readyAt(panel, rank, time) : [];
  if (ready.length) {
    const more = ready.length > 8 ? ` and ${ready.length - 8} more` : "";
    const names = ready.slice(0, 8).map((task) => nameOf(panel, task));
    lines.push(`ready at ${timeInWords(time, unit)}: ${names.join(", ")}${more}`);
  }
  return lines;
}

/** The tasks of a rank that were ready at a time and began later. */
function readyAt({ tasks, ready }, rank, time) {
  const found = [];
  for (let i = tasks.first[rank]; i < tasks.first[rank + 1]; i++)
    if (ready[i] <= time && time < tasks.start[i]) found.push(i);
  return found;
}
