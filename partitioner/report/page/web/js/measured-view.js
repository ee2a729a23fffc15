// Predicted beside measured: two lanes a rank on one time axis, and the tasks by their error.

const MEASURED_KINDS = ["compute", "communication", "waiting for other ranks", "layouts"];

function startMeasured(plan) {
  const run = plan.measured;
  const view = { plan, run, chart: null, table: null, span: [0, run.end_s], chosen: new Set() };
  view.drawSoon = framed(() => fillMeasured(view));
  view.lanes = plan.devices.flatMap((_, rank) => [
    measuredLane(run.predicted, rank),
    measuredLane(run.measured, rank),
  ]);
  byId("measured-facts").textContent = measuredFacts(run);
  byId("measured-fit").addEventListener("click", () => zoomMeasured(view, 0, run.end_s));
  byId("measured-png").addEventListener("click", () => saveChartPng(view.chart, "measured.png"));
  byId("measured-ranks").append(measuredRanks(run.ranks));
  byId("measured-legend").append(
    key("", "compute", "devices"),
    key("var(--comm)", "communication"),
    key("", "waiting for other ranks", "idle"),
    key("var(--soft)", "kernels that change layouts"),
  );
  view.table = measuredTasks(plan, run.tasks);
  byId("measured-tasks").append(view.table.element);
  const filter = byId("measured-filter");
  filter.addEventListener(
    "input",
    framed(() => view.table.show(filter.value)),
  );
  onSelect((item, from) => markMeasured(view, item, from));
  return view;
}

/** The events of one rank in order of their start: {events, start_s, duration_s, ...}. */
function measuredLane(columns, rank) {
  const events = columns.rank
    .map((_, event) => event)
    .filter((event) => columns.rank[event] === rank)
    .sort((a, b) => columns.start_s[a] - columns.start_s[b]);
  return { ...columns, lanes: [events], onPath: new Set() };
}

function measuredFacts(run) {
  const beside = (predicted, measured) =>
    `predicted ${seconds(predicted)}, measured ${seconds(measured)} (${ratio(predicted, measured)})`;
  const threads = `${run.threads} thread${run.threads > 1 ? "s" : ""} a rank`;
  const stream = run.stream_s === null ? "" : `; a stream: ${beside(run.predicted_stream_s, run.stream_s)}`;
  return (
    `One step: ${beside(run.predicted_step_s, run.step_s)}${stream}. ` +
    `${short(run.backend, 40)}, ${threads}, ${count(run.steps)} steps, ` +
    `with the recording ${seconds(run.recorded_step_s)}.`
  );
}

function ratio(predicted, measured) {
  return predicted ? `× ${digits(measured / predicted)}` : "–";
}

function showMeasured(view) {
  view.table.draw();
  if (view.chart) return fillMeasured(view);
  byId("measured-canvas").style.minHeight = `${Math.min(420, 90 + 30 * view.lanes.length)}px`;
  const made = makeChart(
    byId("measured-canvas"),
    (now) => measuredOption(view, now),
    () => fillMeasured(view),
  );
  view.chart = made.chart;
  view.chart.on("datazoom", () => {
    const { startValue, endValue } = view.chart.getOption().dataZoom[0];
    view.span = [startValue, endValue];
    view.drawSoon();
  });
  view.chart.on("click", ({ dataIndex }) => tapMeasured(view, view.pieces[dataIndex]));
  markMeasured(view, selection.current, "tabs");
}

function measuredOption(view, now) {
  const lanes = laneNames(view.plan, 8).flatMap((name) => [`${name}, predicted`, "measured"]);
  const base = baseOption(now);
  return {
    ...base,
    tooltip: {
      ...base.tooltip,
      trigger: "item",
      formatter: ({ dataIndex }) => measuredTip(view, view.pieces[dataIndex]),
    },
    grid: { left: 150, right: 18, top: 30, bottom: 52 },
    xAxis: {
      type: "value",
      min: 0,
      max: view.run.end_s,
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
      axisLabel: { color: now.ink, interval: 0 },
      splitLine: { show: true, interval: (at) => at % 2 === 0, lineStyle: { color: now.line } },
    },
    dataZoom: [
      { type: "inside", xAxisIndex: 0, filterMode: "none" },
      {
        type: "slider",
        xAxisIndex: 0,
        filterMode: "none",
        bottom: 10,
        height: 22,
        labelFormatter: (value) => seconds(value),
        ...zoomLook(now),
      },
    ],
    series: [{ id: "events", type: "custom", data: [], clip: true, renderItem: () => null }],
  };
}

/** Draws what the span shows; narrow events together. */
function fillMeasured(view) {
  const { chart, lanes } = view;
  if (!chart || !byId("measured-canvas").clientWidth) return;
  const now = theme();
  const [from, to] = view.span;
  const perPixel = (to - from) / Math.max(100, chart.getWidth() - 126);
  view.pieces = lanes.flatMap((line, lane) =>
    lanePieces(line, 0, from, to, perPixel, view.chosen).map((piece) => ({ ...piece, lane })),
  );
  const fill = hatch(now.soft, now.idle);
  chart.setOption({
    series: [
      {
        id: "events",
        data: view.pieces.map((piece) => [piece.from, piece.lane, piece.to]),
        encode: { x: [0, 2], y: 1 },
        renderItem: (params, api) => measuredShape(view, now, fill, view.pieces[params.dataIndex], api),
      },
    ],
  });
}

function measuredShape(view, now, fill, piece, api) {
  const line = view.lanes[piece.lane];
  const chosen = view.chosen.has(line.ref[piece.event]);
  const box = laneBox(api, piece.from, piece.lane, piece.to, chosen ? 4 : 1);
  const kind = line.kind[piece.event];
  const colour = [deviceColour(piece.lane >> 1), now.comm, fill, now.soft][kind];
  const edge = { stroke: now.surface, lineWidth: box.width > 3 ? 0.5 : 0 };
  const children = [{ type: "rect", shape: box, style: { fill: colour, ...edge } }];
  if (chosen)
    children.push({
      type: "rect",
      shape: box,
      style: { fill: "none", stroke: now.accent, lineWidth: 3 },
    });
  if (box.width > 40 && piece.many === 1 && kind !== 2)
    children.push({
      type: "text",
      style: {
        text: short(line.name[piece.event], 60),
        x: box.x + 4,
        y: box.y + box.height / 2 + 1,
        width: box.width - 8,
        overflow: "truncate",
        ellipsis: "…",
        fontFamily: now.font,
        verticalAlign: "middle",
        fill: inkOf(colour, now),
        fontSize: 11,
      },
      silent: true,
    });
  return { type: "group", children };
}

function measuredTip(view, piece) {
  if (!piece) return "";
  const line = view.lanes[piece.lane];
  if (piece.many > 1) {
    return tip(`${count(piece.many)} short events`, [
      ["From", seconds(piece.from)],
      ["To", seconds(piece.to)],
      ["", "click to zoom in"],
    ]);
  }
  return tip(nameOf(line.name[piece.event], 60), [
    ["Rank", `${piece.lane >> 1}, ${piece.lane % 2 ? "measured" : "predicted"}`],
    ["Kind", MEASURED_KINDS[line.kind[piece.event]]],
    ["Start", seconds(piece.from)],
    ["Duration", seconds(piece.to - piece.from)],
  ]);
}

function tapMeasured(view, piece) {
  if (!piece) return;
  const width = piece.to - piece.from;
  if (piece.many > 1) return zoomMeasured(view, piece.from - width / 2, piece.to + width / 2);
  const ref = view.lanes[piece.lane].ref[piece.event];
  if (ref !== null) select(itemOfRef(ref), "measured");
}

function zoomMeasured(view, from, to) {
  view.span = [Math.max(0, from), Math.min(view.run.end_s, to)];
  view.chart.dispatchAction({
    type: "dataZoom",
    dataZoomIndex: 0,
    startValue: view.span[0],
    endValue: view.span[1],
  });
  fillMeasured(view);
}

function markMeasured(view, item, from) {
  view.chosen = refsOf(view.plan, item);
  if (!view.chart) return;
  view.table.mark((row) => view.chosen.has(row.ref), from !== "measured" && view.chosen.size > 0);
  fillMeasured(view);
}

function measuredRanks(ranks) {
  const heads = ["Rank", "Compute", "Communication", "Waiting", "Layouts", "Peak memory"];
  const pair = (predicted, measured, format) => `${format(predicted)} → ${format(measured)}`;
  const rows = ranks.map((rank, index) => [
    String(index),
    pair(rank.predicted_compute_s, rank.compute_s, seconds),
    pair(rank.predicted_comm_s, rank.comm_s, seconds),
    seconds(rank.waited_s),
    seconds(rank.other_s),
    pair(rank.predicted_peak_bytes, rank.peak_bytes, size),
  ]);
  return plainTable(heads, rows, [1, 2, 3, 4, 5]);
}

function measuredTasks(plan, rows) {
  return makeTable({
    label: "Measured tasks",
    minWidth: 640,
    rows,
    text: (row) => `${plain(row.name)} @${row.rank}`,
    onRow: (row) => row.ref !== null && select(itemOfRef(row.ref), "measured"),
    columns: [
      {
        title: "Task",
        value: (row) => row.name,
        cell: (row, letters) => nameOf(row.name, letters),
        width: "minmax(180px,4fr)",
      },
      { title: "Rank", value: (row) => row.rank, number: true, width: "56px" },
      measuredSeconds("Predicted", (row) => row.predicted_s),
      measuredSeconds("Measured", (row) => row.measured_s),
      measuredSeconds("Error", measuredError, change),
      {
        title: "Ratio",
        value: (row) => (row.predicted_s ? row.measured_s / row.predicted_s : null),
        cell: (row) => ratio(row.predicted_s, row.measured_s),
        number: true,
        width: "76px",
      },
      measuredSeconds("Waited", (row) => row.waited_s),
      {
        title: "Spread",
        value: (row) => row.spread,
        cell: (row) => share(row.spread),
        number: true,
        width: "76px",
      },
    ],
  });
}

/** Measured less predicted; what rounding leaves of two equal numbers of seconds is none. */
function measuredError(row) {
  const error = row.measured_s - row.predicted_s;
  return Math.abs(error) < 0.05e-9 ? 0 : error;
}

function measuredSeconds(title, value, format = (number, unit) => unit(number)) {
  return {
    title,
    value,
    cell: (row) => format(value(row), seconds),
    number: true,
    width: "92px",
  };
}
