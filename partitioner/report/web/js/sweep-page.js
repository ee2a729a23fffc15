// A model over device counts, clusters and memory limits.

const SWEEP_SYMBOLS = ["circle", "rect", "triangle", "diamond", "roundRect", "pin"];

function startSweep(data) {
  byId("subtitle").append(
    `sweep for ${plain(data.objective)}: ${count(data.points.length)} requests`,
  );
  byId("limit").append(plain(data.answer));
  startBuiltTabs(
    [
      { id: "curves", label: "Curves", build: curvesPanel },
      { id: "points", label: "Points", build: pointsPanel },
      {
        id: "failed",
        label: `Without a plan (${data.points.filter((point) => point.why).length})`,
        build: failedPanel,
      },
    ],
    data,
  );
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

function sweepOption(now, series, [column, title, format]) {
  const lines = [...series].map(([name, points], at) => {
    const colour = deviceColour(at);
    const shown = points.filter((point) => point[column] !== null);
    return {
      name,
      type: "line",
      symbol: SWEEP_SYMBOLS[at % SWEEP_SYMBOLS.length],
      symbolSize: 9,
      lineStyle: {
        width: 2,
        color: colour,
        type: points[0].memory_bytes === null ? "solid" : "dashed",
      },
      itemStyle: { color: colour },
      data: shown.map((point) => ({
        value: [String(point.devices), point[column]],
        symbolSize: point.pareto ? 15 : 8,
        itemStyle: point.pareto ? { borderColor: now.ink, borderWidth: 2.5 } : {},
      })),
      points: shown,
    };
  });
  const devices = [...new Set([...series.values()].flat().map((point) => point.devices))].sort(
    (a, b) => a - b,
  );
  return {
    ...baseOption(now),
    tooltip: {
      ...baseOption(now).tooltip,
      trigger: "item",
      formatter: ({ seriesIndex, dataIndex }) => pointTip(lines[seriesIndex].points[dataIndex]),
    },
    legend: { type: "plain", top: 0, left: 70, textStyle: { color: now.ink } },
    grid: { left: 84, right: 24, top: 26 + 24 * Math.ceil(lines.length / 3), bottom: 46 },
    xAxis: {
      type: "category",
      data: devices.map(String),
      name: "devices",
      nameLocation: "middle",
      nameGap: 28,
      ...axisLook(now),
    },
    yAxis: {
      type: "value",
      name: title,
      nameLocation: "end",
      ...axisLook(now),
      nameTextStyle: { color: now.ink, align: "right" },
      axisLabel: { color: now.ink, formatter: format },
    },
    series: lines.map(({ points: _, ...line }) => line),
  };
}

function pointTip(point) {
  return tip(`${point.devices} devices, ${short(point.cluster, 40)}`, [
    ["Memory", memoryName(point.memory_bytes)],
    ["Strategy", plain(point.strategy)],
    ["Latency", seconds(point.latency_s)],
    ["Throughput", perSecond(point.throughput_per_s)],
    ["Peak", size(point.peak_bytes)],
    ["Speed-up", point.speedup === null ? "–" : `${digits(point.speedup)}×`],
    ["Efficiency", share(point.efficiency)],
    ["Pareto", point.pareto ? "yes: no other point is as good in all" : "no"],
  ]);
}

function curvesPanel(panel, data) {
  const series = sweepSeries(data.points);
  if (!series.size) return panel.append(el("p", {}, "No point has a plan."));
  const box = el("div", { class: "pair" });
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
    box,
  );
  for (const what of [
    ["throughput_per_s", "throughput", perSecond],
    ["latency_s", "latency", seconds],
  ]) {
    const canvas = el("div", {
      class: "chart",
      role: "img",
      "aria-label": `${what[1]} over devices; the points are in the table`,
    });
    box.append(canvas);
    makeChart(canvas, (now) => sweepOption(now, series, what));
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
        cell: (point) => perSecond(point.throughput_per_s),
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
        cell: (point) => (point.speedup === null ? "–" : `${digits(point.speedup)}×`),
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
