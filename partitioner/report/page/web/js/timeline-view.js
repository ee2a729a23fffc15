// The timeline: two lanes a device, idle time hatched, the critical path marked.

const LANE_PX = 19; // least height of a lane

function startTimeline(plan) {
  const view = { plan, line: null, chart: null, pieces: [], left: 132, span: [0, 1], cursor: -1 };
  view.chosen = new Set();
  view.fill = () => fillTimeline(view);
  view.tip = (piece) => pieceTip(view, piece);
  view.tap = (piece) => tapEvent(view, piece.event);
  const choice = byId("timeline-choice");
  choice.append(
    ...plan.timelines.map((timeline, index) =>
      el("option", { value: String(index) }, plain(timeline.label)),
    ),
  );
  choice.addEventListener("change", () => chooseTimeline(view, Number(choice.value)));
  byId("timeline-critical").addEventListener("change", framed(view.fill));
  byId("timeline-fit").addEventListener("click", () => zoomGantt(view, 0, view.line.end_s));
  byId("timeline-png").addEventListener("click", () => saveChartPng(view.chart, "timeline.png"));
  byId("timeline-svg").addEventListener("click", () => saveChartSvg(view.chart, "timeline.svg"));
  byId("timeline-canvas").addEventListener("keydown", (event) => timelineKey(view, event));
  onSelect((item, from) => markTimeline(view, item, from !== "timeline"));
  return view;
}

function showTimeline(view) {
  if (view.chart) return view.fill();
  if (!view.plan.timelines.length)
    return byId("timeline-canvas").append("The plan has no timeline.");
  const first = firstTimeline(view.plan);
  byId("timeline-choice").value = String(first);
  readInto(view, first);
  view.names = laneNames(view.plan).flatMap((name) => [name, "comm"]);
  makeGantt(view, byId("timeline-canvas"), (now) => timelineOption(view, now));
  view.chart.getZr().on("click", (event) => event.target || select(null, "timeline"));
  markTimeline(view, selection.current, true);
}

function readInto(view, index) {
  view.line = readTimeline(view.plan.timelines[index], view.plan.devices.length);
  view.span = [0, view.line.end_s];
}

function chooseTimeline(view, index) {
  readInto(view, index);
  view.draw();
}

function timelineOption(view, now) {
  const room = Math.max(4, Math.floor((byId("timeline-canvas").clientHeight - 90) / LANE_PX));
  view.room = view.names.length > room ? room : null;
  return ganttOption(view, now, {
    room: view.room,
    label: { formatter: (label, at) => laneLabel(view.line, label, at) },
    series: ["idle", "events", "path", "phases"],
  });
}

function laneLabel(line, label, at) {
  return at % 2 ? "comm" : `${label}, ${share(idleShare(line, at / 2))} idle`;
}

function fillTimeline(view) {
  const { chart, line } = view;
  if (!chart || !view.element.clientWidth) return;
  const now = theme();
  const [from, to] = view.span;
  const perPixel = secondsPerPixel(view);
  const idle = line.idle.flatMap((spans, device) =>
    spans
      .filter(([start, end]) => end > from && start < to && end - start > perPixel)
      .map(([start, end]) => [start, 2 * device, end]),
  );
  const steps = pathSteps(line, from, to);
  const fill = hatch(now.soft, now.idle);
  const dim = view.chosen.size > 0 && [...view.chosen].some((ref) => line.byRef.has(ref));
  const look = { now, dim, pathOnly: byId("timeline-critical").checked };
  chart.setOption({
    series: [
      { id: "idle", data: idle, renderItem: (_, api) => idleShape(api, fill) },
      eventSeries(view, (piece, api) => pieceShape(view, look, piece, api)),
      {
        id: "phases",
        data: streamPhases(line).map(([, start, end]) => [start, 0, end]),
        z: 6,
        encode: { x: [0, 2], y: 1 },
        renderItem: (params, api) => phaseShape(now, streamPhases(line), params, api),
      },
      {
        id: "path",
        data: steps.length > 600 ? [] : steps,
        z: 5,
        encode: { x: [0, 2], y: [1, 3] },
        renderItem: (_, api) => stepShape(now, api),
      },
    ],
  });
}

function idleShape(api, fill) {
  return {
    type: "rect",
    shape: laneBox(api, api.value(0), api.value(1), api.value(2)),
    style: { fill },
  };
}

function pieceColour({ plan, line }, now, piece) {
  if (piece.lane % 2) return now.comm;
  if (isPass(line, piece.event)) return passColour(line.passes[piece.event], now);
  const row = plan.nodes[line.ref[piece.event]];
  const fill = row ? plan.fills[row.group] : null;
  return fill && !fill.striped ? fill.colours[0] : deviceColour(piece.lane / 2);
}

function pieceShape(view, { now, dim, pathOnly }, piece, api) {
  const { plan, line } = view;
  const ref = line.ref[piece.event];
  const fill = pieceColour(view, now, piece);
  const faint = (dim && !view.chosen.has(ref)) || (pathOnly && !piece.critical);
  const ink = faint ? now.ink : inkOf(fill, now);
  return ganttShape(view, now, piece, api, {
    fill,
    opacity: faint ? 0.3 : 1,
    marks: (box) => (piece.critical ? [criticalMark(now, box)] : []),
    text: (box) =>
      isPass(line, piece.event)
        ? passText(now, plain(line.passes[piece.event]), box, ink)
        : boxText(view, now, box, taskName(plan, ref), ink),
  });
}

function criticalMark(now, box) {
  if (box.width <= 3)
    return { type: "rect", shape: { ...box, height: 3 }, style: { fill: now.warn } };
  return {
    type: "rect",
    shape: { x: box.x + 1, y: box.y + 1, width: box.width - 2, height: box.height - 2 },
    style: { fill: "none", stroke: now.warn, lineWidth: 1.5 },
  };
}

/** Whether an event is a whole pass of a stage, not a task in one. */
function isPass(line, event) {
  return line.byPass && Boolean(line.passes[event]);
}

/** Forward, backward and weight passes differ; what runs once a step is grey. */
function passColour(label, now) {
  const letter = label.replace(/^[0-9]+/, "")[0];
  return { F: deviceColour(0), B: deviceColour(1), W: deviceColour(2) }[letter] ?? now.idle;
}

/** The label of a pass in the middle of its box; none if the box is too narrow for it. */
function passText(now, label, box, ink) {
  const size = box.width > 9 * label.length ? 12 : 9;
  return {
    type: "text",
    style: {
      text: box.width > 0.62 * size * label.length ? label : "",
      x: box.x + box.width / 2,
      y: box.y + box.height / 2 + 1,
      fontFamily: now.font,
      align: "center",
      verticalAlign: "middle",
      fill: ink,
      fontSize: size,
    },
    silent: true,
  };
}

function taskName(plan, ref) {
  return ref >= 0 ? plan.nodes[ref].op : plan.comms[-1 - ref].kind;
}

/** Type and name of a task, as parts of an element. */
function taskLabel(plan, ref) {
  const { name, value } = ref >= 0 ? plan.nodes[ref] : plan.comms[-1 - ref];
  return [short(taskName(plan, ref), 40), " ", nameOf(name ?? value, 60)];
}

function stepShape(now, api) {
  const [x1, y1] = api.coord([api.value(0), api.value(1)]);
  const [x2, y2] = api.coord([api.value(2), api.value(3)]);
  return {
    type: "line",
    shape: { x1, y1, x2, y2 },
    style: { stroke: now.warn, lineWidth: 1.2, opacity: 0.8 },
  };
}

function pieceTip(view, piece) {
  const { plan, line } = view;
  const where = ["Device", `@${deviceText(plan, [piece.lane >> 1])}`];
  if (piece.many > 1) return shortEventsTip(piece, [where]);
  const ref = line.ref[piece.event];
  const title = isPass(line, piece.event)
    ? plain(line.about[piece.event])
    : el("span", {}, taskLabel(plan, ref));
  return tip(title, [
    where,
    ["Start", seconds(piece.from)],
    ["Duration", seconds(piece.to - piece.from)],
    ["Bytes", ref >= 0 ? "" : size(plan.comms[-1 - ref].bytes)],
    [
      line.turn === "request" ? "Request" : "Micro-batch",
      line.requests > 1 && !isPass(line, piece.event) ? String(line.request[piece.event]) : "",
    ],
    ["Pass", isPass(line, piece.event) ? "" : plain(line.about?.[piece.event] ?? "")],
    ["Critical path", piece.critical ? "yes" : "no"],
  ]);
}
