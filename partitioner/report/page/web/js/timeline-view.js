// The timeline: a row of equal devices, its communication a thin lane; idle time hatched, the
// critical path outlined.

const ROW_PX = 34; // least height of a row
const MOST_STEPS = 80; // of the critical path that are drawn at once
const COMM_PX = [4, 12]; // height of the lane of communication

function startTimeline(plan) {
  const view = { plan, line: null, chart: null, pieces: [], left: 132, span: [0, 1], cursor: -1 };
  view.chosen = new Set();
  view.band = (lane, height) => ({ row: lane >> 1, ...bandOf(lane % 2, height) });
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

/** From where to where a lane is in its row, in pixels from the middle. */
function bandOf(comm, height) {
  const edge = 0.44 * height;
  const thin = Math.max(COMM_PX[0], Math.min(COMM_PX[1], 0.2 * height));
  return comm ? { top: edge - thin, bottom: edge } : { top: -edge, bottom: edge - thin - 4 };
}

function showTimeline(view) {
  if (view.chart) return view.fill();
  if (!view.plan.timelines.length)
    return byId("timeline-canvas").append("The plan has no timeline.");
  const first = firstTimeline(view.plan);
  byId("timeline-choice").value = String(first);
  readInto(view, first);
  makeGantt(view, byId("timeline-canvas"), (now) => timelineOption(view, now));
  view.chart.getZr().on("click", (event) => event.target || select(null, "timeline"));
  markTimeline(view, selection.current, true);
}

function readInto(view, index) {
  const { plan } = view;
  const line = readTimeline(plan.timelines[index], plan);
  view.line = line;
  view.span = [0, line.end_s];
  view.names = line.rows.map(
    (row) => `${short(deviceText(plan, row), 12)}: ${short(plan.devices[row[0]].name, 14)}`,
  );
  byId("timeline-legend").replaceChildren(...timelineLegend(view));
}

function chooseTimeline(view, index) {
  readInto(view, index);
  markTimeline(view, selection.current, false);
  view.draw();
}

function timelineOption(view, now) {
  const room = Math.max(4, Math.floor((byId("timeline-canvas").clientHeight - 90) / ROW_PX));
  view.room = view.names.length > room ? room : null;
  return ganttOption(view, now, {
    room: view.room,
    label: { formatter: (label, row) => rowLabel(view.line, label, row), lineHeight: 15 },
    series: ["idle", "events", "path", "steps", "phases"],
    together: 1,
  });
}

/** A row's devices and, where that is more than what rounding leaves, how long they idle. */
function rowLabel(line, label, row) {
  const idle = idleShare(line, row);
  return idle < 5e-4 ? label : `${label}\n${share(idle)} idle`;
}

/** The legend of what is drawn: no colour that is not there. */
function timelineLegend({ plan, line }) {
  const passes = new Set(line.byPass ? line.passes.map(passLetter) : []);
  const solid = plan.fills.every((fill) => !fill.striped);
  const named = [
    ["F", deviceColour(0), "F: forward pass"],
    ["B", deviceColour(1), "B: backward pass"],
    ["W", deviceColour(2), "W: weight gradients"],
  ].filter(([letter]) => passes.has(letter));
  const compute = `compute, in the colour of ${solid ? "its devices" : "the device"}`;
  const [now, used] = [theme(), new Set()];
  line.lanes.forEach((events, lane) => {
    if (lane % 2 || line.byPass) return;
    for (const event of events) used.add(pieceColour({ plan, line }, now, { lane, event }));
  });
  const idle = line.idle.some((_, row) => idleShare(line, row) >= 5e-4);
  return [
    ...(used.size ? [key(striped([...used]), compute)] : []),
    ...named.map(([, colour, text]) => key(colour, text)),
    ...(line.kind.some((kind) => kind !== COMPUTE) ? [key("var(--comm)", "communication")] : []),
    ...(idle ? [key("", line.byPass ? "idle: a bubble" : "idle", "idle")] : []),
    ...(line.critical.length ? [key("", "critical path", "outline")] : []),
  ];
}

function fillTimeline(view) {
  const { chart, line } = view;
  if (!chart || !view.element.clientWidth) return;
  const now = theme();
  const [from, to] = view.span;
  const perPixel = secondsPerPixel(view);
  const idle = line.idle.flatMap((spans, row) =>
    spans
      .filter(([start, end]) => end > from && start < to && end - start > perPixel)
      .map(([start, end]) => [start, row, end]),
  );
  const runs = pathRuns(line, from, to, perPixel);
  const steps = pathSteps(line, from, to);
  const fill = hatch(now.soft, now.idle);
  const dim = view.chosen.size > 0 && [...view.chosen].some((ref) => line.byRef.has(ref));
  const look = { now, dim, pathOnly: byId("timeline-critical").checked };
  chart.setOption({
    series: [
      { id: "idle", data: idle, renderItem: (_, api) => idleShape(view, api, fill) },
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
        data: runs.map(([start, lane, end]) => [start, lane >> 1, end]),
        z: 5,
        encode: { x: [0, 2], y: 1 },
        renderItem: ({ dataIndex }, api) => outlineShape(view, now, runs[dataIndex], api),
      },
      {
        id: "steps",
        data: steps.length > MOST_STEPS ? [] : steps.map(([start, low, end]) => [start, low >> 1, end]),
        z: 5,
        encode: { x: [0, 2], y: 1 },
        renderItem: ({ dataIndex }, api) => stepShape(view, now, steps[dataIndex], api),
      },
    ],
  });
}

function idleShape(view, api, fill) {
  return {
    type: "rect",
    shape: laneBox(view, api, api.value(0), 2 * api.value(1), api.value(2)),
    style: { fill },
  };
}

function pieceColour({ plan, line }, now, piece) {
  if (piece.lane % 2) return now.comm;
  if (isPass(line, piece.event)) return passColour(line.passes[piece.event], now);
  const row = plan.nodes[line.ref[piece.event]];
  const fill = row ? plan.fills[row.group] : null;
  return fill && !fill.striped ? fill.colours[0] : deviceColour(line.rows[piece.lane >> 1][0]);
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
    text: (box) =>
      isPass(line, piece.event)
        ? passText(now, plain(line.passes[piece.event]), box, ink)
        : boxText(view, now, box, pieceNames(plan, piece, ref), ink),
  });
}

/** What a piece is, the longest name first: the module of several events, one's type and name. */
function pieceNames(plan, piece, ref) {
  if (piece.many > 1) {
    const name = piece.box === undefined ? "" : moduleName(plan, piece.box);
    return [name, name.split(".").slice(/\.\d+(-\d+)?$/.test(name) ? -2 : -1).join(".")];
  }
  const type = taskName(plan, ref).split("::").at(-1);
  return ref >= 0 ? [`${type} ${shortName(plan.nodes[ref])}`, type] : [type];
}

/** The name of what stands for several events: a pass, or a box of the overview. */
function moduleName(plan, box) {
  return typeof box === "string" ? plain(box) : boxName(plan, plan.ribbon.boxes[box], true);
}

/** A frame around events of the critical path that follow each other. */
function outlineShape(view, now, [start, lane, end], api) {
  const { x, y, width, height } = laneBox(view, api, start, lane, end);
  return {
    type: "rect",
    shape: { x, y: y - 1, width, height: height + 2 },
    style: { fill: "none", stroke: now.warn, lineWidth: width < 4 ? 1 : 2 },
  };
}

/** Whether an event is a whole pass of a stage, not a task in one. */
function isPass(line, event) {
  return line.byPass && Boolean(line.passes[event]);
}

/** Forward, backward and weight passes differ; what runs once a step is grey. */
function passColour(label, now) {
  return (
    { F: deviceColour(0), B: deviceColour(1), W: deviceColour(2) }[passLetter(label)] ?? now.idle
  );
}

/** The "F" of "F2" or of "1F2". */
function passLetter(label) {
  return label.replace(/^[0-9]+/, "")[0];
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

/** A line from the end of an event to the begin of one on another lane. */
function stepShape(view, now, [start, low, end, high], api) {
  const from = laneBox(view, api, start, low, start);
  const to = laneBox(view, api, end, high, end);
  const [a, b] = low < high ? [from.y + from.height, to.y] : [from.y, to.y + to.height];
  return {
    type: "line",
    shape: { x1: from.x, y1: a, x2: to.x, y2: b },
    style: { stroke: now.warn, lineWidth: 1.2, opacity: 0.8 },
  };
}

function pieceTip(view, piece) {
  const { plan, line } = view;
  const devices = line.rows[piece.lane >> 1];
  const where = [devices.length > 1 ? "Devices" : "Device", `@${deviceText(plan, devices)}`];
  if (piece.many > 1) {
    const { box } = piece;
    const several = `${count(piece.many)} ${box === undefined ? "short events" : "operators"}`;
    const module = box === undefined ? [] : [["Module", moduleName(plan, box)]];
    return shortEventsTip(piece, several, [...module, where]);
  }
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
