// The stream of a timeline: its fill, steady state and drain.

/** The stream, where throughput was asked for and stages of several requests run at once. */
function firstTimeline(plan) {
  if (plan.head.objective !== "throughput" || plan.head.step !== null) return 0;
  return Math.max(0, plan.timelines.findIndex((timeline) => timeline.requests > 1));
}

const IDLE_SHARE = 0.02; // of a lane's work, before and after which it is not in the stream

/**
 * Fill, steady state and drain of a stream: [[name, from, to], ...].
 *
 * The stream is filled once all devices that do anything have begun, and drains from when the
 * first of them is done, but for little that stands apart; none if no time lies between.
 */
function streamPhases(line) {
  if (line.requests < 2 || line.turn !== "request") return [];
  const begun = [];
  const done = [];
  for (let at = 0; at < line.lanes.length; at += 2) {
    const events = [...line.lanes[at], ...line.lanes[at + 1]];
    if (!events.length) continue;
    events.sort((a, b) => line.start_s[a] - line.start_s[b]);
    begun.push(line.start_s[past(line, events)]);
    events.sort((a, b) => endOf(line, b) - endOf(line, a));
    done.push(endOf(line, past(line, events)));
  }
  const [filled, drains] = [Math.max(...begun), Math.min(...done)];
  if (!begun.length || filled >= drains) return [];
  return [
    ["fill", 0, filled],
    ["steady state", filled, drains],
    ["drain", drains, line.end_s],
  ].filter(([, from, to]) => to > from);
}

/** The first of some events with which more than `IDLE_SHARE` of their seconds are done. */
function past(line, events) {
  const secondsOf = (event) => endOf(line, event) - line.start_s[event];
  let left = IDLE_SHARE * events.reduce((sum, event) => sum + secondsOf(event), 0);
  return events.find((event) => (left -= secondsOf(event)) < 0) ?? events[0];
}

/** The name of a part of the stream, at the top of the lanes, and a line where it ends. */
function phaseShape(now, phases, params, api) {
  const [name, , end] = phases[params.dataIndex];
  const { x, y, width, height } = params.coordSys;
  const left = Math.max(x, api.coord([api.value(0), 0])[0]);
  const right = Math.min(x + width, api.coord([end, 0])[0]);
  if (right - left < 7 * name.length) return null;
  const last = params.dataIndex === phases.length - 1;
  const line = { x1: right, y1: y, x2: right, y2: y + height };
  return {
    type: "group",
    children: [
      ...(last
        ? []
        : [{ type: "line", shape: line, style: { stroke: now.ink, lineWidth: 1.5, lineDash: [6, 4] } }]),
      {
        type: "text",
        style: {
          text: name,
          x: (left + right) / 2,
          y: y + height - 16,
          align: "center",
          fontFamily: now.font,
          fontSize: 12,
          fontWeight: "bold",
          fill: now.ink,
          stroke: now.surface,
          lineWidth: 4,
        },
      },
    ],
    silent: true,
  };
}
