// The arrows of the overview: what goes from lane to lane.

const MOST_ARROWS = 80;
const LABEL_ROOM = 96; // pixels in which only one arrow of several has its bytes

/** Communications between boxes of different lanes, merged: {from, to, bytes, times}. */
function sendsBetween(view) {
  const { plan } = view;
  const owner = new Int32Array(plan.nodes.length).fill(-1);
  for (const index of view.boxes)
    for (const node of nodesOf(plan.ribbon.boxes[index].nodes)) owner[node] = index;
  const merged = new Map();
  for (const comm of plan.comms) {
    const from = ownerNear(plan, owner, comm.producer, plan.incoming, "u");
    const to = ownerNear(plan, owner, comm.consumer, plan.outgoing, "v");
    if (from < 0 || to < 0 || from === to) continue;
    const lanes = plan.ribbon.boxes[from].lanes;
    if (lanes.join() === plan.ribbon.boxes[to].lanes.join()) continue;
    const id = `${from}>${to}`;
    const row = merged.get(id) ?? { from, to, bytes: 0, times: 0 };
    row.bytes += comm.bytes;
    row.times += 1;
    merged.set(id, row);
  }
  return [...merged.values()].sort((a, b) => b.bytes - a.bytes);
}

/** The box of a node; of one that takes no time, as an alias, that of the first beyond it. */
function ownerNear(plan, owner, start, edges, end) {
  const queue = start < 0 ? [] : [start];
  const seen = new Set(queue);
  while (queue.length) {
    const node = queue.shift();
    if (owner[node] >= 0) return owner[node];
    for (const edge of edges[node]) {
      const next = plan.edges[edge][end];
      if (seen.has(next) || plan.nodes[next].group !== plan.nodes[start].group) continue;
      seen.add(next);
      queue.push(next);
    }
  }
  return -1;
}

function svg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function arrowsOf(view, width, height) {
  view.width = width;
  view.sends = sendsBetween(view);
  const drawn = view.sends.slice(0, MOST_ARROWS);
  const labels = []; // where there is one already
  const head = svg(
    "marker",
    { id: "arrow-head", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" },
    svg("path", { d: "M0 0L8 4L0 8z", class: "arrow-head" }),
  );
  return svg(
    "svg",
    { class: "arrows", width, height, "aria-hidden": "true" },
    svg("defs", {}, head),
    ...drawn.flatMap((send) => arrowOf(view, send, labels)),
  );
}

function arrowOf(view, { from, to, bytes, times }, labels) {
  const [a, b] = [view.places.get(from), view.places.get(to)];
  const down = b.y >= a.y;
  // A send may leave before its box ends: never later than what it goes to begins.
  const x = Math.max(a.x + 1, Math.min(a.x + a.w - 1, b.x));
  const [x1, y1] = [x, down ? a.y + a.h - 4 : a.y + 4];
  const [x2, y2] = [b.x + 1, down ? b.y + 4 : b.y + b.h - 4];
  const line = svg("path", {
    d: `M${x1} ${y1}L${x2} ${y2}`,
    class: "arrow",
    "marker-end": "url(#arrow-head)",
  });
  const long = Math.abs(x2 - x1) > LABEL_ROOM / 2;
  const text = `${size(bytes)}${times > 1 ? ` in ${count(times)}` : ""}`;
  const most = view.width - 7 * text.length;
  const left = Math.min(most, (long ? (x1 + x2) / 2 : Math.max(x1, x2)) + 6);
  const top = (y1 + y2) / 2 + (down ? 3 : 4);
  if (labels.some(([x, y]) => Math.abs(x - left) < LABEL_ROOM && Math.abs(y - top) < 14))
    return [line];
  labels.push([left, top]);
  return [line, svg("text", { x: left, y: top, class: "arrow-text" }, text)];
}
