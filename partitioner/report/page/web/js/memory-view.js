// Memory: all devices at their peak, one device over the schedule, what it holds at its peak.

const PARTS = ["weights", "activations", "buffers"];
/** With what the executor takes beside them, which has no moments. */
const PEAK_PARTS = [...PARTS, "executor"];

function startMemory(plan) {
  const fullest = plan.memory.reduce(
    (best, row, device) =>
      row.peak_bytes / (row.limit_bytes || 1) >
      plan.memory[best].peak_bytes / (plan.memory[best].limit_bytes || 1)
        ? device
        : best,
    0,
  );
  const view = { plan, device: fullest, bars: null, curve: null };
  const choice = byId("memory-device");
  choice.append(
    ...laneNames(plan).map((name, lane) => el("option", { value: String(lane) }, `device ${name}`)),
  );
  choice.addEventListener("change", () => chooseDevice(view, Number(choice.value)));
  byId("memory-limit").addEventListener("change", () => chooseDevice(view, view.device));
  byId("memory-peak").addEventListener("click", () => showLive(view, true));
  onSelect((item) => {
    if (item?.type === "device" && view.curve) chooseDevice(view, item.id);
    else view.curve?.draw();
  });
  return view;
}

function showMemory(view) {
  if (view.bars || !view.plan.memory.length) return;
  byId("memory-limit").checked = view.plan.memory.some(
    (row) => row.peak_bytes > 0.1 * row.limit_bytes,
  );
  view.bars = makeChart(byId("memory-bars"), (now) => memoryBars(view, now));
  view.curve = makeChart(byId("memory-curve"), (now) => memoryCurve(view, now));
  view.bars.chart.getZr().on("click", (event) => {
    const [, at] = view.bars.chart.convertFromPixel({ gridIndex: 0 }, [
      event.offsetX,
      event.offsetY,
    ]);
    if (at >= 0 && at < view.plan.devices.length) chooseDevice(view, at);
  });
  view.curve.chart.getZr().on("click", (event) => tapMemory(view, event));
  chooseDevice(view, view.device);
}

function chooseDevice(view, device) {
  view.device = device;
  byId("memory-device").value = String(device);
  view.bars.draw();
  view.curve.draw();
  showLive(view, false);
}

/** A click selects the task at that position; near the peak it shows what is held. */
function tapMemory(view, event) {
  const { chart } = view.curve;
  if (!chart.containPixel({ gridIndex: 0 }, [event.offsetX, event.offsetY])) return;
  const [at] = chart.convertFromPixel({ gridIndex: 0 }, [event.offsetX, event.offsetY]);
  const memory = view.plan.memory[view.device];
  const peak = chart.convertToPixel({ gridIndex: 0 }, [peakAt(memory), memory.peak_bytes]);
  if (Math.hypot(peak[0] - event.offsetX, peak[1] - event.offsetY) < 14)
    return showLive(view, true);
  const ref = refAt(view, at);
  if (ref !== undefined) select(itemOfRef(ref), "memory");
}

/** The task that a device runs at a place of the axis, or the last before it. */
function refAt({ plan, device }, at) {
  const memory = plan.memory[device];
  if (!memory.seconds || plan.head.step !== null) return plan.tasks[positionAt(memory, at)];
  const { start_s: starts, device: of, ref } = plan.timelines[0];
  let last;
  starts.forEach((start, event) => {
    if (of[event] === device && start <= at && !(start < starts[last])) last = event;
  });
  return ref[last];
}

/** Where a device's moments are on the axis: seconds; where nothing takes time, positions. */
function memoryAxis(memory) {
  return memory.seconds ?? memory.position;
}

function peakAt(memory) {
  return memory.seconds ? memory.peak_s : memory.peak_position;
}

/** The position in the schedule of a moment on the axis. */
function positionAt(memory, at) {
  if (!memory.seconds) return Math.max(0, Math.floor(at));
  return memory.position[Math.max(0, memory.seconds.findLastIndex((start) => start <= at))];
}

function atPeak(memory) {
  let at = 0;
  if (memory.seconds) {
    const sums = memory.position.map((_, i) => memory.activations[i] + memory.buffers[i]);
    at = sums.reduce((best, sum, i) => (sum > sums[best] ? i : best), 0);
  }
  while (
    !memory.seconds &&
    at + 1 < memory.position.length &&
    memory.position[at + 1] <= memory.peak_position
  )
    at += 1;
  return {
    weights: memory.weights_bytes,
    activations: memory.activations[at] ?? 0,
    buffers: memory.buffers[at] ?? 0,
    executor: memory.executor_bytes,
  };
}

function memoryBars(view, now) {
  const { memory, devices } = view.plan;
  const peaks = memory.map(atPeak);
  const labels = laneNames(view.plan, 8);
  const room = Math.floor(byId("memory-bars").clientHeight / 22);
  const zoom = devices.length > room ? [laneScroll(now, room, { right: 4, width: 14 })] : [];
  const withLimit = byId("memory-limit").checked;
  const most =
    1.04 *
    Math.max(...memory.map((row) => Math.max(row.peak_bytes, withLimit ? row.limit_bytes : 0)), 1);
  const limits = {
    name: "limit",
    type: "scatter",
    symbol: "rect",
    symbolSize: [3, 20],
    itemStyle: { color: now.warn },
    data: withLimit ? memory.map((row, device) => [row.limit_bytes, device]) : [],
  };
  return {
    ...chartOption(now, {
      trigger: "axis",
      axisPointer: { type: "shadow" },
      formatter: ([first]) => memoryTip(view, first.dataIndex, peaks[first.dataIndex]),
    }),
    grid: { left: 92, right: zoom.length ? 30 : 16, top: 8, bottom: 26 },
    xAxis: valueAxis(
      now,
      { formatter: size, hideOverlap: true, showMaxLabel: false },
      { max: most, interval: byteInterval(most, 3) },
    ),
    yAxis: nameAxis(
      now,
      labels,
      { formatter: (label, lane) => (lane === view.device ? `▸ ${label}` : label) },
      { inverse: true },
    ),
    dataZoom: zoom,
    series: [
      limits,
      ...PEAK_PARTS.map((part) => ({
        name: part,
        type: "bar",
        stack: "peak",
        barMaxWidth: 18,
        data: peaks.map((peak, device) => ({
          value: peak[part],
          itemStyle: { opacity: device === view.device ? 1 : 0.65 },
        })),
        itemStyle: { color: now[part] },
      })),
    ],
  };
}

/** The kinds of what a device ever holds. */
function heldParts(memory) {
  const most = { weights: memory.weights_bytes };
  for (const part of ["activations", "buffers"])
    most[part] = memory[part].reduce((a, b) => Math.max(a, b), 0);
  return PARTS.filter((part) => most[part]);
}

function memoryTip(view, device, peak) {
  const { limit_bytes: limit, peak_bytes: total } = view.plan.memory[device];
  return tip(`Device ${deviceText(view.plan, [device])} at its peak`, [
    ...PEAK_PARTS.filter((part) => peak[part]).map((part) => [part, size(peak[part])]),
    ["Peak", size(total)],
    ["Limit", size(limit)],
    ["Free", share(1 - total / limit)],
  ]);
}

function memoryCurve(view, now) {
  const memory = view.plan.memory[view.device];
  const end = memory.seconds ? view.plan.timelines[0].end_s : view.plan.tasks.length;
  const xs = [...memoryAxis(memory), end];
  const at = (column, index) => column[Math.min(index, column.length - 1)] ?? 0;
  const held = xs.map((x, index) => ({
    x,
    end,
    weights: memory.weights_bytes,
    activations: at(memory.activations, index),
    buffers: at(memory.buffers, index),
  }));
  if (xs[0] > 0) held.unshift({ ...held[0], x: 0, activations: 0, buffers: 0 });
  view.held = held;
  const withLimit = byId("memory-limit").checked;
  const top = 1.18 * Math.max(memory.peak_bytes, withLimit ? memory.limit_bytes : 0, 1);
  const lines = positionsOf(view).map((at) => ({
    xAxis: at,
    lineStyle: { color: now.accent, width: 2 },
    label: { show: false },
  }));
  if (memory.limit_bytes) lines.push(limitLine(memory, withLimit, top, now));
  // Sums from the top down, each area over the one before: what shows of an area is its part.
  const sums = {
    buffers: (row) => row.weights + row.activations + row.buffers,
    activations: (row) => row.weights + row.activations,
    weights: (row) => row.weights,
  };
  const area = (part) => ({
    name: part,
    type: "line",
    step: "end",
    symbol: "none",
    data: held.map((row) => [row.x, sums[part](row)]),
    lineStyle: { width: 1, color: now[part] },
    itemStyle: { color: now[part] },
    areaStyle: { color: now[part], opacity: 1 },
  });
  return {
    ...chartOption(now, { trigger: "axis", formatter: (rows) => curveTip(view, rows) }),
    legend: { data: heldParts(memory), top: 2, left: 60, textStyle: { color: now.ink } },
    grid: { left: 78, right: 24, top: 36, bottom: 76 },
    xAxis: valueAxis(now, memory.seconds ? { formatter: seconds, hideOverlap: true } : {}, {
      min: 0,
      max: end,
      name: memory.seconds ? turnText(view.plan) : "task position: nothing takes time",
      nameLocation: "middle",
      nameGap: 24,
      ...(memory.seconds ? {} : { minInterval: 1 }),
    }),
    yAxis: valueAxis(
      now,
      { formatter: size, showMaxLabel: false },
      { max: top, interval: byteInterval(top, 6) },
    ),
    dataZoom: axisZoom(now, {
      bottom: 8,
      height: 20,
      format: (value) => (memory.seconds ? seconds(value) : count(Math.round(value))),
    }),
    series: [
      area("buffers"),
      area("activations"),
      { ...area("weights"), markLine: { silent: true, symbol: "none", data: lines } },
      {
        name: "peak",
        type: "scatter",
        symbol: "diamond",
        symbolSize: 15,
        data: [[peakAt(memory), memory.peak_bytes]],
        z: 9,
        itemStyle: { color: now.warn, borderColor: now.surface, borderWidth: 1.5 },
        label: {
          show: true,
          formatter: peakText(memory),
          position: peakSide(peakAt(memory) / (end || 1)),
          color: now.ink,
          fontWeight: "bold",
          backgroundColor: now.surface,
          padding: [2, 4],
        },
      },
    ],
  };
}

/** "peak 16.7 MiB, 821 KiB of it the executor's". */
function peakText({ peak_bytes: peak, executor_bytes: own }) {
  return `peak ${size(peak)}${own ? `, ${size(own)} of it the executor's` : ""}`;
}

/** "one request", "one step of 8 micro-batches". */
function turnText({ head }) {
  const parts = head.step === null ? "" : ` of ${count(head.step.micro_batches)} micro-batches`;
  return `one ${plain(head.turn)}${parts}`;
}

/** A power of two that divides an axis into about `parts`. */
function byteInterval(most, parts) {
  return 2 ** Math.max(0, Math.ceil(Math.log2(most / parts)));
}

function peakSide(at) {
  if (at < 0.12) return "right";
  return at > 0.88 ? "left" : "top";
}

/** Where the device begins the selected tasks; of a block the first and the last. */
function startsOf({ plan, device }) {
  const chosen = refsOf(plan, selection.current);
  const { start_s: starts, device: of, ref } = plan.timelines[0];
  const own = starts.filter((_, event) => of[event] === device && chosen.has(ref[event]));
  return own.length > 2 ? [own.reduce((a, b) => Math.min(a, b)), own.reduce((a, b) => Math.max(a, b))] : own;
}

/** Where the selected tasks are on the axis; of a block its first and last. */
function positionsOf(view) {
  const { seconds: clock, position: places } = view.plan.memory[view.device];
  if (clock && view.plan.head.step === null) return startsOf(view);
  const at = [...refsOf(view.plan, selection.current)]
    .map((ref) => view.plan.position.get(ref))
    .filter((position) => position !== undefined)
    .flatMap((position) => {
      if (!clock) return [position + 0.5];
      return places.flatMap((place, moment) => (place === position ? [clock[moment]] : []));
    });
  return at.length > 2
    ? [at.reduce((a, b) => Math.min(a, b)), at.reduce((a, b) => Math.max(a, b))]
    : at;
}

function curveTip(view, rows) {
  const row = view.held[rows.find(({ seriesName }) => PARTS.includes(seriesName))?.dataIndex];
  if (!row) return "";
  const memory = view.plan.memory[view.device];
  const ref = row.x < row.end ? refAt(view, row.x) : undefined;
  const total = PARTS.reduce((sum, part) => sum + row[part], 0);
  const from = memory.seconds
    ? `From ${seconds(row.x)}`
    : `From position ${count(Math.min(row.x + 1, view.plan.tasks.length))}`;
  return tip(from, [
    ...PARTS.map((part) => [part, size(row[part])]),
    ["Together", size(total)],
    ["Task", ref === undefined ? "" : el("span", {}, taskLabel(view.plan, ref))],
  ]);
}

/** The live set of the device's peak. */
function showLive(view, focus) {
  const memory = view.plan.memory[view.device];
  const { peak_bytes: peak, peak_position: position, live } = memory;
  const at = memory.seconds ? `at ${seconds(memory.peak_s)}` : `at position ${count(position + 1)}`;
  const rows = live.name.map((_, index) => index);
  const table = makeTable({
    label: "Held at the peak",
    rows,
    columns: [
      {
        title: "Held",
        value: (row) => live.name[row],
        cell: (row, letters) => nameOf(live.name[row], letters),
        width: "minmax(120px,1fr)",
      },
      { title: "Kind", value: (row) => live.kind[row], width: "100px" },
      ...(view.plan.head.step !== null
        ? [
            {
              title: "Micro-batches",
              value: (row) => live.times[row],
              cell: (row) => (live.kind[row] === "weights" ? "" : count(live.times[row])),
              number: true,
              width: "110px",
            },
          ]
        : []),
      {
        title: "Bytes",
        value: (row) => live.bytes[row],
        cell: (row) => size(live.bytes[row]),
        number: true,
        width: "90px",
      },
      {
        title: "Share",
        value: (row) => live.bytes[row],
        cell: (row) => share(live.bytes[row] / (peak || 1)),
        number: true,
        width: "70px",
      },
    ],
  });
  const more = live.more ? ` and ${count(live.more)} more of ${size(live.more_bytes)}` : "";
  byId("memory-live").replaceChildren(
    el(
      "h3",
      {},
      `Device ${deviceText(view.plan, [view.device])} at its peak: ${size(peak)} ${at}; the largest ${count(rows.length)}${more}`,
    ),
    table.element,
  );
  table.draw();
  if (focus) table.element.focus();
  if (focus) byId("memory-live").scrollIntoView({ block: "nearest" });
}
