// Sizes and places of what the graph shows: dagre computes them, cytoscape draws.

const GRAPH_FONT = "12px system-ui, sans-serif";
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
  const named = block.part === "backward" || plan.ribbon.training;
  const repeat = block.count > 1 && !named ? `  (${block.index + 1} of ${block.count})` : "";
  const where = short(deviceText(plan, sums.devices), 12);
  return (
    `+ ${short(block.label, 28)}${block.part === "backward" ? " backward" : ""}${repeat}\n${count(sums.nodes)} nodes  @${where}  ${seconds(sums.seconds)}` +
    (sums.comms ? `\n${count(sums.comms)} communication${sums.comms === 1 ? "" : "s"}  ${seconds(sums.commSeconds)}` : "")
  );
}

/** The last parts of a name, which tell nodes apart; a part that only repeats the type is left out. */
function shortName({ name, op }) {
  if (name.length > 4000) return short(name, 26);
  const parts = name.split("/").filter(Boolean);
  if (parts.length > 1 && parts[parts.length - 1].replace(/_\d+$/, "") === op) parts.pop();
  return short(parts.slice(-2).join("/"), 26);
}

/**
 * Places of items and bends of edges.
 *
 * Every opened block is laid out by itself and is one box to the level around it, which is much
 * quicker than one layout with clusters. Edges that leave a block pass a port on its border, so
 * that they are led around what is inside.
 */
function layoutGraph(plan, view, direction, aspect) {
  const faces = new Map(view.items.map((item) => [item.id, itemFace(plan, item)]));
  for (const edge of view.edges) edge.label = edgeLabel(plan, edge, view.owner);
  const levels = levelsOf(plan, view);
  const places = new Map();
  const routes = new Map(view.edges.map((edge) => [edge.id, []]));
  const top = layoutLevel(levels, "top", faces, direction);
  const whole = hasLadder(plan)
    ? inLadder(plan, view, top)
    : direction === "TB"
      ? inColumns(top, aspect)
      : top;
  placeLevel(whole, 0, 0, places, routes);
  for (const edge of view.edges) {
    const route = routes.get(edge.id).sort((a, b) => a.order - b.order);
    edge.bends = route.flatMap(({ points }) => points);
    edge.labelAt = edge.label ? route.find(({ order }) => order === 0).label : null;
  }
  return { faces, places };
}

/** The boxes around an item from outside, then the item itself. */
function chainOf(plan, item) {
  return ["top", ...blocksAround(plan, item.parent).map((block) => `b${block}`), item.id];
}

/** What each level holds, and which parts of which edges; deeper parts have a larger order. */
function levelsOf(plan, view) {
  const levels = new Map();
  const chains = new Map(view.items.map((item) => [item.id, chainOf(plan, item)]));
  const levelAt = (id) => {
    if (!levels.has(id)) levels.set(id, { children: new Set(), parts: [] });
    return levels.get(id);
  };
  for (const chain of chains.values())
    chain.slice(1).forEach((id, depth) => levelAt(chain[depth]).children.add(id));
  for (const edge of view.edges) {
    const [from, to] = [chains.get(edge.source), chains.get(edge.target)];
    let depth = 1;
    while (from[depth] === to[depth]) depth += 1;
    levelAt(from[depth - 1]).parts.push({ edge, from: from[depth], to: to[depth], order: 0 });
    for (let at = depth + 1; at < from.length; at += 1) {
      levelAt(from[at - 1]).parts.push({
        edge,
        from: from[at],
        to: `out ${edge.target}`,
        order: -at,
      });
    }
    for (let at = depth + 1; at < to.length; at += 1) {
      levelAt(to[at - 1]).parts.push({ edge, from: `in ${edge.source}`, to: to[at], order: at });
    }
  }
  return levels;
}

const BOX_PADDING = 26;

/** One level: places and routes relative to its upper left corner, and its size. */
function layoutLevel(levels, id, faces, direction) {
  const { children, parts } = levels.get(id);
  const graph = new graphs.Graph({ multigraph: true });
  graph.setGraph({ rankdir: direction, nodesep: 26, ranksep: 40, edgesep: 14 });
  const inner = new Map();
  for (const child of children) {
    if (levels.has(child)) inner.set(child, layoutLevel(levels, child, faces, direction));
    const size = inner.get(child) ?? faces.get(child);
    graph.setNode(child, { width: size.w, height: size.h });
  }
  for (const { edge, from, to, order } of parts) {
    if (order > 0) setPort(graph, from, ["first", from]);
    if (order < 0) setPort(graph, to, [to, "last"]);
    const room =
      order === 0 && edge.label
        ? { width: textWidth(edge.label) + 12, height: 34, labelpos: "c" }
        : {};
    graph.setEdge(from, to, room, edgeName(edge, order));
  }
  graphs.layout(graph);
  const routes = parts.map((part) => routeOf(graph, part));
  const nodes = [...children].map((child) => ({
    id: child,
    inner: inner.get(child),
    ...graph.node(child),
  }));
  return bounded(nodes, routes);
}

/** A port, held at the border by a heavy edge. */
function setPort(graph, port, anchor) {
  if (graph.hasNode(port)) return;
  for (const id of new Set([port, ...anchor]))
    if (!graph.hasNode(id)) graph.setNode(id, { width: 1, height: 1 });
  graph.setEdge(...anchor, { weight: 1000 });
}

/** Edges with a label are led apart; others between the same two boxes go the same way. */
function edgeName(edge, order) {
  return order === 0 && edge.label ? edge.id : "plain";
}

function routeOf(graph, { edge, from, to, order }) {
  const { points, x, y } = graph.edge(from, to, edgeName(edge, order));
  const port = order ? graph.node(order > 0 ? from : to) : null;
  const bends = points.slice(1, -1);
  if (order > 0) bends.unshift(port);
  if (order < 0) bends.push(port);
  return { edge: edge.id, from, to, order, points: bends, label: order || x === undefined ? null : { x, y } };
}

/** Moves a level's upper left corner to 0, 0, with room for its border. */
function bounded(nodes, routes) {
  const points = routes.flatMap((route) =>
    route.label ? [...route.points, route.label] : route.points,
  );
  const xs = [
    ...nodes.flatMap(({ x, width }) => [x - width / 2, x + width / 2]),
    ...points.map(({ x }) => x),
  ];
  const ys = [
    ...nodes.flatMap(({ y, height }) => [y - height / 2, y + height / 2]),
    ...points.map(({ y }) => y),
  ];
  const least = (values) => values.reduce((a, b) => Math.min(a, b));
  const most = (values) => values.reduce((a, b) => Math.max(a, b));
  const [left, top] = [least(xs) - BOX_PADDING, least(ys) - BOX_PADDING];
  return {
    nodes,
    routes,
    left,
    top,
    w: most(xs) + BOX_PADDING - left,
    h: most(ys) + BOX_PADDING - top,
  };
}

function placeLevel(level, x, y, places, routes) {
  const moved = (point) => ({ x: point.x - level.left + x, y: point.y - level.top + y });
  for (const node of level.nodes) {
    const centre = moved(node);
    if (node.inner)
      placeLevel(
        node.inner,
        centre.x - node.inner.w / 2,
        centre.y - node.inner.h / 2,
        places,
        routes,
      );
    else places.set(node.id, centre);
  }
  for (const { edge, order, points, label } of level.routes) {
    routes.get(edge).push({ order, points: points.map(moved), label: label && moved(label) });
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
