// What is selected, in all views at once.
//
// A selection is {type, ...}: node, comm, block or device with an `id`; edge with `values` and
// `comms`; terminals with `ids`. `ref` of a selection is its task, as in schema.py.

const selection = { current: null, listeners: [] };

function onSelect(listener) {
  selection.listeners.push(listener);
}

/** Selects something; `from` names the view that did, which need not move to show it. */
function select(item, from = "") {
  selection.current = item;
  for (const listener of selection.listeners) listener(item, from);
}

const nodeRef = (node) => node;
const commRef = (comm) => -1 - comm;

function itemOfRef(ref) {
  return ref >= 0 ? { type: "node", id: ref } : { type: "comm", id: -1 - ref };
}

/** All tasks that a selection stands for. */
function refsOf(plan, item) {
  if (!item) return new Set();
  if (item.type === "node") return new Set([nodeRef(item.id)]);
  if (item.type === "comm") return new Set([commRef(item.id)]);
  if (item.type === "edge") return new Set(item.comms.map(commRef));
  if (item.type !== "block") return new Set();
  return new Set(nodesOf(plan.blocks[item.id].nodes));
}
