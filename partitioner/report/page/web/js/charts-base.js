// What all charts share: making, resizing, tooltips as DOM nodes, keys, saving.

/**
 * A chart in an element, redrawn with the colours of the page.
 *
 * What depends on the size waits until the element is shown; `after` runs after each drawing.
 */
function makeChart(element, option, after = () => {}) {
  const chart = charts.init(element, null, { renderer: "canvas" });
  const state = { stale: true };
  const draw = () => {
    state.stale = !element.clientWidth;
    if (state.stale) return;
    chart.setOption(option(theme()), { notMerge: true });
    after();
  };
  const resized = () => {
    if (!element.clientWidth) return;
    chart.resize();
    if (state.stale) draw();
    else after();
  };
  new ResizeObserver(framed(resized)).observe(element);
  themeListeners.push(draw);
  draw();
  return { chart, draw };
}

/** The element of a chart whose points the arrow keys visit, see `walkChart`. */
function walkable(classes, label) {
  return el("div", {
    class: classes,
    tabindex: "0",
    role: "application",
    "aria-label": `${label}. Left and right go from point to point; the table has the same.`,
  });
}

/** Left and right show the tooltip of one stop after the other, and say its text. */
function walkChart(element, chart, stops) {
  let at = -1;
  element.addEventListener("keydown", (event) => {
    const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: stops.length - 1 }[
      event.key
    ];
    if (event.key === "Escape") chart.dispatchAction({ type: "hideTip" });
    if (next === undefined || !stops.length) return;
    event.preventDefault();
    at = Math.max(0, Math.min(next, stops.length - 1));
    const { seriesIndex, dataIndex, text } = stops[at];
    chart.dispatchAction({ type: "showTip", seriesIndex, dataIndex });
    announce(text);
  });
  element.addEventListener("blur", () => chart.dispatchAction({ type: "hideTip" }));
}

/** A tooltip out of a title and pairs; as DOM nodes, so that names stay text. */
function tip(title, pairs) {
  return el(
    "div",
    { class: "tip" },
    el("b", {}, title),
    el(
      "dl",
      { class: "facts" },
      pairs
        .filter(([, value]) => value !== null && value !== "")
        .flatMap(([term, value]) => [el("dt", {}, term), el("dd", {}, value)]),
    ),
  );
}

function key(colour, label, extra = "") {
  return el(
    "span",
    { class: "key" },
    el("span", { class: `swatch ${extra}`, style: colour ? `background:${colour}` : null }),
    label,
  );
}

function saveBlob(blob, name) {
  const address = URL.createObjectURL(blob);
  const anchor = el("a", { href: address, download: name });
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

function saveChartPng(chart, name) {
  const data = chart.getDataURL({ type: "png", pixelRatio: 2, backgroundColor: theme().surface });
  const bytes = Uint8Array.from(atob(data.split(",")[1]), (letter) => letter.charCodeAt(0));
  saveBlob(new Blob([bytes], { type: "image/png" }), name);
}

function saveChartSvg(chart, name) {
  const size = { width: chart.getWidth(), height: chart.getHeight() };
  const paper = charts.init(null, null, { renderer: "svg", ssr: true, ...size });
  paper.setOption({ ...chart.getOption(), animation: false, backgroundColor: theme().surface });
  saveBlob(new Blob([paper.renderToSVGString()], { type: "image/svg+xml" }), name);
  paper.dispose();
}

/** Diagonal lines on a colour, as a fill. */
function hatch(line, ground) {
  const canvas = el("canvas", { width: 8, height: 8 });
  const pen = canvas.getContext("2d");
  pen.fillStyle = ground;
  pen.fillRect(0, 0, 8, 8);
  pen.strokeStyle = line;
  pen.lineWidth = 1;
  pen.beginPath();
  for (const shift of [-8, 0, 8]) {
    pen.moveTo(shift, 8);
    pen.lineTo(shift + 8, 0);
  }
  pen.stroke();
  return { image: canvas, repeat: "repeat" };
}

/** The limit of a device's memory, or, of a chart that does not reach it, a line that tells it. */
function limitLine(memory, reached, top, now) {
  const times = digits(memory.limit_bytes / (memory.peak_bytes || 1));
  const limit = `limit ${size(memory.limit_bytes)}`;
  return {
    yAxis: reached ? memory.limit_bytes : 0.985 * top,
    lineStyle: {
      color: now.warn,
      width: reached ? 2 : 1,
      type: reached ? "dashed" : "dotted",
    },
    label: {
      show: true,
      formatter: reached ? limit : `↑ ${limit}, ${times} times the peak`,
      position: "insideEndTop",
      color: now.ink,
    },
  };
}
