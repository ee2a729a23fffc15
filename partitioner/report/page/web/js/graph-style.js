// How cytoscape draws the graph.

function graphStyle() {
  const now = theme();
  const selected = {
    "underlay-color": now.accent,
    "underlay-opacity": 0.55,
    "underlay-padding": 9,
  };
  return [
    {
      selector: "node",
      style: {
        shape: "data(shape)",
        width: "data(w)",
        height: "data(h)",
        label: "data(label)",
        "background-color": "data(fill)",
        color: "data(ink)",
        "font-family": now.font,
        "font-size": 12,
        "line-height": 1.2,
        "text-wrap": "wrap",
        "text-valign": "center",
        "text-max-width": 600,
        "min-zoomed-font-size": 5,
        "border-width": 1.5,
        "border-color": now.ink,
      },
    },
    { selector: "node.sharded", style: { "border-style": "dashed", "border-width": 2.5 } },
    { selector: "node.replicated", style: { "border-style": "double", "border-width": 5 } },
    {
      selector: "node.block",
      style: {
        ghost: "yes",
        "ghost-offset-x": 5,
        "ghost-offset-y": 5,
        "ghost-opacity": 0.45,
        "border-width": 2,
      },
    },
    {
      selector: "node.terminal",
      style: {
        "background-color": now.raised,
        color: now.ink,
        "border-width": 1,
        "border-color": now.soft,
      },
    },
    { selector: "node.striped", style: stripedStyle(now) },
    {
      selector: "node.opened",
      style: {
        shape: "round-rectangle",
        "background-color": now.raised,
        "background-opacity": 0.5,
        "border-width": 1,
        "border-color": now.soft,
        "border-style": "solid",
        color: now.ink,
        "text-valign": "top",
        "text-margin-y": 19,
        "text-halign": "left",
        "text-margin-x": "data(shift)",
        "min-width": "data(shift)",
        padding: 24,
        ghost: "no",
        "font-size": 12,
      },
    },
    {
      selector: "edge",
      style: {
        width: 1.4,
        "line-color": now.soft,
        "target-arrow-color": now.soft,
        "target-arrow-shape": "triangle",
        "arrow-scale": 0.9,
        "curve-style": "straight",
        "edge-distances": "node-position",
      },
    },
    {
      selector: "edge.bent",
      style: {
        "curve-style": "segments",
        "segment-weights": "data(weights)",
        "segment-distances": "data(distances)",
      },
    },
    {
      selector: "edge.comm",
      style: {
        width: 2.6,
        "line-color": now.comm,
        "target-arrow-color": now.comm,
        "line-style": "dashed",
        "line-dash-pattern": [7, 4],
        label: "data(label)",
        color: now.comm,
        "font-size": 11,
        "font-family": now.font,
        "font-weight": 600,
        "line-height": 1.2,
        "text-wrap": "wrap",
        "text-background-color": now.surface,
        "text-background-opacity": 1,
        "text-background-padding": 2,
        "min-zoomed-font-size": 5,
        "z-index": 5,
        "text-margin-x": "data(labelX)",
        "text-margin-y": "data(labelY)",
      },
    },
    { selector: "node:selected", style: selected },
    { selector: "edge:selected", style: { ...selected, "underlay-padding": 5 } },
  ];
}

/** Stripes of the devices' colours, with the label on a plate. */
function stripedStyle(now) {
  const stops = (count) =>
    Array.from({ length: count }, (_, at) => [(100 * at) / count, (100 * (at + 1)) / count]).flat();
  return {
    "background-fill": "linear-gradient",
    "background-gradient-direction": "to-right",
    "background-gradient-stop-colors": (node) =>
      node
        .data("stripes")
        .flatMap((colour) => [colour, colour])
        .join(" "),
    "background-gradient-stop-positions": (node) =>
      stops(node.data("stripes").length)
        .map((stop) => `${stop}%`)
        .join(" "),
    color: now.ink,
    "text-background-color": now.surface,
    "text-background-opacity": 0.9,
    "text-background-padding": 2,
    "text-background-shape": "round-rectangle",
  };
}

const KIND_SHAPES = {
  whole: "round-rectangle",
  sharded: "cut-rectangle",
  replicated: "round-rectangle",
};

/** Colours of an item: one fill, or stripes. */
function fillOf(plan, item) {
  if (item.type === "terminals") return { fill: "#808080", ink: "#000000", stripes: [] };
  const used =
    item.type === "node" ? [plan.nodes[item.index].group] : blockSums(plan, item.index).groups;
  const colours = [...new Set(used.flatMap((group) => plan.fills[group].colours))].slice(0, 8);
  return { fill: colours[0], ink: inkOn(colours[0]), stripes: colours };
}

function classesOf(plan, item, fill) {
  const classes = fill.stripes.length > 1 ? ["striped"] : [];
  if (item.type === "terminals") classes.push("terminal");
  if (item.type === "block") classes.push("block");
  if (item.type === "node") classes.push(plan.nodes[item.index].kind);
  return classes.join(" ");
}

function shapeOf(plan, item) {
  if (item.type === "terminals") return "ellipse";
  return item.type === "node" ? KIND_SHAPES[plan.nodes[item.index].kind] : "rectangle";
}

/** The legend under the graph. */
function graphLegend(plan) {
  const byName = new Map(); // groups of the same devices, as of two stages, look alike
  for (const { group } of [...plan.nodes].sort((a, b) => a.group - b.group))
    if (!byName.has(plan.groupNames[group])) byName.set(plan.groupNames[group], group);
  const used = [...byName.values()];
  const groups = used.slice(0, 16).map((group) => {
    const swatch = el("span", {
      class: "swatch",
      style: `background:${striped(plan.fills[group].colours)}`,
    });
    return el(
      "span",
      { class: "key", title: plain(plan.groups[group].mesh) },
      swatch,
      `@${plan.groupNames[group]}`,
    );
  });
  if (used.length > 16) groups.push(el("span", { class: "key" }, `and ${used.length - 16} more`));
  const kinds = new Set(plan.nodes.map(({ kind }) => kind));
  if (plan.blocks.length) kinds.add("block");
  const marks = ["whole", "sharded", "replicated", "block"]
    .filter((kind) => kinds.has(kind))
    .map((kind) => el("span", { class: "key" }, el("span", { class: `mark ${kind}` }), kind));
  const line = el("span", { class: "key" }, el("span", { class: "dash" }), "communication");
  const comms = plan.comms.length ? [line] : [];
  return [el("span", { class: "key" }, "@ devices:"), ...groups, ...marks, ...comms];
}
