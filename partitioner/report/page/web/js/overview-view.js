// The overview: a lane of each device or stage, the model on it as a ribbon scaled by time.

const CUT_LETTERS = {
  batch: ["B", "batch (dim 0 of activations)"],
  columns: ["C", "columns (output features, channels)"],
  rows: ["R", "rows (input features, then summed)"],
  heads: ["H", "heads"],
  positions: ["S", "positions (sequence, height, width)"],
  sums: ["+", "partial sums"],
  weights: ["W", "weights only"],
  replicated: ["=", "replicated"],
};
const AXIS_COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7"];
const WIDE = 0.3; // of all seconds: a box of one lane that takes more is opened at first
const NARROW_PX = 3; // a box is at least so wide
const LABEL_PX = 132; // of a lane's name

function startOverview(plan) {
  const view = { plan, opened: new Set(), boxes: [], chosen: null };
  const wide = WIDE * plan.ribbon.boxes.reduce((sum, box) => sum + (box.parent < 0 ? box.seconds : 0), 0);
  const boxes = plan.ribbon.boxes;
  plan.prefix = commonLength(boxes.map((box) => box.label));
  view.axes = [...new Set(boxes.flatMap((box) => box.cuts.map((cut) => cut.axis)))];
  view.inner = boxes.map(() => []);
  boxes.forEach((box, index) => box.parent >= 0 && view.inner[box.parent].push(index));
  boxes.forEach((box, index) => {
    const several = view.inner[index].length > 1 && box.count === 1;
    const shown = box.parent < 0 || view.opened.has(box.parent);
    if (plan.ribbon.lanes.length === 1 && several && shown && box.seconds > wide) view.opened.add(index);
  });
  const redraw = framed(() => showOverview(view));
  addEventListener("resize", redraw);
  view.grid = plan.ribbon.lanes.length > MOST_LANES;
  byId("overview-grid").hidden = !view.grid;
  byId("overview-grid").addEventListener("click", () => {
    view.grid = !view.grid;
    showOverview(view);
  });
  byId("overview-close").addEventListener("click", () => {
    view.opened.clear();
    showOverview(view);
  });
  byId("overview-answer").append(overviewAnswer(view));
  onSelect((item) => markOverview(view, item));
  return view;
}

function overviewLegend(view) {
  const { boxes, training } = view.plan.ribbon;
  const cuts = boxes.flatMap((box) => box.cuts);
  const used = new Set(cuts.flatMap((cut) => cut.words));
  const coloured = new Set(
    cuts.filter(({ words }) => words.some((word) => word !== "replicated")).map(({ axis }) => axis),
  );
  return [
    ...view.axes
      .filter((axis) => coloured.has(axis))
      .map((axis) => key(axisColour(view, axis), `mesh axis ${plain(axis)}`)),
    ...Object.entries(CUT_LETTERS)
      .filter(([word]) => used.has(word))
      .map(([, [letter, words]]) => el("span", { class: "key" }, el("b", {}, letter), words)),
    ...(training
      ? [
          el("span", { class: "key" }, el("i", { class: "mark forward" }), "forward"),
          el("span", { class: "key" }, el("i", { class: "mark backward" }), "backward"),
          el("span", { class: "key" }, el("i", { class: "mark update" }), "update"),
        ]
      : []),
    el("span", { class: "key soft" }, "width: predicted time; Enter or a double click opens a box"),
  ];
}

/** Boxes to draw: opened ones give way to what they hold. */
function visibleBoxes(view) {
  const walk = (index) =>
    view.opened.has(index) ? view.inner[index].flatMap(walk) : [index];
  return view.plan.ribbon.boxes.flatMap((box, index) => (box.parent < 0 ? walk(index) : []));
}

/** Draws the lanes for the width that there is, or the grid. */
function showOverview(view) {
  const canvas = byId("overview-canvas");
  const { ribbon } = view.plan;
  byId("overview-grid").textContent = view.grid ? "Lanes over time" : "Grid of devices";
  byId("overview-close").hidden = view.grid;
  byId("overview-legend").replaceChildren(...(view.grid ? gridLegend(view) : overviewLegend(view)));
  if (!canvas.clientWidth) return;
  if (view.grid) return canvas.replaceChildren(deviceGrid(view));
  const held = canvas.contains(document.activeElement) ? document.activeElement.dataset.box : null;
  const width = canvas.clientWidth - LABEL_PX - 16;
  const lanes = ribbon.lanes.length;
  const room = Math.max(0, canvas.clientHeight - 30);
  const lane = Math.max(46, Math.min(lanes === 1 ? 480 : 150, room / Math.max(1, lanes) - 6));
  view.boxes = visibleBoxes(view);
  const at = clockOf(ribbon.boxes, width);
  view.places = placeBoxes(view, at, lane);
  const over = Math.max(0, ...[...view.places.values()].map((box) => box.x + box.w)) - LABEL_PX;
  if (over > width) view.places = placeBoxes(view, (time) => at(time) * (width / over) ** 2, lane);
  const body = el("div", {
    class: "ribbon",
    style: `height:${24 + lanes * (lane + 6)}px;--lane:${lane}px`,
  });
  ribbon.lanes.forEach((row, at) => body.append(laneName(view, row, at, lane)));
  body.append(...partHeads(view));
  for (const index of view.boxes) body.append(boxElement(view, index, lane));
  body.append(arrowsOf(view, width + LABEL_PX + 16, 24 + lanes * (lane + 6)));
  canvas.replaceChildren(body);
  if (held) canvas.querySelector(`[data-box="${held}"]`)?.focus();
  markOverview(view, selection.current);
}

/**
 * From seconds to pixels. Time in which no box runs, as of other micro-batches, is cut short.
 */
function clockOf(boxes, width) {
  const outer = boxes.filter((box) => box.parent < 0).sort((a, b) => a.start_s - b.start_s);
  const spans = []; // [start, end, pixels before it in seconds]
  let [last, spent] = [0, 0];
  const whole = outer.reduce((sum, box) => sum + box.seconds, 0);
  for (const { start_s, end_s } of outer) {
    if (end_s <= last) continue;
    spent += Math.min(Math.max(0, start_s - last), 0.03 * whole);
    const from = Math.max(start_s, last);
    spans.push([from, end_s, spent]);
    spent += end_s - from;
    last = end_s;
  }
  const scale = width / (spent || 1);
  return (time) => {
    const span = spans.findLast(([start]) => start <= time) ?? [0, 0, 0];
    return (span[2] + Math.min(time, span[1]) - span[0]) * scale;
  };
}

/** {x, w, y, h} of each visible box; boxes of a lane do not overlap. */
function placeBoxes(view, clock, lane) {
  const places = new Map();
  const free = new Map();
  const { boxes } = view.plan.ribbon;
  const order = [...view.boxes].sort((a, b) => boxes[a].start_s - boxes[b].start_s);
  for (const index of order) {
    const { lanes, start_s, end_s } = boxes[index];
    const from = Math.max(LABEL_PX + clock(start_s), ...lanes.map((at) => free.get(at) ?? 0));
    const to = Math.max(from + NARROW_PX, LABEL_PX + clock(end_s));
    for (const at of lanes) free.set(at, to);
    const top = Math.min(...lanes);
    const span = Math.max(...lanes) - top + 1;
    const h = span * (lane + 6) - 6;
    places.set(index, { x: from, w: to - from - 1, y: 24 + top * (lane + 6), h });
  }
  return places;
}

function laneName({ plan }, row, at, lane) {
  const stage = stageText(row);
  return el(
    "div",
    { class: "lane", title: plain(row.runs), style: `top:${24 + at * (lane + 6)}px;height:${lane}px` },
    el("div", { class: "lane-name" }, [
      stage ? el("b", {}, stage) : null,
      el("b", {}, laneTitle(plan, row)),
      row.mesh && lane >= 60 ? el("span", { class: "soft" }, plain(row.mesh)) : null,
      plan.ribbon.lanes.length > 1
        ? el("span", { class: lane < 60 ? "lane-what short" : "lane-what" }, plain(row.runs))
        : null,
    ]),
  );
}

/** "stage 3" of a plan in stages, else "". */
function stageText({ stages }) {
  return stages.length ? `${stages.length > 1 ? "stages" : "stage"} ${ranges(stages)}` : "";
}

/** "0-3: h100" */
function laneTitle(plan, { devices }) {
  const names = [...new Set(devices.map((device) => plan.devices[device].name))];
  return plain(`${deviceText(plan, devices)}: ${short(names.join(", "), 24)}`);
}

/** "forward" and "backward" over where each begins. */
function partHeads(view) {
  const { boxes, training } = view.plan.ribbon;
  if (!training) return [];
  return ["forward", "backward", "update"].flatMap((part) => {
    const own = boxes.filter((box) => box.part === part);
    if (!own.length) return [];
    const shown = view.boxes.filter((index) => boxes[index].part === part);
    const from = Math.min(...shown.map((index) => view.places.get(index).x));
    return [el("div", { class: `part ${part}`, style: `left:${from}px` }, part)];
  });
}

function boxElement(view, index, lane) {
  const box = view.plan.ribbon.boxes[index];
  const { x, y, w, h } = view.places.get(index);
  const name = boxName(view.plan, box, w < 120);
  const element = el(
    "button",
    {
      type: "button",
      class: `box ${box.part}${box.count > 1 ? " many" : ""}`,
      style: `left:${x}px;top:${y}px;width:${w}px;height:${h}px`,
      title: boxTitle(view, box),
      "aria-label": boxTitle(view, box).replaceAll("\n", ", "),
      "data-box": String(index),
      click: () => {
        view.chosen = index;
        select(itemOfBox(view, index), "overview");
      },
      dblclick: () => openBox(view, index),
      keydown: (event) => boxKey(view, index, event),
    },
    w < 16 ? null : boxBody(view, index, name, w, lane),
  );
  if (!view.axes.length) {
    const group = view.plan.nodes[box.nodes[0]].group;
    element.style.setProperty("--fill", view.plan.fills[group].colours[0]);
    element.classList.add("own");
  }
  return element;
}

function boxBody(view, index, name, width, lane) {
  const box = view.plan.ribbon.boxes[index];
  const narrowChips = box.cuts.map((cut) => chipsOf(view, cut, width));
  if (width < 50 && lane < 80) return width < 26 ? [] : narrowChips;
  if (width < 50) return [el("span", { class: "box-name upright" }, plain(name)), ...narrowChips];
  const lines = [el("span", { class: "box-name" }, plain(name))];
  if (lane >= 60 && box.label) lines.push(el("span", { class: "box-ops" }, plain(box.ops)));
  const chips = box.cuts.map((cut) => chipsOf(view, cut, width));
  if (chips.length) lines.push(el("span", { class: "chips" }, chips));
  if (lane >= 90) lines.push(el("span", { class: "box-ops" }, seconds(box.seconds)));
  if (lane >= 200 && width > 150) lines.push(...innerLines(view, index, width));
  return lines;
}

/** What is cut in the parts of a box, one line each; of equal boxes, in one of them. */
function innerLines(view, index, width) {
  const { boxes } = view.plan.ribbon;
  const first = boxes[index].count > 1 ? view.inner[index][0] : index;
  const parts = view.inner[first].map((at) => boxes[at]);
  const own = parts[0] ? commonLength(parts.map((part) => part.label)) : 0;
  return parts.slice(0, 12).map((part) =>
    el("span", { class: "inner" }, [
      ...part.cuts.map((cut) => chipsOf(view, cut, width)),
      ` ${plain(short(part.label.slice(own) || part.ops, 30))}`,
    ]),
  );
}

function chipsOf(view, { axis, words }, width) {
  const shown = words.filter((word, at) => at === 0 || word !== "weights");
  const letters = shown.map((word) => CUT_LETTERS[word]?.[0] ?? "?").join(width < 60 ? "" : " ");
  const nothing = shown.every((word) => word === "replicated");
  const style = nothing ? null : `background:${axisColour(view, axis)}`;
  return el("span", { class: nothing ? "chip none" : "chip", style }, letters);
}

function boxTitle(view, box) {
  const cuts = box.cuts.map((cut) => `${cut.axis}: ${cut.words.join(", ")}`);
  const parts = [
    boxName({ prefix: 0 }, box),
    box.label ? box.ops : "",
    view.plan.ribbon.training ? box.part : "",
    `devices ${deviceText(view.plan, devicesOfBox(view, box))}`,
    ...cuts,
    `${seconds(box.seconds)} predicted`,
  ];
  return plain(parts.filter(Boolean).join(", "));
}

function devicesOfBox({ plan }, box) {
  return [...new Set(box.lanes.flatMap((lane) => plan.ribbon.lanes[lane].devices))];
}

/** A block of the graph that has the nodes of a box, else its first node. */
function itemOfBox(view, index) {
  const { nodes } = view.plan.ribbon.boxes[index];
  const block = view.plan.blocks.findIndex((row) => row.nodes.join() === nodes.join());
  return block >= 0 ? { type: "block", id: block } : { type: "node", id: heaviest(view, nodes) };
}

function heaviest({ plan }, ranges) {
  let best = ranges[0];
  for (const node of nodesOf(ranges))
    if (plan.nodes[node].seconds > plan.nodes[best].seconds) best = node;
  return best;
}

function nodesOf(ranges) {
  const nodes = [];
  for (let at = 0; at < ranges.length; at += 2)
    for (let node = ranges[at]; node <= ranges[at + 1]; node += 1) nodes.push(node);
  return nodes;
}

function openBox(view, index) {
  if (!view.inner[index].length) return;
  view.opened.add(index);
  showOverview(view);
  byId("overview-canvas").querySelector(`[data-box="${view.inner[index][0]}"]`)?.focus();
}

function boxKey(view, index, event) {
  const at = view.boxes.indexOf(index);
  const next = { ArrowRight: at + 1, ArrowLeft: at - 1 }[event.key];
  if (event.key === "Enter" && view.inner[index].length) openBox(view, index);
  else if (event.key === "Backspace" && view.plan.ribbon.boxes[index].parent >= 0) {
    const parent = view.plan.ribbon.boxes[index].parent;
    view.opened.delete(parent);
    showOverview(view);
    byId("overview-canvas").querySelector(`[data-box="${parent}"]`)?.focus();
  } else if (next !== undefined)
    byId("overview-canvas").querySelector(`[data-box="${view.boxes[next]}"]`)?.focus();
  else return;
  event.preventDefault();
}

/** Outlines the boxes that hold the selection. */
function markOverview(view, item) {
  const refs = refsOf(view.plan, item);
  for (const element of byId("overview-canvas").querySelectorAll(".box")) {
    const { nodes } = view.plan.ribbon.boxes[Number(element.dataset.box)];
    const on =
      view.chosen === Number(element.dataset.box) ||
      (item?.type === "node" && nodesOf(nodes).some((node) => refs.has(node)));
    element.classList.toggle("chosen", Boolean(item) && on);
  }
  if (!item) view.chosen = null;
}
