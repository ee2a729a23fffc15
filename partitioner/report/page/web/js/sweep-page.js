// A model over device counts, clusters and memory limits.

/** Paths about the origin: disc, square, triangle, diamond, triangle upside down, plus. */
const SWEEP_SYMBOLS = [
  "M-5,0a5,5,0,1,0,10,0a5,5,0,1,0,-10,0Z",
  "M-4.5,-4.5h9v9h-9Z",
  "M0,-5L5,4.5H-5Z",
  "M0,-6L6,0L0,6L-6,0Z",
  "M-5,-4.5H5L0,5Z",
  "M-2,-5h4v3h3v4h-3v3h-4v-3h-3v-4h3Z",
];
const SWEEP_DASHES = ["solid", "dashed", "dotted", [12, 4, 2, 4]];

/** Colour, dash and symbol of a series: the first 96 differ, those of one colour in both others. */
function sweepLook(at) {
  const round = Math.floor(at / DEVICE_COLOURS.length);
  return {
    colour: deviceColour(at),
    dash: SWEEP_DASHES[round % SWEEP_DASHES.length],
    symbol: SWEEP_SYMBOLS[at % SWEEP_SYMBOLS.length],
  };
}

function startSweep(data) {
  byId("subtitle").append(
    `sweep for ${plain(data.objective)}: ${count(data.points.length)} requests`,
  );
  const [best, ...rest] = plain(data.answer).split(/(?<=\.) (?=[A-Z])/);
  byId("verdict").append(best);
  byId("limit").append(rest.join(" "));
  const view = { charts: [] };
  startBuiltTabs(
    [
      { id: "curves", label: "Curves", build: (panel) => curvesPanel(panel, data, view) },
      { id: "points", label: "Points", build: pointsPanel },
      {
        id: "failed",
        label: `Without a plan (${data.points.filter((point) => point.why).length})`,
        build: failedPanel,
      },
    ],
    data,
  );
  return view;
}

function memoryName(bytes) {
  return bytes === null ? "own memory" : size(bytes);
}

/** Points with a plan by cluster and memory limit, each by devices. */
function sweepSeries(points) {
  const series = new Map();
  for (const point of points.filter(({ why }) => !why)) {
    const name = `${short(point.cluster, 28)}, ${memoryName(point.memory_bytes)}`;
    series.set(name, [...(series.get(name) ?? []), point]);
  }
  for (const list of series.values()) list.sort((a, b) => a.devices - b.devices);
  return series;
}

/** Names of series with one curve, which hide each other: [[name, name, ...], ...]. */
function equalCurves(series, column) {
  const curves = new Map();
  for (const [name, points] of series) {
    const curve = drawable(points, column).map((point) => [point.devices, point[column]]);
    if (!curve.length) continue;
    const key = JSON.stringify(curve);
    curves.set(key, [...(curves.get(key) ?? []), name]);
  }
  return [...curves.values()].filter((names) => names.length > 1);
}

function drawable(points, column) {
  return points.filter((point) => point[column] !== null);
}

/**
 * What a series would reach if its devices did as much each as one alone: [[devices, value], ...].
 *
 * It is drawn for throughput, from 1 device on, and for efficiency, of which it is 1.
 */
function idealCurve(points, column, devices) {
  const known = points.find((point) => point.efficiency !== null && point.speedup);
  if (!known || !["throughput_per_s", "efficiency"].includes(column)) return [];
  if (column === "efficiency") return devices.map((many) => [String(many), 1]);
  if (known.throughput_per_s === null) return [];
  const alone = known.throughput_per_s / known.speedup;
  return devices.map((many) => [String(many), many * alone]);
}

/** The ideal of each series as a thin line, one for series that share it. */
function idealLines(now, series, column, devices, off) {
  const drawn = new Set();
  return [...series].flatMap(([name, points], at) => {
    const curve = idealCurve(points, column, devices);
    const key = JSON.stringify(curve.map(([, value]) => digits(value)));
    if (!curve.length || off.has(name) || drawn.has(key)) return [];
    drawn.add(key);
    const colour = column === "efficiency" ? now.soft : sweepLook(at).colour;
    return [
      {
        name: `ideal: ${name}`,
        type: "line",
        symbol: "none",
        silent: true,
        z: 1,
        data: curve,
        lineStyle: { width: 1, type: [2, 4], color: colour },
        endLabel: { show: true, formatter: "ideal", color: now.soft, offset: [-34, -8] },
      },
    ];
  });
}

function sweepOption(now, series, [column, title, format], off) {
  const hidden = equalCurves(series, column);
  const lines = [...series].map(([name, points], at) => {
    const { colour, dash, symbol } = sweepLook(at);
    const shown = drawable(points, column);
    const equal = hidden.find((names) => names.includes(name)) ?? [name];
    const above = equal.length - 1 - equal.indexOf(name); // a curve is seen around those above it
    return {
      name,
      type: "line",
      symbol: `path://${symbol}`,
      symbolSize: 9,
      lineStyle: {
        width: 2 + 3 * Math.min(above, 3),
        color: colour,
        type: dash,
      },
      itemStyle: { color: colour },
      emphasis: { focus: "series", lineStyle: { width: 5 } },
      data: shown.map((point) => ({
        value: [String(point.devices), point[column]],
        symbolSize: (point.pareto ? 15 : 8) + 4 * Math.min(above, 3),
        itemStyle: point.pareto ? { borderColor: now.ink, borderWidth: 2.5 } : {},
      })),
      points: shown,
    };
  });
  const devices = [...new Set([...series.values()].flat().map((point) => point.devices))].sort(
    (a, b) => a - b,
  );
  return {
    ...chartOption(now, {
      trigger: "item",
      formatter: ({ seriesIndex, dataIndex }) => pointTip(lines[seriesIndex].points[dataIndex]),
    }),
    legend: { show: false, selected: Object.fromEntries([...off].map((name) => [name, false])) },
    grid: { left: 84, right: 24, top: 32, bottom: 46 },
    xAxis: nameAxis(
      now,
      devices.map(String),
      {},
      { name: "devices", nameLocation: "middle", nameGap: 28 },
    ),
    yAxis: valueAxis(
      now,
      { formatter: format },
      { name: title, nameLocation: "end", nameTextStyle: { color: now.ink, align: "right" } },
    ),
    series: [
      ...lines.map(({ points: _, ...line }) => line),
      ...idealLines(now, series, column, devices, off),
    ],
  };
}

function pointTip(point) {
  return tip(`${point.devices} devices, ${short(point.cluster, 40)}`, [
    ["Memory", memoryName(point.memory_bytes)],
    ["Strategy", plain(point.strategy)],
    ["Latency", seconds(point.latency_s)],
    ["Throughput", throughput(point.throughput_per_s)],
    ["Peak", size(point.peak_bytes)],
    ["Speed-up", times(point.speedup)],
    ["Efficiency", share(point.efficiency)],
    ["Pareto", point.pareto ? "yes: no other point is as good in all" : "no"],
  ]);
}

/** Buttons, one a series: they hide it and show it again in all charts, and lift it while aimed at. */
function sweepLegend(series, off, view) {
  const lift = (type, seriesName) => {
    for (const { chart } of view.charts) chart.dispatchAction({ type, seriesName });
  };
  const buttons = [...series.keys()].map((name, at) => {
    const button = el(
      "button",
      {
        type: "button",
        class: "key",
        "aria-pressed": "true",
        mouseenter: () => lift("highlight", name),
        mouseleave: () => lift("downplay", name),
        focus: () => lift("highlight", name),
        blur: () => lift("downplay", name),
        click: () => {
          off.has(name) ? off.delete(name) : off.add(name);
          button.setAttribute("aria-pressed", String(!off.has(name)));
          for (const { draw } of view.charts) draw();
        },
      },
      sweepSwatch(sweepLook(at)),
      el("bdi", {}, name),
    );
    return button;
  });
  return el("div", { class: "legend series", role: "group", "aria-label": "Series" }, buttons);
}

function sweepSwatch({ colour, dash, symbol }) {
  const canvas = el("canvas", { width: 72, height: 28, "aria-hidden": "true" });
  const pen = canvas.getContext("2d");
  const dashes = { solid: [], dashed: [8, 5], dotted: [2, 3] };
  pen.scale(2, 2);
  pen.translate(18, 7);
  pen.strokeStyle = colour;
  pen.fillStyle = colour;
  pen.lineWidth = 2;
  pen.setLineDash(dashes[dash] ?? dash);
  pen.beginPath();
  pen.moveTo(-18, 0);
  pen.lineTo(18, 0);
  pen.stroke();
  pen.fill(new Path2D(symbol));
  return canvas;
}

function curvesPanel(panel, data, view) {
  const series = sweepSeries(data.points);
  if (!series.size) return panel.append(el("p", {}, "No point has a plan."));
  const box = el("div", { class: "pair" });
  const off = new Set();
  panel.append(
    el(
      "p",
      { class: "legend" },
      el(
        "span",
        { class: "key" },
        el("span", { class: "mark pareto" }),
        "large with a border: Pareto, no other point is as good in devices, latency, throughput and peak at once",
      ),
    ),
    sweepLegend(series, off, view),
    box,
  );
  const columns = [
    ["throughput_per_s", "throughput", perSecond],
    ["latency_s", "latency", seconds],
    ["efficiency", "efficiency", share],
  ].filter(([column]) => [...series.values()].some((points) => drawable(points, column).length));
  for (const what of columns) {
    const [column, title, format] = what;
    const canvas = walkable("chart", `${title} over devices`);
    const equal = equalCurves(series, column).map((names) =>
      el("p", { class: "soft" }, `One curve: ${names.join(" = ")}.`),
    );
    box.append(el("div", { class: "column" }, canvas, el("div", { class: "equal" }, equal)));
    const made = makeChart(canvas, (now) => sweepOption(now, series, what, off));
    const stops = [...series].flatMap(([name, points], seriesIndex) =>
      drawable(points, column).map((point, dataIndex) => ({
        seriesIndex,
        dataIndex,
        text: `${name}: ${format(point[column])} on ${count(point.devices)} devices`,
      })),
    );
    walkChart(canvas, made.chart, stops);
    view.charts.push(made);
  }
}

function pointsPanel(panel, data) {
  const table = makeTable({
    label: "Points",
    minWidth: 1060,
    rows: data.points,
    columns: [
      { title: "Devices", value: (point) => point.devices, number: true, width: "76px" },
      {
        title: "Cluster",
        value: (point) => point.cluster,
        cell: (point, letters) => nameOf(point.cluster, letters),
        width: "minmax(100px,2fr)",
      },
      {
        title: "Memory",
        value: (point) => point.memory_bytes,
        cell: (point) => memoryName(point.memory_bytes),
        width: "100px",
      },
      {
        title: "Strategy",
        value: (point) => point.strategy,
        cell: (point) =>
          point.why ? el("span", { class: "soft" }, "no plan") : nameOf(point.strategy, 24),
        width: "minmax(80px,1fr)",
      },
      {
        title: "Latency",
        value: (point) => point.latency_s,
        cell: (point) => seconds(point.latency_s),
        number: true,
        width: "86px",
      },
      {
        title: "Throughput",
        value: (point) => point.throughput_per_s,
        cell: (point) => (point.why ? "–" : throughput(point.throughput_per_s)),
        number: true,
        width: "98px",
      },
      {
        title: "Peak",
        value: (point) => point.peak_bytes,
        cell: (point) => size(point.peak_bytes),
        number: true,
        width: "86px",
      },
      { title: "Used", value: (point) => point.devices_used, number: true, width: "60px" },
      {
        title: "Speed-up",
        value: (point) => point.speedup,
        cell: (point) => (times(point.speedup)),
        number: true,
        width: "84px",
      },
      {
        title: "Efficiency",
        value: (point) => point.efficiency,
        cell: (point) => share(point.efficiency),
        number: true,
        width: "90px",
      },
      {
        title: "Gap",
        value: (point) => point.gap,
        cell: (point) => share(point.gap),
        number: true,
        width: "66px",
      },
      {
        title: "Pareto",
        value: (point) => Number(point.pareto),
        cell: (point) => (point.pareto ? "★ yes" : ""),
        number: true,
        width: "70px",
      },
    ],
  });
  panel.append(table.element);
  return table.draw;
}

function failedPanel(panel, data) {
  const failed = data.points.filter((point) => point.why);
  if (!failed.length) return panel.append(el("p", {}, "Every point has a plan."));
  panel.append(
    plainTable(
      ["Devices", "Cluster", "Memory", "Why there is no plan"],
      failed.map((point) => [
        String(point.devices),
        nameOf(point.cluster, 40),
        memoryName(point.memory_bytes),
        el("bdi", {}, short(point.why, 600)),
      ]),
      [0],
    ),
  );
}
