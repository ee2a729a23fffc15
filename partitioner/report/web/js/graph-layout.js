// Sizes and places of what the graph shows: dagre computes them, cytoscape draws.

const GRAPH_FONT = "12px system-ui, sans-serif";
const SLOW_LAYOUT_ABOVE = 250; // items, above which a quicker ranking is used
const measure = document.createElement("canvas").getContext("2d");

function textWidth(text) {
  measure.font = GRAPH_FONT;
  return Math.max(...text.split("\n").map((line) => measure.measureText(line).width));
}

/** The label of an item with its size. */
function itemFace(plan, item) {
  const label = labelOf(plan, item);
  const lines = label.split("\n").length;
  return { label, w: Math.max(64, Math.ceil(textWidth(label)) + 24), h: 15 * lines + 14 };
}

function labelOf(plan, item) {
  if (item.type === "terminals") {
    const [first] = item.ids.map((index) => plan.terminals[index]);
    if (item.ids.length > 1) return `${item.ids.length} ${item.kind}s`;
    return `${item.kind}\n${short(first.name, 24)}`;
  }
  if (item.type === "node") {
    const row = plan.nodes[item.index];
    return `${short(row.op, 20)}  @${short(plan.groupNames[row.group], 12)}\n${shortName(row)}`;
  }
  const block = plan.blocks[item.index];
  const sums = blockSums(plan, item.index);
  const repeat = block.count > 1 ? `  (${block.index + 1} of ${block.count})` : "";
  const where = short(ranges(sums.devices), 12);
  return (
    `+ ${short(block.label, 28)}${repeat}\n${count(sums.nodes)} nodes  @${where}  ${seconds(sums.seconds)}` +
    (sums.comms ? `\n${count(sums.comms)} communications  ${seconds(sums.commSeconds)}` : "")
  );
}

/** The last parts of a name, which tell nodes apart; a part that only repeats the type is left out. */
function shortName({ name, op }) {
  if (name.length > 4000) return short(name, 26);
  const parts = name.split("/").filter(Boolean);
  if (parts.length > 1 && parts[parts.length - 1].replace(/_\d+$/, "") === op) parts.pop();
  return short(parts.slice(-2).join("/"), 26);
}

/** Places of items and bends of edges; opened blocks are clusters. */
function layoutGraph(plan, view, direction) {
  const graph = new graphs.Graph({ compound: true });
  const many = view.items.length > SLOW_LAYOUT_ABOVE;
  graph.setGraph({
    rankdir: direction, nodesep: 26, ranksep: 40, edgesep: 14, marginx: 20, marginy: 20,
    ranker: many ? "longest-path" : "network-simplex",
  });
  const faces = new Map();
  for (const item of view.items) {
    const face = itemFace(plan, item);
    faces.set(item.id, face);
    graph.setNode(item.id, { width: face.w, height: face.h });
    if (item.parent >= 0) clusterPath(plan, graph, item);
  }
  for (const edge of view.edges) {
    const label = edge.comms.size ? commsLabel(plan, [...edge.comms]) : "";
    edge.label = label;
    const room = label ? { width: textWidth(label) + 12, height: 34, labelpos: "c" } : {};
    graph.setEdge(edge.source, edge.target, room);
  }
  graphs.layout(graph);
  const places = new Map(view.items.map((item) => [item.id, graph.node(item.id)]));
  for (const edge of view.edges) edge.bends = graph.edge(edge.source, edge.target).points.slice(1, -1);
  return { faces, places };
}

function clusterPath(plan, graph, item) {
  let child = item.id;
  for (let at = item.parent; at >= 0; at = plan.blocks[at].parent) {
    const id = `b${at}`;
    const known = graph.hasNode(id);
    if (!known) graph.setNode(id, {});
    graph.setParent(child, id);
    if (known) return;
    child = id;
  }
}

/** Bends relative to the line between two places, as cytoscape wants them. */
function segments(source, target, bends) {
  const along = { x: target.x - source.x, y: target.y - source.y };
  const squared = along.x ** 2 + along.y ** 2 || 1;
  const length = Math.sqrt(squared);
  const from = bends.map((bend) => ({ x: bend.x - source.x, y: bend.y - source.y }));
  return {
    weights: from.map((bend) => (bend.x * along.x + bend.y * along.y) / squared),
    distances: from.map((bend) => (bend.y * along.x - bend.x * along.y) / length),
  };
}
