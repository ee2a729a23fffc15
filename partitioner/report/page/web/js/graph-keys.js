// The graph by keyboard: arrows follow edges, Enter opens, Backspace closes.

const DIRECTIONS = {
  TB: { ArrowDown: "next", ArrowUp: "previous", ArrowLeft: "left", ArrowRight: "right" },
  LR: { ArrowRight: "next", ArrowLeft: "previous", ArrowUp: "left", ArrowDown: "right" },
};

function graphKey(view, event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const move = DIRECTIONS[view.direction][event.key];
  const actions = {
    Enter: () => enterItem(view),
    Backspace: () => closeAround(view),
    "+": () => zoomGraph(view, 1.3),
    "-": () => zoomGraph(view, 1 / 1.3),
    0: () => startZoom(view),
  };
  if (!move && !actions[event.key]) return;
  event.preventDefault();
  if (move) moveInGraph(view, move);
  else actions[event.key]();
}

/** The drawn node that stands for the selection; of an edge its target. */
function currentNode(view) {
  const element = view.cy.getElementById(view.current ?? "none");
  if (element.empty()) return null;
  return element.isEdge() ? element.target() : element;
}

function moveInGraph(view, move) {
  const node = currentNode(view);
  const next = node ? neighbour(view, node, move) : view.cy.nodes(":childless")[0];
  if (!next) return;
  const item = itemOfElement(view, next);
  select(item, "graph");
  centreIfHidden(view, next);
  announce(next.data("label").replace("\n", ", "));
}

function centreIfHidden(view, node) {
  const { x, y } = node.renderedPosition();
  const { cy } = view;
  if (x < 60 || y < 30 || x > cy.width() - 60 || y > cy.height() - 30) cy.center(node);
}

function neighbour(view, node, move) {
  if (node.isParent()) return node.descendants(":childless")[0];
  const across = view.direction === "TB" ? "x" : "y";
  const along = view.direction === "TB" ? "y" : "x";
  const here = node.position();
  const distance = (other) =>
    Math.hypot(other.position("x") - here.x, other.position("y") - here.y);
  const nearest = (nodes) => nodes.sort((a, b) => distance(a) - distance(b))[0];
  if (move === "next") return nearest(node.outgoers("node"));
  if (move === "previous") return nearest(node.incomers("node"));
  const sign = move === "left" ? -1 : 1;
  return nearest(
    view.cy
      .nodes(":childless")
      .filter(
        (other) =>
          sign * (other.position(across) - here[across]) > 1 &&
          Math.abs(other.position(along) - here[along]) < 60,
      ),
  );
}

/** Opens a block; of a node goes to its details. */
function enterItem(view) {
  const item = view.items.get(view.current ?? "none");
  if (item?.type === "block") toggleBlock(view, item);
  else if (item) byId("details").focus();
}

function closeAround(view) {
  const item = view.items.get(view.current ?? "none");
  if (!item) return;
  const block = item.opened ? item.index : item.parent;
  if (block >= 0 && view.open.has(block))
    toggleBlock(view, { id: `b${block}`, type: "block", index: block });
}
