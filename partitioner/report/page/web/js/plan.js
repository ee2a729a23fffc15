// The plan with what the views ask of it: the tree of blocks, the visible graph, positions.

const FOLD_ABOVE = 150; // items of one level, above which the page folds runs of them itself

/** The data of a report with its indices. */
function readPlan(data) {
  const blocks = data.blocks.map((block) => ({ ...block }));
  const plan = { ...data, blocks };
  plan.fills = groupFills(data.groups, new Set(data.nodes.map((node) => node.group)));
  plan.groupNames = data.groups.map((group) => deviceText(plan, group.devices));
  plan.children = childrenOf(blocks, data.nodes.length);
  plan.children.forEach((_, level) => foldLevel(plan, level - 1));
  plan.holder = holders(plan);
  plan.position = new Map(data.tasks.map((ref, position) => [ref, position]));
  plan.incoming = data.nodes.map(() => []);
  plan.outgoing = data.nodes.map(() => []);
  data.edges.forEach((edge, index) => {
    plan.outgoing[edge.u].push(index);
    plan.incoming[edge.v].push(index);
  });
  plan.commsOfNode = data.nodes.map(() => []);
  data.comms.forEach((comm, index) => {
    if (comm.producer >= 0) plan.commsOfNode[comm.producer].push(index);
    if (comm.consumer >= 0) plan.commsOfNode[comm.consumer].push(index);
  });
  return plan;
}

/** The devices of lanes: a lane of a large cluster stands for several equal devices. */
function deviceText(plan, lanes) {
  return ranges(lanes.flatMap((lane) => plan.devices[lane].members));
}

/** The names of all lanes: numbers and name of their devices, "2: a100". */
function laneNames(plan, letters = 14) {
  return plan.devices.map(({ name }, lane) => `${deviceText(plan, [lane])}: ${short(name, letters)}`);
}

/** What each level holds in order, outermost first: {node} or {block}; index 0 is the top. */
function childrenOf(blocks, nodes) {
  const children = [[], ...blocks.map(() => [])];
  const depth = blocks.map((block) => depthOf(blocks, block));
  const innermost = new Int32Array(nodes).fill(-1);
  const order = blocks.map((_, index) => index).sort((a, b) => depth[a] - depth[b]);
  for (const index of order) for (const node of nodesOf(blocks[index].nodes)) innermost[node] = index;
  const items = blocks.map((block, index) => ({
    block: index,
    at: block.first,
    level: block.parent,
  }));
  innermost.forEach((level, node) => items.push({ node, at: node, level }));
  for (const item of items) children[item.level + 1].push(item);
  for (const level of children) level.sort((a, b) => a.at - b.at);
  return children;
}

function depthOf(blocks, block) {
  return block.parent < 0 ? 0 : 1 + depthOf(blocks, blocks[block.parent]);
}

/**
 * Folds a level that is too long to draw into blocks of the page's own.
 *
 * They hold what runs in one stage, or on one group of devices, if there are many of these; else
 * runs of the level. Forward and backward passes stay apart, and have equal names.
 */
function foldLevel(plan, level) {
  const items = plan.children[level + 1];
  if (items.length <= FOLD_ABOVE) return;
  const parts = partsOf(plan, items);
  const chunks = chunksOf(plan, items, parts);
  const names = chunkNames(plan, items, parts, chunks);
  const runs = new Map();
  items.forEach((item, at) => {
    const key = `${chunks[at]} ${parts[at]}`;
    if (!runs.has(key)) runs.set(key, { chunk: chunks[at], part: parts[at], held: [] });
    runs.get(key).held.push(item);
  });
  plan.children[level + 1] = [...runs.values()].map(({ chunk, part, held }) => {
    const index = plan.blocks.length;
    plan.blocks.push({
      label: names.get(chunk),
      first: held[0].at,
      last: Math.max(...held.map(({ at, block }) => (block === undefined ? at : plan.blocks[block].last))),
      nodes: held.flatMap(({ node, block }) => (block === undefined ? [node, node] : plan.blocks[block].nodes)),
      part,
      parent: level,
      kind: -1,
      index: 0,
      count: 1,
    });
    for (const { block } of held) if (block !== undefined) plan.blocks[block].parent = index;
    plan.children[index + 1] = held;
    return { block: index, at: held[0].at };
  });
}

/** The pass of each item: of a single node that of where it stands. */
function partsOf(plan, items) {
  const backward = items.filter(({ block }) => plan.blocks[block]?.part === "backward");
  const begins = backward.length ? Math.min(...backward.map(({ at }) => at)) : Infinity;
  return items.map(({ at, block }) => plan.blocks[block]?.part ?? (at < begins ? "forward" : "backward"));
}

/** The number of the stage, or group, or run that each item is folded into. */
function chunksOf(plan, items, parts) {
  const places = items.map(({ at, block }) => {
    const node = plan.nodes[block === undefined ? at : plan.blocks[block].nodes[0]];
    return node.stage ?? node.group;
  });
  if (2 * new Set(places).size >= Math.sqrt(items.length)) return places;
  const length = Math.ceil(Math.sqrt(items.length));
  const known = new Map();
  let [forward, last] = [0, 0];
  items.forEach((item, at) => {
    if (parts[at] !== "forward") return;
    last = Math.floor(forward++ / length);
    if (item.block !== undefined) known.set(plan.blocks[item.block].label, last);
  });
  forward = 0;
  return items.map((item, at) => {
    if (parts[at] === "forward") return Math.floor(forward++ / length);
    return (last = known.get(plan.blocks[item.block]?.label) ?? last);
  });
}

/** The name of each chunk: its first and last block of the forward pass, or what it has else. */
function chunkNames(plan, items, parts, chunks) {
  const held = new Map();
  items.forEach((item, at) => {
    const rank = (parts[at] === "forward" ? 0 : 2) + (item.block === undefined ? 1 : 0);
    if (!held.has(chunks[at])) held.set(chunks[at], [[], [], [], []]);
    held.get(chunks[at])[rank].push(itemLabel(plan, item));
  });
  return new Map(
    [...held].map(([chunk, ranks]) => {
      const names = ranks.find((some) => some.length);
      return [chunk, [...new Set([names[0], names.at(-1)])].join(" … ")];
    }),
  );
}

function itemLabel(plan, item) {
  return item.block === undefined ? shortName(plan.nodes[item.node]) : short(plan.blocks[item.block].label, 24);
}

/** Innermost block of each node, -1 for none. */
function holders(plan) {
  const holder = new Int32Array(plan.nodes.length).fill(-1);
  plan.children.forEach((items, level) => {
    for (const item of items) if (item.node !== undefined) holder[item.node] = level - 1;
  });
  return holder;
}

/** Blocks around a block or node, outermost first. */
function blocksAround(plan, block) {
  const path = [];
  for (let at = block; at >= 0; at = plan.blocks[at].parent) path.unshift(at);
  return path;
}

function blockSums(plan, index) {
  plan.sums ??= new Map();
  if (!plan.sums.has(index)) plan.sums.set(index, sumBlock(plan, index));
  return plan.sums.get(index);
}

function sumBlock(plan, index) {
  const held = new Set(nodesOf(plan.blocks[index].nodes));
  const groups = new Set();
  const ops = new Map();
  const sums = {
    nodes: held.size,
    seconds: 0,
    flops: 0,
    bytes: 0,
    sharded: 0,
    comms: 0,
    commSeconds: 0,
  };
  for (const node of held) {
    const row = plan.nodes[node];
    groups.add(row.group);
    ops.set(row.op, (ops.get(row.op) ?? 0) + 1);
    sums.seconds += row.seconds;
    sums.flops += row.flops;
    sums.bytes += row.bytes;
    sums.sharded += row.kind === "sharded" ? 1 : 0;
  }
  for (const comm of plan.comms) {
    const inside = held.has(comm.producer) && held.has(comm.consumer);
    sums.comms += inside ? 1 : 0;
    sums.commSeconds += inside ? comm.seconds : 0;
  }
  const devices = [...new Set([...groups].flatMap((group) => plan.groups[group].devices))];
  return { ...sums, groups: [...groups], devices, ops: [...ops].sort((a, b) => b[1] - a[1]) };
}

/** Items and merged edges to draw while the blocks `open` are open. */
function visibleGraph(plan, open) {
  const items = [];
  const owner = new Array(plan.nodes.length);
  const walk = (level) => {
    for (const item of plan.children[level + 1]) {
      if (item.block === undefined) {
        items.push({ id: `n${item.node}`, type: "node", index: item.node, parent: level });
        owner[item.node] = `n${item.node}`;
      } else if (open.has(item.block)) {
        walk(item.block);
      } else {
        const id = `b${item.block}`;
        items.push({ id, type: "block", index: item.block, parent: level });
        for (const node of nodesOf(plan.blocks[item.block].nodes)) owner[node] = id;
      }
    }
  };
  walk(-1);
  const merged = new Map();
  plan.edges.forEach((edge) => mergeEdge(merged, owner[edge.u], owner[edge.v], edge, edge.comms));
  items.push(...terminalItems(plan, owner, merged));
  return { items, edges: [...merged.values()], owner };
}

function mergeEdge(merged, source, target, value, comms) {
  if (source === target) return;
  const key = `${source}>${target}`;
  let edge = merged.get(key);
  if (!edge) merged.set(key, (edge = { id: key, source, target, values: [], comms: new Set() }));
  edge.values.push(value);
  for (const comm of comms) edge.comms.add(comm);
}

/** Graph inputs and outputs; those at the same items are drawn as one. */
function terminalItems(plan, owner, merged) {
  const bundles = new Map();
  plan.terminals.forEach((terminal, index) => {
    const targets = [...new Set(terminal.nodes.map((node) => owner[node]))].sort();
    const key = `${terminal.kind} ${targets}`;
    if (!bundles.has(key)) bundles.set(key, { kind: terminal.kind, ids: [], targets });
    bundles.get(key).ids.push(index);
  });
  return [...bundles.values()].map(({ kind, ids, targets }, number) => {
    const id = `t${number}`;
    for (const terminal of ids.map((index) => plan.terminals[index])) {
      for (const target of targets) {
        const comms = terminalComms(plan, terminal, target, owner);
        const value = { value: terminal.name, comms };
        if (kind === "input") mergeEdge(merged, id, target, value, comms);
        else mergeEdge(merged, target, id, value, comms);
      }
    }
    return { id, type: "terminals", kind, ids, parent: -1 };
  });
}

function terminalComms(plan, terminal, target, owner) {
  const [far, near] =
    terminal.kind === "input" ? ["producer", "consumer"] : ["consumer", "producer"];
  plan.terminalComms ??= plan.comms.flatMap((comm, index) =>
    comm.producer < 0 || comm.consumer < 0 ? [index] : [],
  );
  return plan.terminalComms.filter((index) => {
    const comm = plan.comms[index];
    return comm[far] < 0 && comm.value === terminal.name && owner[comm[near]] === target;
  });
}

/**
 * "all-reduce 1.5 MiB 12 µs", or sums of several; "" if there is none.
 *
 * A communication that several edges wait for is counted where its first consumer is.
 */
function edgeLabel(plan, edge, owner) {
  if (!edge.comms.size) return "";
  const all = [...edge.comms];
  const own = all.filter(
    (index) => owner[plan.comms[index].consumer] === edge.target || plan.comms[index].consumer < 0,
  );
  if (own.length) return commsLabel(own.map((index) => plan.comms[index]));
  const kinds = [...new Set(all.map((index) => plan.comms[index].kind))];
  return `${plain(kinds.join(", "))}\nshared`;
}

function commsLabel(rows) {
  const kinds = [...new Set(rows.map((row) => row.kind))];
  const bytes = rows.reduce((sum, row) => sum + row.bytes, 0);
  const time = rows.reduce((sum, row) => sum + row.seconds, 0);
  const what = kinds.length === 1 ? kinds[0] : "communications";
  return `${rows.length > 1 ? `${rows.length}× ` : ""}${plain(what)}\n${size(bytes)} ${seconds(time)}`;
}
