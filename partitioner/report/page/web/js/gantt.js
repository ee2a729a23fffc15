// A Gantt chart: events on lanes, two a device, over one time axis that is zoomed.
//
// A view of one has `line` (see `timeline-data.js`), `names` of its rows, `band(lane, height)` (the
// row of a lane, and its `top` and `bottom` from the middle of that row of so many pixels), `left`
// (pixels beside the lanes), `span` (what is seen, in seconds), `chosen` (references of events),
// `tip(piece)`, `tap(piece)` of a piece that is one event, and `fill()`, which draws the span.

const LEAST_TEXT_PX = 48; // of a text that is cut short
const MOST_ROW_PX = 150;

/** Draws the chart in an element; `option` is its option, by the colours of the page. */
function makeGantt(view, element, option) {
  view.element = element;
  const made = makeChart(element, option, () => view.fill());
  const { chart } = made;
  Object.assign(view, { chart, draw: made.draw });
  const drawSoon = framed(() => view.fill());
  chart.on("datazoom", () => {
    const { startValue, endValue } = chart.getOption().dataZoom[0];
    view.span = [startValue, endValue];
    drawSoon();
  });
  chart.on("click", ({ seriesId, dataIndex }) => {
    const piece = seriesId === "events" && view.pieces[dataIndex];
    if (!piece) return;
    const width = piece.to - piece.from;
    if (piece.many > 1) zoomGantt(view, piece.from - width / 2, piece.to + width / 2);
    else view.tap(piece);
  });
}

/**
 * The option of the chart; `series` are the names of what is drawn, from the back to the front.
 *
 * A line parts every `together` rows.
 */
function ganttOption(view, now, { label = {}, room = null, series, together }) {
  const tick = {
    formatter: (value) => timeTick(value, view.span),
    hideOverlap: true,
    showMaxLabel: false,
  };
  const parts = {
    show: true,
    interval: (at) => at % together === 0,
    lineStyle: { color: now.line },
  };
  const spare = Math.max(0, view.element.clientHeight - 82 - MOST_ROW_PX * view.names.length);
  return {
    ...chartOption(now, {
      trigger: "item",
      formatter: ({ seriesId, dataIndex }) =>
        seriesId === "events" && view.pieces[dataIndex] ? view.tip(view.pieces[dataIndex]) : "",
    }),
    grid: { left: view.left, right: room ? 34 : 18, top: 30, bottom: 52 + spare },
    xAxis: valueAxis(now, tick, { min: 0, max: view.line.end_s, position: "top" }),
    yAxis: nameAxis(now, view.names, { interval: 0, ...label }, { inverse: true, splitLine: parts }),
    dataZoom: [
      ...axisZoom(now, { bottom: 10 + spare, height: 22, format: seconds, span: view.span }),
      ...(room ? [laneScroll(now, room, { right: 6, width: 16 })] : []),
    ],
    series: series.map((id) => ({
      id,
      type: "custom",
      data: [],
      clip: true,
      silent: id !== "events",
      renderItem: () => null,
    })),
  };
}

/** Seconds of a pixel. */
function secondsPerPixel(view) {
  const [from, to] = view.span;
  return (to - from) / Math.max(100, view.chart.getWidth() - view.left - 18);
}

/** The series of what the span shows, narrow events together; `shape` draws a piece. */
function eventSeries(view, shape) {
  const perPixel = secondsPerPixel(view);
  view.pieces = view.line.lanes.flatMap((_, lane) =>
    lanePieces(view.line, lane, ...view.span, perPixel, view.chosen),
  );
  return {
    id: "events",
    data: view.pieces.map((piece) => [piece.from, view.band(piece.lane, 0).row, piece.to]),
    encode: { x: [0, 2], y: 1 },
    renderItem: (params, api) => shape(view.pieces[params.dataIndex], api),
  };
}

function zoomGantt(view, from, to) {
  if (!view.chart) return;
  view.span = [Math.max(0, from), Math.min(view.line.end_s, to)];
  view.chart.dispatchAction({
    type: "dataZoom",
    dataZoomIndex: 0,
    startValue: view.span[0],
    endValue: view.span[1],
  });
  view.fill();
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

function laneBox(view, api, from, lane, to, least = 1) {
  const { row, top, bottom } = view.band(lane, api.size([0, 1])[1]);
  const [left, middle] = api.coord([from, row]);
  const [right] = api.coord([to, row]);
  return { x: left, y: middle + top, width: Math.max(least, right - left), height: bottom - top };
}

/** A piece as shapes: its box, a frame if it is chosen, and `text(box)`. */
function ganttShape(view, now, piece, api, { fill, opacity = 1, text }) {
  const chosen = view.chosen.has(view.line.ref[piece.event]);
  const box = laneBox(view, api, piece.from, piece.lane, piece.to, chosen ? 4 : 1);
  const edge = { stroke: now.surface, lineWidth: box.width > 3 ? 0.5 : 0 };
  const frame = {
    type: "rect",
    shape: box,
    style: { fill: "none", stroke: now.accent, lineWidth: 3 },
  };
  const children = [
    { type: "rect", shape: box, style: { fill, opacity, ...edge } },
    ...(chosen ? [frame] : []),
    ...[text(box)].filter(Boolean),
  ];
  return { type: "group", children };
}

/**
 * The first of some texts that has room, at the left of what is seen of a box, or upright in it.
 *
 * The last is cut short; null if not even its beginning has room.
 */
function boxText(view, now, box, texts, ink) {
  const left = Math.max(box.x, view.left);
  const across = box.width - 6 - (left - box.x);
  const upright = across < LEAST_TEXT_PX && !texts.some((one) => textWidth(one) <= across);
  const [width, thick] = upright ? [box.height - 12, across + 6] : [across, box.height];
  const text = texts.find((one) => textWidth(one) <= width) ?? texts.at(-1);
  if (!text || width < Math.min(textWidth(text), LEAST_TEXT_PX) || thick <= 11) return null;
  return {
    type: "text",
    x: upright ? (left + box.x + box.width) / 2 : left + 3,
    y: upright ? box.y + 6 : box.y + box.height / 2 + 1,
    rotation: upright ? -Math.PI / 2 : 0,
    style: {
      text: short(text, 60),
      width,
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

function inkOf(colour, now) {
  return colour.startsWith?.("#") && colour.length === 7 ? inkOn(colour) : now.ink;
}

/** The tooltip of several events that are drawn as one. */
function shortEventsTip(piece, title, where) {
  return tip(title, [
    ...where,
    ["From", seconds(piece.from)],
    ["To", seconds(piece.to)],
    ["", "click to zoom in"],
  ]);
}
