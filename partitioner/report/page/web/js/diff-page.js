// What changed between two plans.

const FIGURE_UNITS = {
  s: seconds,
  bytes: size,
  share,
  per_s: throughput,
  count,
  times,
};

function startDiff(data) {
  byId("subtitle").append(
    el("bdi", {}, short(data.before, 80)),
    " → ",
    el("bdi", {}, short(data.after, 80)),
  );
  byId("verdict").append(plain(data.verdict));
  const [before, after] = data.verdicts.map(plain);
  byId("instead").append(before, el("br", {}), after);
  const views = [
    { id: "figures", label: "Figures", build: figuresPanel },
    { id: "moved", label: `Moved nodes (${count(data.moved.length)})`, build: movedPanel },
    { id: "diff-traffic", label: "Traffic", build: diffTrafficPanel },
    { id: "diff-devices", label: "Devices", build: diffDevicesPanel },
  ];
  startBuiltTabs(views, data);
}

/** Tabs whose panels are made here, each drawn when first shown: `build(panel, data)` may return a redraw. */
function startBuiltTabs(views, data) {
  const shown = new Map();
  const show = ({ id, build }) => {
    if (shown.has(id)) return shown.get(id)?.();
    shown.set(id, build(byId(`panel-${id}`), data));
    shown.get(id)?.();
  };
  for (const { id } of views)
    byId("main").append(el("section", { id: `panel-${id}`, class: "panel column" }));
  startTabs(views.map((view) => ({ ...view, show: () => show(view) })));
}

/** "+20 %", or what can be said. */
function relative(before, after) {
  if (before === null || after === null || !before) return "–";
  return change(after / before - 1, share);
}

/** The change of a figure as text, coloured and marked where it is for the better or worse. */
function judged({ before, after, better }, text) {
  const known = before !== null && after !== null && better;
  if (!known || Math.abs(after - before) <= 5e-5 * Math.abs(before)) return text;
  const good = after < before === (better === "less");
  return el("span", { class: good ? "better" : "worse" }, `${text} ${good ? "\u2713" : "\u2717"}`);
}

function figureRows(figures) {
  return figures.map((figure) => {
    const { name, unit, before, after } = figure;
    const format = FIGURE_UNITS[unit];
    const both = before !== null && after !== null;
    return [
      plain(name),
      format(before),
      format(after),
      judged(figure, both ? change(after - before, format) : "–"),
      judged(figure, relative(before, after)),
    ];
  });
}

function figuresPanel(panel, data) {
  const rows = figureRows(data.figures);
  const only = (title, names) =>
    names.length
      ? [
          el("h3", {}, `${title} (${count(names.length)})`),
          el(
            "ul",
            { class: "names" },
            names.slice(0, 200).map((name) => el("li", {}, nameOf(name, 90))),
          ),
        ]
      : [];
  panel.append(
    plainTable(["Figure", "Before", "After", "Change", "Relative"], rows, [1, 2, 3, 4]),
    el(
      "p",
      {},
      `${count(data.same)} nodes are treated alike, ${count(data.moved.length)} otherwise; ${count(data.only_before.length)} only before, ${count(data.only_after.length)} only after.`,
    ),
    ...only("Only before", data.only_before),
    ...only("Only after", data.only_after),
  );
}

/** A column of text out of the model. */
function named(title, key, width) {
  return {
    title,
    value: (row) => row[key],
    cell: (row, letters) => nameOf(row[key], letters),
    width,
  };
}

function movedPanel(panel, data) {
  const filter = el("input", {
    type: "search",
    placeholder: "filter by name, type or place",
    "aria-label": "Filter moved nodes",
    class: "filter",
  });
  const table = makeTable({
    label: "Moved nodes",
    minWidth: 900,
    rows: data.moved,
    text: (row) => `${plain(row.name)} ${row.op} ${row.before} ${row.after}`,
    columns: [
      named("Type", "op", "minmax(130px,1fr)"),
      named("Name", "name", "minmax(140px,3fr)"),
      named("Before", "before", "minmax(110px,2fr)"),
      named("After", "after", "minmax(110px,2fr)"),
      {
        title: "Seconds before",
        value: (row) => row.seconds_before,
        cell: (row) => seconds(row.seconds_before),
        number: true,
        width: "120px",
      },
      {
        title: "After",
        value: (row) => row.seconds_after,
        cell: (row) => seconds(row.seconds_after),
        number: true,
        width: "90px",
      },
      {
        title: "Change",
        value: (row) => row.seconds_after - row.seconds_before,
        cell: (row) => change(row.seconds_after - row.seconds_before, seconds),
        number: true,
        width: "100px",
      },
    ],
  });
  filter.addEventListener("input", () => table.show(filter.value));
  panel.append(el("div", { class: "bar" }, filter), table.element);
  return table.draw;
}

/** Bars before and after, beside each other. */
function pairOption(now, names, parts, format) {
  const bars = parts.flatMap(({ name, stack, data, colour, faint }) => ({
    name,
    type: "bar",
    stack,
    data,
    barMaxWidth: 26,
    itemStyle: { color: colour, opacity: faint ? 0.5 : 1 },
  }));
  const tips = (rows) =>
    tip(
      names[rows[0].dataIndex],
      rows.map(({ seriesName, value }) => [seriesName, format(value ?? 0)]),
    );
  return {
    ...chartOption(now, { trigger: "axis", axisPointer: { type: "shadow" }, formatter: tips }),
    legend: { top: 0, textStyle: { color: now.ink } },
    grid: { left: 84, right: 16, top: 34, bottom: 30 },
    xAxis: nameAxis(now, names),
    yAxis: valueAxis(now, { formatter: format }),
    series: bars,
  };
}

/** What the keys visit: each group of bars. */
function pairStops(names, parts, format) {
  return names.map((name, dataIndex) => ({
    seriesIndex: 0,
    dataIndex,
    text: `${name}: ${parts.map((part) => `${part.name} ${format(part.data[dataIndex])}`).join(", ")}`,
  }));
}

function diffTrafficPanel(panel, data) {
  const rows = data.traffic.map((row) => [
    plain(row.kind),
    count(row.count_before),
    count(row.count_after),
    size(row.bytes_before),
    size(row.bytes_after),
    change(row.bytes_after - row.bytes_before, size),
  ]);
  const names = data.traffic.map((row) => plain(row.kind));
  const parts = [
    {
      name: "before",
      data: data.traffic.map((row) => row.bytes_before),
      colour: DEVICE_COLOURS[4],
    },
    {
      name: "after",
      data: data.traffic.map((row) => row.bytes_after),
      colour: DEVICE_COLOURS[0],
    },
  ];
  const canvas = walkable("chart half", "Bytes of each kind of communication, before and after");
  panel.append(
    plainTable(
      ["Kind", "Count before", "After", "Bytes before", "After", "Change"],
      rows,
      [1, 2, 3, 4, 5],
    ),
    canvas,
  );
  const { chart } = makeChart(canvas, (now) => pairOption(now, names, parts, size));
  walkChart(canvas, chart, pairStops(names, parts, size));
}

function diffDevicesPanel(panel, data) {
  const both =
    (column, format) =>
    ([before, after]) =>
      `${before ? format(before[column]) : "–"} → ${after ? format(after[column]) : "–"}`;
  const cells = [
    ["compute_s", seconds],
    ["comm_s", seconds],
    ["peak_bytes", size],
    ["weights_bytes", size],
    ["sent_bytes", size],
  ];
  const rows = data.devices.map((pair) => [
    ranges((pair[0] ?? pair[1]).members),
    ...cells.map(([column, format]) => both(column, format)(pair)),
  ]);
  const canvas = walkable("chart half", "Busy seconds of each device, before and after");
  panel.append(
    canvas,
    plainTable(
      ["Device", "Compute", "Communication", "Peak memory", "Weights", "Sent"],
      rows,
      [1, 2, 3, 4, 5],
    ),
  );
  const column = (side, name) => data.devices.map((pair) => pair[side]?.[name] ?? 0);
  const names = data.devices.map((pair) => `device ${ranges((pair[0] ?? pair[1]).members)}`);
  const parts = (now) =>
    ["before", "after"].flatMap((when, side) => [
      {
        name: `compute ${when}`,
        stack: when,
        data: column(side, "compute_s"),
        colour: now.weights,
        faint: !side,
      },
      {
        name: `communication ${when}`,
        stack: when,
        data: column(side, "comm_s"),
        colour: now.comm,
        faint: !side,
      },
    ]);
  const { chart } = makeChart(canvas, (now) => pairOption(now, names, parts(now), seconds));
  walkChart(canvas, chart, pairStops(names, parts(theme()), seconds));
}
