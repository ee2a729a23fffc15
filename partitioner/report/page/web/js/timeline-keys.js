// Zooming, clicking and walking through the timeline.

/** Scrolls, where there are more rows than room, to the row of an event. */
function showLane(view, event) {
  if (!view.room) return;
  const row = laneOf(view.line, event) >> 1;
  const { startValue, endValue } = view.chart.getOption().dataZoom[2];
  if (row >= startValue && row <= endValue) return;
  const first = Math.max(0, Math.min(row - 1, view.line.rows.length - 1 - view.room));
  const span = { startValue: first, endValue: first + view.room };
  view.chart.dispatchAction({ type: "dataZoom", dataZoomIndex: 2, ...span });
}

function tapEvent(view, event) {
  view.cursor = event;
  select(itemOfRef(view.line.ref[event]), "timeline");
}

/** Marks the events of a selection and, if none can be seen, moves there. */
function markTimeline(view, item, move) {
  const shown = view.line?.shownRef;
  view.chosen = new Set([...refsOf(view.plan, item)].map((ref) => shown?.get(ref) ?? ref));
  if (!view.chart) return;
  const events = eventsOf(view);
  if (move && events.length) showLane(view, events[0]);
  const [from, to] = view.span;
  const seen = events.some(
    (event) => endOf(view.line, event) >= from && view.line.start_s[event] <= to,
  );
  if (move && events.length && !seen) {
    const middle = (view.line.start_s[events[0]] + endOf(view.line, events[0])) / 2;
    return zoomGantt(view, middle - (to - from) / 2, middle + (to - from) / 2);
  }
  view.fill();
}

function eventsOf(view) {
  return [...view.chosen].flatMap((ref) => view.line.byRef.get(ref) ?? []);
}

/** Zooms so that the events of the selection can be read. */
function zoomToSelection(view) {
  const events = eventsOf(view);
  if (!view.chart || !events.length) return;
  showLane(view, events[0]);
  const { line } = view;
  const from = Math.min(...events.slice(0, 1000).map((event) => line.start_s[event]));
  const to = Math.max(...events.slice(0, 1000).map((event) => endOf(line, event)));
  const room = Math.max(3 * (to - from), 20 * line.duration_s[events[0]], line.end_s / 1000);
  zoomGantt(view, from - room / 2, to + room / 2);
}

function timelineKey(view, event) {
  if (!view.chart || event.ctrlKey || event.metaKey || event.altKey) return;
  const [from, to] = view.span;
  const quarter = (to - from) / 4;
  const actions = {
    ArrowRight: () => stepEvent(view, 1),
    ArrowLeft: () => stepEvent(view, -1),
    ArrowDown: () => stepLane(view, 1),
    ArrowUp: () => stepLane(view, -1),
    Enter: () => selection.current && byId("details").focus(),
    "+": () => zoomGantt(view, from + quarter, to - quarter),
    "-": () => zoomGantt(view, from - 2 * quarter, to + 2 * quarter),
    0: () => zoomGantt(view, 0, view.line.end_s),
  };
  if (!actions[event.key]) return;
  event.preventDefault();
  actions[event.key]();
}

function cursorOf(view) {
  const events = eventsOf(view);
  return events.includes(view.cursor) || !events.length ? view.cursor : events[0];
}

function stepEvent(view, step) {
  const at = cursorOf(view);
  if (at < 0) return goToEvent(view, view.line.lanes.find((lane) => lane.length)?.[0]);
  const lane = view.line.lanes[laneOf(view.line, at)];
  goToEvent(view, lane[lane.indexOf(at) + step]);
}

function stepLane(view, step) {
  const at = cursorOf(view);
  if (at < 0) return stepEvent(view, 0);
  const { line } = view;
  for (let lane = laneOf(line, at) + step; line.lanes[lane]; lane += step) {
    const events = line.lanes[lane];
    const next =
      events[Math.min(events.length - 1, firstEndingAfter(line, events, line.start_s[at]))];
    if (next !== undefined) return goToEvent(view, next);
  }
}

function goToEvent(view, event) {
  if (event === undefined) return;
  const { line, plan } = view;
  view.cursor = event;
  showLane(view, event);
  const [from, to] = view.span;
  const start = line.start_s[event];
  if (start < from || start > to)
    zoomGantt(view, start - (to - from) / 2, start + (to - from) / 2);
  select(itemOfRef(line.ref[event]), "timeline");
  announce(
    `${short(taskName(plan, line.ref[event]), 40)} on device ${deviceText(plan, line.rows[line.row[line.device[event]]])}, at ${seconds(start)} for ${seconds(line.duration_s[event])}`,
  );
}
