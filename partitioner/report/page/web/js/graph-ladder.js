// The graph of a training plan: forward from the top down, backward beside it from the bottom up.

const RUNG_GAP = 28; // pixels between rows, and room for what a communication says
const TEXT_GAP = 20;
const SIDE_GAP = 190; // between the columns
const WIRES = 6; // edges beside each other that go around boxes

/** Whether a graph has a backward pass of blocks, which a ladder shows. */
function hasLadder(plan) {
  return plan.ribbon.training && plan.blocks.some(({ part, parent }) => part === "backward" && parent < 0);
}

/** The level around all as a ladder: a module's forward and backward pass are in one row. */
function inLadder(plan, visible, level) {
  const items = new Map(visible.items.map((item) => [item.id, item]));
  const asides = asidesOf(items, level);
  const begins = firstBackward(plan);
  const sideOf = (id) => rungOf(plan, items, { id }, begins).side;
  const beside = ({ id }) => asides.has(id) && sideOf(asides.get(id)) === "backward";
  const sides = rungSides(plan, items, level.nodes.filter((one) => !beside(one)));
  const rows = rungRows(sides);
  const wide = (side) => Math.max(0, ...sides[side].map(({ node }) => node.width));
  const apart = (wide("forward") + wide("backward")) / 2 + SIDE_GAP;
  const places = new Map();
  const gap = RUNG_GAP + (plan.comms.length ? TEXT_GAP : 0);
  let y = 0;
  for (const row of rows) {
    const height = Math.max(...row.map(({ node }) => node.height));
    for (const { node, side } of row)
      places.set(node.id, { x: side === "forward" ? 0 : apart, y: y + height / 2, side });
    y += height + gap;
  }
  rows.forEach((row, at) => row.forEach(({ node }) => (places.get(node.id).row = at)));
  placeBeside(places, asides, level.nodes.filter(beside), apart + wide("backward") / 2);
  const nodes = level.nodes.map((node) => ({ ...node, ...places.get(node.id) }));
  const outer = { forward: -wide("forward") / 2 - 20, backward: apart + wide("backward") / 2 + 20 };
  const middle = (wide("forward") - wide("backward") + apart) / 2;
  const routes = level.routes.map((route, number) => {
    const [a, b] = [places.get(route.from), places.get(route.to)];
    const points = wireOf(a, b, number % WIRES, outer, middle);
    const label = route.label && { x: ((points[0] ?? a).x + (points.at(-1) ?? b).x) / 2, y: (a.y + b.y) / 2 };
    return { ...route, points, label };
  });
  return bounded(nodes, routes);
}

function firstBackward(plan) {
  const backward = plan.blocks.filter(({ part, parent }) => part === "backward" && parent < 0);
  return Math.min(...backward.map(({ first }) => first));
}

/** The item that makes each output, of those that one alone makes. */
function asidesOf(items, level) {
  const makers = new Map();
  for (const { from, to } of level.routes)
    if (items.get(to)?.kind === "output") makers.set(to, makers.has(to) ? null : from);
  return new Map([...makers].filter(([, maker]) => maker));
}

/** Places outputs beside what makes them in the backward pass, as gradients, below each other. */
function placeBeside(places, asides, nodes, edge) {
  const x = edge + 44 + 8 * WIRES;
  const lowest = new Map();
  for (const { id, width, height } of nodes) {
    const maker = asides.get(id);
    const { y, row } = places.get(maker);
    const top = lowest.get(maker) ?? y - height / 2;
    places.set(id, { x: x + width / 2, y: top + height / 2, side: "backward", row });
    lowest.set(maker, top + height + 10);
  }
}

/** The items of each side in the order of their nodes, the backward ones from the last. */
function rungSides(plan, items, nodes) {
  const begins = firstBackward(plan);
  const sides = { forward: [], backward: [] };
  for (const node of nodes) {
    const rung = rungOf(plan, items, node, begins);
    sides[rung.side].push(rung);
  }
  sides.forward.sort((a, b) => a.at - b.at);
  sides.backward.sort((a, b) => b.at - a.at);
  return sides;
}

/** {node, side, at, key} of an item: where its nodes are in the graph, and what it is of. */
function rungOf(plan, items, node, begins) {
  const opened = /^b(\d+)$/.exec(node.id);
  if (opened) {
    const block = plan.blocks[Number(opened[1])];
    const held = nodesOf(block.nodes);
    const at = held.reduce((sum, one) => sum + one, 0) / held.length;
    return { node, side: block.part, at, key: `${block.label} ${plan.nodes[held[0]].group}` };
  }
  const item = items.get(node.id);
  if (item.type === "terminals")
    return { node, side: "forward", at: item.kind === "input" ? -1 : Infinity, key: node.id };
  const side = item.index < begins ? "forward" : "backward";
  return { node, side, at: item.index, key: node.id };
}

/** Rows of one or two items: those of one module are in one, and what is between stands beside. */
function rungRows({ forward, backward }) {
  const rows = [];
  let [left, right] = [0, 0];
  const beside = (upTo, downTo) => {
    const [as, bs] = [forward.slice(left, upTo), backward.slice(right, downTo)];
    const many = Math.max(as.length, bs.length);
    for (let at = many; at > 0; at -= 1)
      rows.push([as.at(-at), bs.at(-at)].filter((rung, side) => rung && at <= [as, bs][side].length));
    [left, right] = [upTo, downTo];
  };
  for (const [at, twin] of twins(forward, backward)) {
    beside(at, twin);
    rows.push([forward[at], backward[twin]]);
    [left, right] = [at + 1, twin + 1];
  }
  beside(forward.length, backward.length);
  return rows;
}

/** The most pairs of equal keys that follow each other on both sides. */
function twins(as, bs) {
  const most = as.map(() => new Array(bs.length + 1).fill(0)); // pairs from here on
  most.push(new Array(bs.length + 1).fill(0));
  for (let a = as.length - 1; a >= 0; a -= 1)
    for (let b = bs.length - 1; b >= 0; b -= 1)
      most[a][b] =
        as[a].key === bs[b].key ? 1 + most[a + 1][b + 1] : Math.max(most[a + 1][b], most[a][b + 1]);
  const pairs = [];
  for (let [a, b] = [0, 0]; a < as.length && b < bs.length; ) {
    if (as[a].key === bs[b].key) pairs.push([a++, b++]);
    else if (most[a + 1][b] >= most[a][b + 1]) a += 1;
    else b += 1;
  }
  return pairs;
}

/** The bends of an edge: none to the next row or across, else around the boxes between. */
function wireOf(a, b, wire, outer, middle) {
  if (a.side !== b.side) {
    const x = middle + 8 * (wire - WIRES / 2);
    return a.row === b.row ? [] : [{ x, y: a.y }, { x, y: b.y }];
  }
  if (Math.abs(a.row - b.row) < 2) return [];
  const x = outer[a.side] + (a.side === "forward" ? -8 : 8) * wire;
  return [{ x, y: a.y }, { x, y: b.y }];
}
