// The timeline: two lanes a device, idle time hatched, the critical path marked.

const LANE_PX = 19; // least height of a lane

function startTimeline(plan) {
  const view = {
    plan,
    line: null,
    chart: null,
    pieces: [],
    span: [0, 1],
    chosen: new Set(),
    cursor: -1,
    drawSoon: framed(() => fillTimeline(view)),
  };
  const choice = byId("timeline-choice");
  choice.append(
    ...plan.timelines.map((timeline, index) =>
      el("option", { value: String(index) }, plain(timeline.label)),
    ),
  );
  choice.addEventListener("change", () => chooseTimeline(view, Number(choice.value)));
  byId("timeline-critical").addEventListener("change", view.drawSoon);
  byId("timeline-fit").addEventListener("click", () => zoomTimeline(view, 0, view.line.end_s));
  byId("timeline-png").addEventListener("click", () => saveChartPng(view.chart, "timeline.png"));
  byId("timeline-svg").addEventListener("click", () => saveChartSvg(view.chart, "timeline.svg"));
  byId("timeline-canvas").addEventListener("keydown", (event) => timelineKey(view, event));
  onSelect((item, from) => markTimeline(view, item, from !== "timeline"));
  return view;
}

function showTimeline(view) {
  if (view.chart) return fillTimeline(view);
  if (!view.plan.timelines.length)
    return byId("timeline-canvas").append("The plan has no timeline.");
  const first = firstTimeline(view.plan);
  byId("timeline-choice").value = String(first);
  view.line = readTimeline(view.plan.timelines[first], view.plan.devices.length);
  view.span = [0, view.line.end_s];
  const made = makeChart(
    byId("timeline-canvas"),
    (now) => timelineOption(view, now),
    () => fillTimeline(view),
  );
  const { chart } = made;
  view.chart = chart;
  view.draw = made.draw;
  chart.on("datazoom", () => {
    const { startValue, endValue } = chart.getOption().dataZoom[0];
    view.span = [startValue, endValue];
    view.drawSoon();
  });
  chart.on(
    "click",
    ({ seriesId, dataIndex }) => seriesId === "events" && tapPiece(view, view.pieces[dataIndex]),
  );
  chart.getZr().on("click", (event) => event.target || select(null, "timeline"));
  markTimeline(view, selection.current, true);
}

function chooseTimeline(view, index) {
  view.line = readTimeline(view.plan.timelines[index], view.plan.devices.length);
  view.span = [0, view.line.end_s];
  view.draw();
}

function timelineOption(view, now) {
  const { line, plan } = view;
  const lanes = laneNames(plan).flatMap((name) => [name, "comm"]);
  const room = Math.max(4, Math.floor((byId("timeline-canvas").clientHeight - 90) / LANE_PX));
  const crowded = lanes.length > room;
  view.room = crowded ? room : null;
  const yZoom = {
    type: "slider",
    yAxisIndex: 0,
    right: 6,
    width: 16,
    startValue: 0,
    endValue: room,
    showDetail: false,
    ...zoomLook(now),
  };
  return {
    ...baseOption(now),
    tooltip: {
      ...baseOption(now).tooltip,
      trigger: "item",
      formatter: ({ seriesId, dataIndex }) =>
        seriesId === "events" ? pieceTip(view, view.pieces[dataIndex]) : "",
    },
    grid: { left: 132, right: crowded ? 34 : 18, top: 30, bottom: 52 },
    xAxis: {
      type: "value",
      min: 0,
      max: line.end_s,
      position: "top",
      ...axisLook(now),
      axisLabel: {
        color: now.ink,
        formatter: (value) => timeTick(value, view.span),
        hideOverlap: true,
        showMaxLabel: false,
      },
    },
    yAxis: {
      type: "category",
      data: lanes,
      inverse: true,
      ...axisLook(now),
      axisLabel: {
        color: now.ink,
        interval: 0,
        formatter: (label, at) => laneLabel(line, label, at),
      },
      splitLine: { show: true, interval: (at) => at % 2 === 0, lineStyle: { color: now.line } },
    },
    dataZoom: [
      {
        type: "inside",
        xAxisIndex: 0,
        filterMode: "none",
        startValue: view.span[0],
        endValue: view.span[1],
      },
      {
        type: "slider",
        xAxisIndex: 0,
        filterMode: "none",
        bottom: 10,
        height: 22,
        labelFormatter: (value) => seconds(value),
        ...zoomLook(now),
      },
      ...(crowded ? [yZoom] : []),
    ],
    series: ["idle", "events", "path", "phases"].map((id) => ({
      id,
      type: "custom",
      data: [],
      clip: true,
      silent: id !== "events",
      renderItem: () => null,
    })),
  };
}

/** A time in the unit of a span, with as many digits as tell its ticks apart. */
function timeTick(value, [from, to]) {
  const [unit, scale] = [
    ["s", 1],
    ["ms", 1e-3],
    ["µs", 1e-6],
    ["ns", 1e-9],
  ].find(([, scale]) => to >= scale) ?? ["ns", 1e-9];
  const decimals = Math.max(0, Math.ceil(-Math.log10((to - from) / scale / 5)));
  return `${(value / scale).toFixed(Math.min(decimals, 9))} ${unit}`;
}

function laneLabel(line, label, at) {
  return at % 2 ? "comm" : `${label}, ${share(idleShare(line, at / 2))} idle`;
}

/** Draws what the span shows; narrow events together. */
function fillTimeline(view) {
  const { chart, line, plan } = view;
  if (!chart || !byId("timeline-canvas").clientWidth) return;
  const now = theme();
  const [from, to] = view.span;
  const perPixel = (to - from) / Math.max(100, chart.getWidth() - 150);
  const pathOnly = byId("timeline-critical").checked;
  const pieces = line.lanes.flatMap((_, lane) =>
    lanePieces(line, lane, from, to, perPixel, view.chosen),
  );
  view.pieces = pieces;
  const idle = line.idle.flatMap((spans, device) =>
    spans
      .filter(([start, end]) => end > from && start < to && end - start > perPixel)
      .map(([start, end]) => [start, 2 * device, end]),
  );
  const steps = pathSteps(line, from, to);
  const fill = hatch(now.soft, now.idle);
  const dim = view.chosen.size > 0 && [...view.chosen].some((ref) => line.byRef.has(ref));
  const look = { now, plan, line, dim, pathOnly, chosen: view.chosen };
  chart.setOption({
    series: [
      { id: "idle", data: idle, renderItem: (_, api) => idleShape(api, fill) },
      {
        id: "events",
        data: pieces.map((piece) => [piece.from, piece.lane, piece.to]),
        encode: { x: [0, 2], y: 1 },
        renderItem: (params, api) => pieceShape(look, pieces[params.dataIndex], api),
      },
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

function laneBox(api, from, lane, to, least = 1) {
  const [left, middle] = api.coord([from, lane]);
  const [right] = api.coord([to, lane]);
  const height = api.size([0, 1])[1] * 0.86;
  return { x: left, y: middle - height / 2, width: Math.max(least, right - left), height };
}

function idleShape(api, fill) {
  return {
    type: "rect",
    shape: laneBox(api, api.value(0), api.value(1), api.value(2)),
    style: { fill },
  };
}

function pieceColour({ plan, line, now }, piece) {
  if (piece.lane % 2) return now.comm;
  if (isPass(line, piece.event)) return passColour(line.passes[piece.event], now);
  const row = plan.nodes[line.ref[piece.event]];
  const fill = row ? plan.fills[row.group] : null;
  return fill && !fill.striped ? fill.colours[0] : deviceColour(piece.lane / 2);
}

function pieceShape(look, piece, api) {
  const { now, line } = look;
  const chosen = look.chosen.has(line.ref[piece.event]);
  const box = laneBox(api, piece.from, piece.lane, piece.to, chosen ? 4 : 1);
  const colour = pieceColour(look, piece);
  const faint = (look.dim && !chosen) || (look.pathOnly && !piece.critical);
  const edge = { stroke: now.surface, lineWidth: box.width > 3 ? 0.5 : 0 };
  const children = [
    { type: "rect", shape: box, style: { fill: colour, opacity: faint ? 0.3 : 1, ...edge } },
  ];
  if (piece.critical && box.width > 3) {
    children.push({
      type: "rect",
      shape: { x: box.x + 1, y: box.y + 1, width: box.width - 2, height: box.height - 2 },
      style: { fill: "none", stroke: now.warn, lineWidth: 1.5 },
    });
  } else if (piece.critical) {
    children.push({ type: "rect", shape: { ...box, height: 3 }, style: { fill: now.warn } });
  }
  if (chosen)
    children.push({
      type: "rect",
      shape: box,
      style: { fill: "none", stroke: now.accent, lineWidth: 3 },
    });
  if (isPass(line, piece.event)) {
    if (piece.many === 1) children.push(passText(look, piece, box, faint ? now.ink : inkOf(colour, now)));
  } else if (box.width > 40 && piece.many === 1 && box.height > 11)
    children.push(pieceText(look, piece, box, faint ? now.ink : inkOf(colour, now)));
  return { type: "group", children };
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

function inkOf(colour, now) {
  return colour.startsWith("#") && colour.length === 7 ? inkOn(colour) : now.ink;
}

/** The label of a pass in the middle of its box; none if the box is too narrow for it. */
function passText({ line, now }, piece, box, ink) {
  const label = plain(line.passes[piece.event]);
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

function pieceText({ plan, line, now }, piece, box, ink) {
  const text = short(taskName(plan, line.ref[piece.event]), 60);
  const left = Math.max(box.x, 132);
  return {
    type: "text",
    style: {
      text,
      x: left + 4,
      y: box.y + box.height / 2 + 1,
      width: box.width - 8 - (left - box.x),
      overflow: "truncate",
      ellipsis: "…",
      fontFamily: now.font,
      verticalAlign: "middle",
      fill: ink,
      fontSize: 11,
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
  if (!piece) return "";
  const { plan, line } = view;
  const device = piece.lane >> 1;
  if (piece.many > 1) {
    return tip(`${count(piece.many)} short events`, [
      ["Device", `@${deviceText(plan, [device])}`],
      ["From", seconds(piece.from)],
      ["To", seconds(piece.to)],
      ["", "click to zoom in"],
    ]);
  }
  const ref = line.ref[piece.event];
  const title = isPass(line, piece.event)
    ? plain(line.about[piece.event])
    : el("span", {}, taskLabel(plan, ref));
  return tip(title, [
    ["Device", `@${deviceText(plan, [device])}`],
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
