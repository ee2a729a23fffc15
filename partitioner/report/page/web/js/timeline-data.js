// Events by lane, and which rectangles show a span of them on so many pixels.

const COMPUTE = 0;
const SMALLEST_PX = 1.5; // narrower events are drawn together
const GAP_PX = 6; // a shorter gap, as of a communication, parts neither modules nor the path
const NAMED_PX = 17; // of a name
const MOSTLY = 0.7; // a module whose parts have names in a smaller share of its time is drawn whole

/**
 * Rows (equal devices), their lanes (compute and communication), idle spans and marks.
 *
 * Devices whose events are equal are one row, which has the events of the first of them.
 */
function readTimeline(timeline, plan) {
  const order = timeline.start_s
    .map((_, event) => event)
    .sort(
      (a, b) => timeline.start_s[a] - timeline.start_s[b] || timeline.ref[a] - timeline.ref[b],
    );
  const { rows, row, same } = equalRows(timeline, order, plan);
  const line = { ...timeline, rows, row, lanes: rows.flatMap(() => [[], []]), byRef: new Map() };
  line.shownRef = new Map(order.map((event) => [timeline.ref[event], timeline.ref[same[event]]]));
  for (const event of order) {
    if (same[event] !== event) continue;
    line.lanes[laneOf(line, event)].push(event);
    const ref = timeline.ref[event];
    if (line.byRef.has(ref)) line.byRef.get(ref).push(event);
    else line.byRef.set(ref, [event]);
  }
  line.idle = rows.map((_, at) => idleSpans(line, line.lanes[2 * at], line.lanes[2 * at + 1]));
  line.byPass = Boolean(timeline.passes) && timeline.label.endsWith("pass by pass");
  line.critical = timeline.critical.map((event) => same[event]);
  line.onPath = new Set(line.critical);
  const chains = boxChains(plan);
  // What an event is drawn as where it has no room: its pass, then the boxes that hold it.
  line.boxAt = (event, depth) => {
    if (line.byPass || timeline.kind[event] !== COMPUTE) return undefined;
    if (!timeline.passes) return chains[timeline.ref[event]]?.[depth];
    return depth ? chains[timeline.ref[event]]?.[depth - 1] : timeline.passes[event];
  };
  return line;
}

/**
 * Devices by equal events: {rows of devices, the row of each, the event of the row for each}.
 *
 * Communications of as many bytes of one value are equal: each group of ranks has its own.
 */
function equalRows(timeline, order, { devices, comms }) {
  const own = devices.map(() => []);
  for (const event of order) own[timeline.device[event]].push(event);
  const { kind, ref, request, start_s: start, duration_s: duration } = timeline;
  const found = new Map();
  const [row, same] = [[], []];
  own.forEach((events, device) => {
    const what = ({ kind, value, bytes }) => `${kind} ${value} ${bytes}`;
    const facts = events.map((at) => [
      kind[at],
      ref[at] >= 0 ? ref[at] : what(comms[-1 - ref[at]]),
      request[at],
      start[at],
      duration[at],
    ]);
    const key = `${devices[device].name} ${facts.join(" ")}`;
    if (!found.has(key)) found.set(key, []);
    found.get(key).push(device);
    const first = own[found.get(key)[0]];
    events.forEach((event, at) => (same[event] = first[at]));
  });
  const rows = [...found.values()];
  rows.forEach((members, at) => members.forEach((device) => (row[device] = at)));
  return { rows, row, same };
}

/** The boxes of the overview that hold each node, outermost first. */
function boxChains(plan) {
  if (plan.boxChains) return plan.boxChains;
  const chains = plan.nodes.map(() => []);
  for (const [index, box] of plan.ribbon.boxes.entries()) // a box comes after the one around it
    for (const node of nodesOf(box.nodes)) chains[node].push(index);
  return (plan.boxChains = chains);
}

function laneOf(line, event) {
  return 2 * line.row[line.device[event]] + (line.kind[event] === COMPUTE ? 0 : 1);
}

function endOf(timeline, event) {
  return timeline.start_s[event] + timeline.duration_s[event];
}

/** Spans in which a device neither computes nor communicates. */
function idleSpans(timeline, compute, comm) {
  const events = [...compute, ...comm].sort((a, b) => timeline.start_s[a] - timeline.start_s[b]);
  const spans = [];
  let at = 0;
  for (const event of events) {
    if (timeline.start_s[event] > at) spans.push([at, timeline.start_s[event]]);
    at = Math.max(at, endOf(timeline, event));
  }
  if (timeline.end_s > at) spans.push([at, timeline.end_s]);
  return spans;
}

function idleShare(line, row) {
  return line.end_s
    ? line.idle[row].reduce((sum, [from, to]) => sum + to - from, 0) / line.end_s
    : 0;
}

/**
 * Rectangles of one lane between two times: {from, to, event, many}, of a module with its `box`.
 *
 * Of a module whose parts have no room for their names it is one, of very short events, too.
 */
function lanePieces(line, lane, from, to, perPixel, chosen) {
  const events = line.lanes[lane];
  const first = firstEndingAfter(line, events, from);
  const after = events.findIndex((event, at) => at >= first && line.start_s[event] > to);
  const seen = events.slice(first, after < 0 ? events.length : after);
  const pieces = [];
  let open = null;
  for (const piece of boxedPieces(line, seen, 0, perPixel, chosen)) {
    const small =
      piece.to - piece.from < SMALLEST_PX * perPixel && !chosen.has(line.ref[piece.event]);
    const near = open && piece.from - open.to < perPixel && piece.critical === open.critical;
    if (small && near) {
      open.to = Math.max(open.to, piece.to);
      open.many += piece.many;
      open.box = undefined;
      continue;
    }
    pieces.push({ ...piece, lane });
    open = small ? pieces.at(-1) : null;
  }
  return pieces;
}

/** Events in runs of one box, which are one piece where few parts inside have room for names. */
function boxedPieces(line, events, depth, perPixel, chosen) {
  const runs = boxRuns(line, events, depth, perPixel, chosen);
  return runs.flatMap(({ events: held, from, to, critical, box }) => {
    const whole = { from, to, event: held[0], many: held.length, critical, box };
    if (held.length === 1) return [{ ...whole, box: undefined }];
    const parts = boxedPieces(line, held, depth + 1, perPixel, chosen);
    const wide = parts.filter((part) => part.to - part.from >= NAMED_PX * perPixel);
    const named = wide.reduce((sum, part) => sum + part.to - part.from, 0);
    return parts.length > 1 && named < MOSTLY * (to - from) ? [whole] : parts;
  });
}

/**
 * Runs of events of one box: {events, from, to, critical, box}.
 *
 * Short events of others between them, as an update between two gradients, are in the run.
 */
function boxRuns(line, events, depth, perPixel, chosen) {
  const marked = (event) => chosen.has(line.ref[event]);
  const seen = events.filter((event) => line.duration_s[event] || marked(event));
  const boxOf = (event) => (marked(event) ? undefined : line.boxAt(event, depth));
  const runs = [];
  for (let at = 0; at < seen.length; ) {
    const [first, box, critical] = [seen[at], boxOf(seen[at]), line.onPath.has(seen[at])];
    let [last, to] = [at, endOf(line, first)];
    for (let next = at + 1; box !== undefined && next < seen.length; next += 1) {
      const event = seen[next];
      const near = line.start_s[event] - to < GAP_PX * perPixel;
      const alike = critical === line.onPath.has(event);
      if (!near || !alike || line.request[event] !== line.request[first]) break;
      if (boxOf(event) === box) [last, to] = [next, endOf(line, event)];
      else if (marked(event) || line.duration_s[event] >= (GAP_PX / 2) * perPixel) break;
    }
    runs.push({ events: seen.slice(at, last + 1), from: line.start_s[first], to, critical, box });
    at = last + 1;
  }
  return runs;
}

/** Runs of events of the critical path on one lane: [from, lane, to]. */
function pathRuns(line, from, to, perPixel) {
  const runs = [];
  line.lanes.forEach((events, lane) => {
    let open = null;
    for (const event of events) {
      const [start, end] = [line.start_s[event], endOf(line, event)];
      if (!line.onPath.has(event) || end < from || start > to) continue;
      if (open && start - open[2] < GAP_PX * perPixel) open[2] = end;
      else runs.push((open = [start, lane, end]));
    }
  });
  return runs;
}

/** Events of a lane do not overlap: their ends rise like their starts. */
function firstEndingAfter(line, events, time) {
  let [low, high] = [0, events.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (endOf(line, events[middle]) < time) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** Steps of the critical path from one lane to another that can be seen. */
function pathSteps(line, from, to) {
  const steps = [];
  for (let at = 1; at < line.critical.length; at += 1) {
    const [before, after] = [line.critical[at - 1], line.critical[at]];
    const [start, end] = [endOf(line, before), line.start_s[after]];
    const [low, high] = [laneOf(line, before), laneOf(line, after)];
    if (low !== high && end >= from && start <= to) steps.push([start, low, end, high]);
  }
  return steps;
}
