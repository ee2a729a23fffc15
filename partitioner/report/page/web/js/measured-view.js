// Predicted beside measured: two lanes a rank on one time axis, and the tasks by their error.

const MEASURED_KINDS = ["compute", "communication", "waiting for other ranks", "layouts"];

function startMeasured(plan) {
  const run = plan.measured;
  const line = readMeasured(run, plan.devices.length);
  const view = { plan, line, chart: null, pieces: [], left: 150, span: [0, line.end_s] };
  view.chosen = new Set();
  view.band = (lane, height) => ({ row: lane, top: -0.43 * height, bottom: 0.43 * height });
  view.names = laneNames(plan, 8).flatMap((name) => [`${name}, predicted`, "measured"]);
  view.fill = () => fillMeasured(view);
  view.tip = (piece) => measuredTip(view, piece);
  view.tap = (piece) => {
    const ref = line.ref[piece.event];
    if (ref !== null) select(itemOfRef(ref), "measured");
  };
  byId("measured-facts").textContent = measuredFacts(run);
  byId("measured-fit").addEventListener("click", () => zoomGantt(view, 0, line.end_s));
  byId("measured-png").addEventListener("click", () => saveChartPng(view.chart, "measured.png"));
  byId("measured-ranks").append(measuredRanks(run.ranks));
  const ranks = new Set(run.measured.rank);
  const legend = [
    key(striped([...ranks].map(deviceColour)), "compute"),
    key("var(--comm)", "communication"),
    key("", "waiting for other ranks", "idle"),
    key("var(--soft)", "kernels that change layouts"),
  ];
  byId("measured-legend").append(...legend.filter((_, kind) => line.kind.includes(kind)));
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

/** Predicted and measured events on one axis, on two lanes a rank. */
function readMeasured(run, ranks) {
  const parts = [run.predicted, run.measured];
  const joined = (column) => parts.flatMap((part) => part[column]);
  const line = { end_s: run.end_s, onPath: new Set(), boxAt: () => undefined };
  for (const column of ["start_s", "duration_s", "ref", "kind", "name"]) line[column] = joined(column);
  line.lanes = Array.from({ length: 2 * ranks }, () => []);
  let event = 0;
  parts.forEach((part, measured) => {
    for (const rank of part.rank) line.lanes[2 * rank + measured].push(event++);
  });
  for (const lane of line.lanes) lane.sort((a, b) => line.start_s[a] - line.start_s[b]);
  return line;
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
  if (view.chart) return view.fill();
  byId("measured-canvas").style.minHeight = `${Math.min(420, 90 + 30 * view.names.length)}px`;
  makeGantt(view, byId("measured-canvas"), (now) => ganttOption(view, now, { series: ["events"], together: 2 }));
  markMeasured(view, selection.current, "tabs");
}

function fillMeasured(view) {
  if (!view.chart || !view.element.clientWidth) return;
  const now = theme();
  const waiting = hatch(now.soft, now.idle);
  view.chart.setOption({
    series: [eventSeries(view, (piece, api) => measuredShape(view, now, waiting, piece, api))],
  });
}

function measuredShape(view, now, waiting, piece, api) {
  const { kind, name } = view.line;
  const of = kind[piece.event];
  const fill = [deviceColour(piece.lane >> 1), now.comm, waiting, now.soft][of];
  return ganttShape(view, now, piece, api, {
    fill,
    text: (box) => (of === 2 || piece.many > 1 ? null : boxText(view, now, box, [name[piece.event]], inkOf(fill, now))),
  });
}

function measuredTip(view, piece) {
  if (piece.many > 1) return shortEventsTip(piece, `${count(piece.many)} short events`, []);
  const { name, kind } = view.line;
  return tip(nameOf(name[piece.event], 60), [
    ["Rank", `${piece.lane >> 1}, ${piece.lane % 2 ? "measured" : "predicted"}`],
    ["Kind", MEASURED_KINDS[kind[piece.event]]],
    ["Start", seconds(piece.from)],
    ["Duration", seconds(piece.to - piece.from)],
  ]);
}

function markMeasured(view, item, from) {
  view.chosen = refsOf(view.plan, item);
  if (!view.chart) return;
  view.table.mark((row) => view.chosen.has(row.ref), from !== "measured" && view.chosen.size > 0);
  view.fill();
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
