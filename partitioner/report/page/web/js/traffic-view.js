// Traffic: bytes from device to device, links, and all communications.

const CELL_LABELS = 12; // devices up to which cells carry their bytes

function startTraffic(plan) {
  const view = { plan, map: null, loads: null, table: null, pair: null };
  addEventListener("resize", framed(() => view.map && showTopology(plan)));
  onSelect((item, from) => markTraffic(view, item, from));
  return view;
}

function showTraffic(view) {
  const { plan } = view;
  showTopology(plan);
  if (view.map) return view.table.draw();
  view.map = makeChart(byId("traffic-map"), (now) => trafficOption(plan, now));
  view.map.chart.on("click", ({ value }) => value && choosePair(view, [value[1], value[0]]));
  view.loads = makeChart(byId("traffic-loads"), (now) => loadOption(plan, now));
  view.loads.chart.on("click", ({ dataIndex }) =>
    select({ type: "device", id: dataIndex }, "traffic"),
  );
  byId("traffic-links").append(linkTable(plan.traffic.links));
  byId("traffic-filter").addEventListener("click", () => choosePair(view, null));
  choosePair(view, null);
}

/** Shows the communications of two devices, or of all. */
function choosePair(view, pair) {
  const { plan } = view;
  const all = plan.comms.map((_, index) => index);
  const rows = pair
    ? all.filter((comm) => pair.every((rank) => plan.comms[comm].ranks.includes(rank)))
    : all;
  view.table = commTable(plan, rows);
  const bytes = rows.reduce((sum, comm) => sum + plan.comms[comm].times * plan.comms[comm].bytes, 0);
  const who = pair ? `between devices ${deviceText(plan, [pair[0]])} and ${deviceText(plan, [pair[1]])}` : "of all devices";
  byId("traffic-title").textContent =
    `Communications ${who}: ${count(rows.length)}, ${size(bytes)}`;
  byId("traffic-filter").hidden = !pair;
  byId("traffic-comms").replaceChildren(view.table.element);
  markTraffic(view, selection.current, "tabs");
}

function markTraffic(view, item, from) {
  if (!view.table) return;
  const chosen = new Set(
    [...refsOf(view.plan, item)].filter((ref) => ref < 0).map((ref) => -1 - ref),
  );
  if (item?.type === "node") for (const comm of view.plan.commsOfNode[item.id]) chosen.add(comm);
  view.table.mark((comm) => chosen.has(comm), from !== "traffic" && chosen.size > 0);
}

function commTable(plan, rows) {
  const comm = (index) => plan.comms[index];
  return makeTable({
    label: "Communications",
    rows,
    onRow: (index) => select({ type: "comm", id: index }, "traffic"),
    columns: [
      {
        title: "Kind",
        value: (index) => comm(index).kind,
        cell: (index) => plain(comm(index).kind),
        width: "minmax(90px,1fr)",
      },
      {
        title: "Value",
        value: (index) => comm(index).value,
        cell: (index, letters) => nameOf(comm(index).value, letters),
        width: "minmax(110px,2fr)",
      },
      {
        title: "Devices",
        value: (index) => deviceText(plan, comm(index).ranks),
        cell: (index) => `@${short(deviceText(plan, comm(index).ranks), 12)}`,
        width: "80px",
      },
      {
        title: "Bytes",
        value: (index) => comm(index).bytes,
        cell: (index) => size(comm(index).bytes),
        number: true,
        width: "90px",
      },
      {
        title: "Seconds",
        value: (index) => comm(index).seconds,
        cell: (index) => seconds(comm(index).seconds),
        number: true,
        width: "90px",
      },
      {
        title: "Algorithm",
        value: (index) => comm(index).algorithm,
        cell: (index) => plain(comm(index).algorithm),
        width: "minmax(70px,1fr)",
      },
    ],
  });
}

function trafficOption(plan, now) {
  const { source, target, bytes } = plan.traffic;
  const names = laneNames(plan, 8);
  const most = bytes.reduce((best, value) => Math.max(best, value), 1);
  const labels = names.length <= CELL_LABELS;
  const cells = {
    splitArea: { show: true, areaStyle: { color: [now.surface, now.surface] } },
    splitLine: { show: true, lineStyle: { color: now.line } },
    nameLocation: "middle",
  };
  const targets = plan.devices.map((_, lane) => deviceText(plan, [lane]));
  return {
    ...chartOption(now, {
      formatter: ({ value }) =>
        value
          ? tip(`Device ${deviceText(plan, [value[1]])} to ${deviceText(plan, [value[0]])}`, [
              ["Bytes", size(value[2])],
              ["", "click for its communications"],
            ])
          : "",
    }),
    grid: { left: 106, right: 92, top: 42, bottom: 12 },
    xAxis: nameAxis(
      now,
      targets,
      {},
      { ...cells, name: "to device", position: "top", nameGap: 24 },
    ),
    yAxis: nameAxis(now, names, {}, { ...cells, name: "from device", inverse: true, nameGap: 84 }),
    visualMap: {
      type: "continuous",
      min: 0,
      max: most,
      dimension: 2,
      right: 0,
      top: 40,
      itemHeight: 120,
      calculable: false,
      formatter: (value) => size(value),
      text: [size(most), "0 B"],
      textStyle: { color: now.ink },
      inRange: { color: now.ramp },
    },
    series: [
      {
        type: "heatmap",
        data: source.map((from, at) => ({
          value: [target[at], from, bytes[at]],
          label: { color: inkOn(rampAt(now.ramp, bytes[at] / most)) },
        })),
        label: { show: labels, formatter: ({ value }) => size(value[2]), fontSize: 11 },
        itemStyle: { borderColor: now.surface, borderWidth: names.length > 40 ? 0 : 1 },
        emphasis: { itemStyle: { borderColor: now.accent, borderWidth: 2 } },
      },
    ],
  };
}

/** The nearest colour of a ramp to a share of it. */
function rampAt(ramp, share) {
  return ramp[Math.round(share * (ramp.length - 1))];
}

/** Busy seconds of each device, and what of them is communication. */
function loadOption(plan, now) {
  const names = laneNames(plan, 8);
  const bar = (name, column, color) => ({
    name,
    type: "bar",
    stack: "load",
    barMaxWidth: 34,
    itemStyle: { color },
    data: plan.devices.map((device) => device[column]),
  });
  return {
    ...chartOption(now, {
      trigger: "axis",
      axisPointer: { type: "shadow" },
      formatter: ([first]) => loadTip(plan, first.dataIndex),
    }),
    legend: { top: 0, textStyle: { color: now.ink } },
    grid: { left: 66, right: 12, top: 30, bottom: 40 },
    xAxis: nameAxis(now, names, {}, { name: "device", nameLocation: "middle", nameGap: 24 }),
    yAxis: valueAxis(now, { formatter: seconds }, { splitNumber: 3 }),
    series: [
      bar("compute", "compute_s", now.weights),
      bar("communication", "comm_s", now.comm),
    ],
  };
}

function loadTip(plan, device) {
  const row = plan.devices[device];
  return tip(`Device ${deviceText(plan, [device])}`, [
    ["Compute", seconds(row.compute_s)],
    ["Communication", seconds(row.comm_s)],
    ["Sent", size(row.sent_bytes)],
  ]);
}

function linkTable(links) {
  if (!links.length) return el("p", { class: "soft" }, "No links.");
  const rows = links.map((link) => [
    nameOf(link.level, 24),
    size(link.bytes),
    size(link.total_bytes),
    seconds(link.seconds),
    bandwidth(link.bandwidth_bytes_per_s),
  ]);
  return plainTable(
    ["Level", "Busiest device", "All devices", "Seconds", "Bandwidth"],
    rows,
    [1, 2, 3, 4],
  );
}
