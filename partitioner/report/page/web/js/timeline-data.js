// Events by lane, and which rectangles show a span of them on so many pixels.

const COMPUTE = 0;
const SMALLEST_PX = 1.5; // narrower events are drawn together

/** Lanes (compute and communication of each device), idle spans and marks of a timeline. */
function readTimeline(timeline, devices) {
  const lanes = Array.from({ length: 2 * devices }, () => []);
  const order = timeline.start_s
    .map((_, event) => event)
    .sort((a, b) => timeline.start_s[a] - timeline.start_s[b]);
  const byRef = new Map();
  for (const event of order) {
    lanes[laneOf(timeline, event)].push(event);
    const ref = timeline.ref[event];
    if (byRef.has(ref)) byRef.get(ref).push(event);
    else byRef.set(ref, [event]);
  }
  const idle = Array.from({ length: devices }, (_, device) =>
    idleSpans(timeline, lanes[2 * device], lanes[2 * device + 1]),
  );
  const byPass = Boolean(timeline.passes) && timeline.label.endsWith("pass by pass");
  return { ...timeline, lanes, idle, byRef, byPass, onPath: new Set(timeline.critical) };
}

function laneOf(timeline, event) {
  return 2 * timeline.device[event] + (timeline.kind[event] === COMPUTE ? 0 : 1);
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

function idleShare(line, device) {
  return line.end_s
    ? line.idle[device].reduce((sum, [from, to]) => sum + to - from, 0) / line.end_s
    : 0;
}

/** Rectangles of one lane between two times: {from, to, event} or, of several events, {many}. */
function lanePieces(line, lane, from, to, perPixel, chosen) {
  const events = line.lanes[lane];
  const pieces = [];
  let open = null;
  for (let at = firstEndingAfter(line, events, from); at < events.length; at += 1) {
    const event = events[at];
    const start = line.start_s[event];
    if (start > to) break;
    const end = endOf(line, event);
    const small = end - start < SMALLEST_PX * perPixel && !chosen.has(line.ref[event]);
    const critical = line.onPath.has(event);
    if (small && open && start - open.to < perPixel && critical === open.critical) {
      open.to = Math.max(open.to, end);
      open.many += 1;
      continue;
    }
    const piece = { from: start, to: end, event, many: 1, critical, lane };
    pieces.push(piece);
    open = small ? piece : null;
  }
  return pieces;
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
