// The graph: what is visible is laid out and drawn; blocks open and close.

const VISIBLE_LIMIT = 1500; // items drawn at once
const READABLE_ZOOM = 0.75; // below it a graph is not fitted but shown from its beginning
const START_ZOOM = 0.95;

function startGraph(plan) {
  const view = {
    plan,
    open: new Set(),
    direction: "TB",
    cy: null,
    owner: [],
    items: new Map(),
    current: null,
  };
  byId("graph-legend").append(...graphLegend(plan));
  byId("graph-fit").addEventListener("click", () =>
    view.cy.animate({ fit: { padding: 24 }, duration: 150 }),
  );
  byId("graph-in").addEventListener("click", () => zoomGraph(view, 1.3));
  byId("graph-out").addEventListener("click", () => zoomGraph(view, 1 / 1.3));
  byId("graph-turn").addEventListener("click", () => turnGraph(view));
  byId("graph-open").addEventListener("click", () => openAll(view));
  byId("graph-close").addEventListener("click", () => setOpen(view, new Set()));
  byId("graph-png").addEventListener("click", () => saveGraph(view));
  byId("graph-canvas").addEventListener("keydown", (event) => graphKey(view, event));
  onSelect((item, from) => view.cy && markGraph(view, item, from !== "graph"));
  themeListeners.push(() => view.cy?.style(graphStyle()));
  return view;
}

/** First drawing, once the canvas has a size. */
function showGraph(view) {
  if (view.cy) return view.cy.resize();
  view.cy = graphs.cytoscape({
    container: byId("graph-canvas"),
    style: graphStyle(),
    minZoom: 0.02,
    maxZoom: 3,
    boxSelectionEnabled: false,
    selectionType: "single",
    autoungrabify: true,
  });
  view.cy.on("tap", (event) => tapGraph(view, event));
  view.cy.on("dbltap", "node", (event) => toggleBlock(view, view.items.get(event.target.id())));
  drawGraph(view);
  startZoom(view);
  markGraph(view, selection.current, true);
}

/** Fits a small graph; of a large one shows the beginning at a size that can be read. */
function startZoom(view) {
  const { cy } = view;
  if (cy.nodes().empty()) return;
  cy.fit(undefined, 24);
  if (cy.zoom() > 1.2) cy.zoom(1.2);
  cy.center();
  if (cy.zoom() >= READABLE_ZOOM) return;
  cy.zoom(START_ZOOM);
  const box = cy.elements().boundingBox();
  const first = cy.nodes()[0].position();
  if (hasLadder(view.plan))
    cy.pan({ x: (cy.width() - START_ZOOM * (box.x1 + box.x2)) / 2, y: 24 - START_ZOOM * box.y1 });
  else if (view.direction === "TB" && cy.width() > START_ZOOM * box.w)
    cy.pan({ x: cy.width() / 2 - START_ZOOM * first.x, y: 24 - START_ZOOM * box.y1 });
  else if (view.direction === "TB")
    cy.pan({ x: 24 - START_ZOOM * box.x1, y: 24 - START_ZOOM * box.y1 });
  else cy.pan({ x: 24 - START_ZOOM * box.x1, y: cy.height() / 2 - START_ZOOM * first.y });
}

/** Lays out and draws what is visible now. */
function drawGraph(view) {
  const { plan, cy } = view;
  if (!plan.nodes.length) return graphMessage("The graph has no nodes.");
  const visible = visibleGraph(plan, view.open);
  view.owner = visible.owner;
  view.items = new Map(visible.items.map((item) => [item.id, item]));
  for (const block of view.open) {
    view.items.set(`b${block}`, { id: `b${block}`, type: "block", index: block, opened: true });
  }
  const { faces, places } = layoutGraph(
    plan,
    visible,
    view.direction,
    cy.width() / (cy.height() || 1),
  );
  const elements = [...openedElements(plan, view.open)];
  for (const item of visible.items) elements.push(itemElement(plan, item, faces, places));
  for (const edge of visible.edges) elements.push(edgeElement(edge, places));
  cy.batch(() => {
    cy.elements().remove();
    cy.add(elements);
  });
  placeLabels(cy, visible.edges);
}

/** Boxes of the opened blocks, outer before inner. */
function openedElements(plan, open) {
  const shown = [...open].filter((block) => blocksAround(plan, block).every((at) => open.has(at)));
  const length = (block) => nodesOf(plan.blocks[block].nodes).length;
  return shown
    .sort((a, b) => length(b) - length(a))
    .map((block) => {
      const { parent } = plan.blocks[block];
      const label = `− ${short(plan.blocks[block].label, 40)}`;
      const face = { label, shift: textWidth(label) + 12, shape: "round-rectangle", w: 10, h: 10 };
      const data = {
        id: `b${block}`,
        parent: parent < 0 ? undefined : `b${parent}`,
        fill: "#808080",
        ink: "#000000",
        ...face,
      };
      return { group: "nodes", data, classes: "opened" };
    });
}

function itemElement(plan, item, faces, places) {
  const fill = fillOf(plan, item);
  const { x, y } = places.get(item.id);
  const parent = item.parent < 0 ? undefined : `b${item.parent}`;
  const data = { id: item.id, parent, shape: shapeOf(plan, item), ...faces.get(item.id), ...fill };
  return { group: "nodes", data, position: { x, y }, classes: classesOf(plan, item, fill) };
}

function edgeElement(edge, places) {
  const bends = segments(places.get(edge.source), places.get(edge.target), edge.bends);
  const classes = [edge.comms.size ? "comm" : "", bends.weights.length ? "bent" : ""].join(" ");
  const { id, source, target, label, values } = edge;
  return {
    group: "edges",
    data: {
      id,
      source,
      target,
      label,
      values,
      comms: [...edge.comms],
      labelX: 0,
      labelY: 0,
      ...bends,
    },
    classes,
  };
}

/** Moves labels from the middle of an edge to where the layout made room for them. */
function placeLabels(cy, edges) {
  const labelled = edges
    .filter((edge) => edge.labelAt)
    .map(({ id, labelAt }) => [cy.getElementById(id), labelAt]);
  const middles = labelled.map(([edge]) => edge.midpoint());
  cy.batch(() =>
    labelled.forEach(([edge, at], index) =>
      edge.data({ labelX: at.x - middles[index].x, labelY: at.y - middles[index].y }),
    ),
  );
}

function visibleCount(plan, open) {
  const inside = (level) =>
    plan.children[level + 1].reduce(
      (sum, item) =>
        sum + (item.block !== undefined && open.has(item.block) ? inside(item.block) : 1),
      0,
    );
  return inside(-1);
}

/** Opens exactly the blocks `open`, unless too much would be drawn; `keep` stays in its place. */
function setOpen(view, open, keep = null) {
  const visible = visibleCount(view.plan, open);
  if (visible > VISIBLE_LIMIT) {
    graphMessage(
      `${count(visible)} nodes would be visible, more than ${count(VISIBLE_LIMIT)}: open fewer blocks.`,
    );
    return false;
  }
  graphMessage("");
  const before = keep && view.cy.getElementById(keep);
  const anchor = before?.nonempty() ? topOf(before) : null;
  view.open = open;
  drawGraph(view);
  const after = keep && view.cy.getElementById(keep);
  if (anchor && after.nonempty()) {
    const now = topOf(after);
    view.cy.panBy({ x: anchor.x - now.x, y: anchor.y - now.y });
  } else if (!keep) startZoom(view);
  markGraph(view, selection.current, false);
  return true;
}

function topOf(node) {
  const box = node.renderedBoundingBox({ includeLabels: false, includeOverlays: false });
  return { x: (box.x1 + box.x2) / 2, y: box.y1 };
}

function toggleBlock(view, item) {
  if (item?.type !== "block") return;
  const open = new Set(view.open);
  if (open.has(item.index)) {
    for (const block of view.open)
      if (blocksAround(view.plan, block).includes(item.index)) open.delete(block);
  } else open.add(item.index);
  const opened = open.has(item.index);
  if (!setOpen(view, open, item.id)) return;
  announce(`${opened ? "Opened" : "Closed"} ${short(view.plan.blocks[item.index].label, 60)}`);
  if (!opened) select({ type: "block", id: item.index }, "graph");
}

function openAll(view) {
  setOpen(view, new Set(view.plan.blocks.keys()));
}

/** Opens the blocks around a node and moves to it. */
function revealNode(view, node) {
  const path = blocksAround(view.plan, view.plan.holder[node]);
  if (path.some((block) => !view.open.has(block)))
    setOpen(view, new Set([...view.open, ...path]), "none");
  centreOn(view, view.cy.getElementById(view.owner[node]));
}

function centreOn(view, element) {
  if (element.empty()) return;
  const zoom = Math.max(view.cy.zoom(), 0.8);
  view.cy.stop().animate({ center: { eles: element }, zoom, duration: 150 });
}

/** Drawn elements that stand for a selection, and whether they are the thing itself. */
function elementsOf(view, item) {
  const { cy, owner, plan } = view;
  const get = (id) => cy.getElementById(id ?? "none");
  if (!item) return cy.collection();
  if (item.type === "node") return get(owner[item.id]);
  if (item.type === "terminals")
    return cy
      .nodes(".terminal")
      .filter((node) => view.items.get(node.id()).ids.includes(item.ids[0]));
  if (item.type === "edge") return get(item.id);
  if (item.type === "comm") {
    const edges = cy.edges(".comm").filter((edge) => edge.data("comms").includes(item.id));
    const { producer, consumer } = plan.comms[item.id];
    return edges.nonempty() ? edges : get(owner[producer >= 0 ? producer : consumer]);
  }
  if (item.type !== "block") return cy.collection();
  const self = get(`b${item.id}`);
  return self.nonempty() ? self : get(owner[plan.blocks[item.id].first]);
}

function markGraph(view, item, move) {
  const { cy } = view;
  cy.elements().unselect();
  const elements = elementsOf(view, item);
  elements.select();
  view.current = elements.nonempty() ? elements[0].id() : null;
  if (!move || elements.empty()) return;
  const box = elements.renderedBoundingBox();
  const outside = box.x1 < 0 || box.y1 < 0 || box.x2 > cy.width() || box.y2 > cy.height();
  if (outside) centreOn(view, elements);
}

/** What a drawn element stands for. */
function itemOfElement(view, element) {
  if (element.isEdge()) {
    const { values, comms } = element.data();
    if (comms.length === 1 && values.length === 1) return { type: "comm", id: comms[0] };
    return { type: "edge", id: element.id(), values, comms };
  }
  const item = view.items.get(element.id());
  if (item.type === "terminals") return { type: "terminals", ids: item.ids };
  return { type: item.type, id: item.index };
}

function tapGraph(view, event) {
  byId("graph-canvas").focus({ preventScroll: true });
  if (event.target === view.cy) return select(null, "graph");
  select(itemOfElement(view, event.target), "graph");
}

function zoomGraph(view, factor) {
  const { cy } = view;
  cy.zoom({
    level: cy.zoom() * factor,
    renderedPosition: { x: cy.width() / 2, y: cy.height() / 2 },
  });
}

function turnGraph(view) {
  view.direction = view.direction === "TB" ? "LR" : "TB";
  setOpen(view, view.open);
}

function graphMessage(text) {
  byId("graph-message").textContent = text;
  byId("graph-message").hidden = !text;
}

function saveGraph(view) {
  saveBlob(
    view.cy.png({ output: "blob", bg: theme().surface, scale: 2, maxWidth: 8000, maxHeight: 8000 }),
    "graph.png",
  );
}
