// The panel that tells all about what is selected.

function startDetails(plan, actions) {
  const panel = byId("details");
  const show = (item) => {
    panel.replaceChildren(...detailsOf(plan, item, actions));
    panel.scrollTop = 0;
    document.body.classList.toggle("has-details", Boolean(item));
  };
  onSelect(show);
  show(null);
}

function detailsOf(plan, item, actions) {
  if (!item) return [el("h2", {}, "Details"), ...hints()];
  const builders = {
    node: nodeDetails,
    comm: commDetails,
    block: blockDetails,
    edge: edgeDetails,
    terminals: terminalDetails,
    device: deviceDetails,
  };
  const close = el(
    "button",
    { type: "button", class: "close", "aria-label": "Close details", click: () => select(null) },
    "×",
  );
  return [close, ...builders[item.type](plan, item, actions)];
}

function hints() {
  const rows = [
    ["Click", "a node, edge, bar or row to see it here and in all views"],
    ["Double click, Enter", "open or close a block"],
    ["Arrows", "follow edges; in the timeline, events"],
    ["/", "search by name or type"],
    ["+  −  0", "zoom in, zoom out, start again"],
    ["Backspace", "close the block around the selected node"],
  ];
  return [
    el("p", { class: "soft" }, "Nothing is selected."),
    el(
      "dl",
      { class: "facts" },
      rows.flatMap(([key, text]) => [el("dt", {}, key), el("dd", {}, text)]),
    ),
  ];
}

/** Pairs of a term and a value, values null left out. */
function facts(pairs) {
  const shown = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return el(
    "dl",
    { class: "facts" },
    shown.flatMap(([term, value]) => [el("dt", {}, term), el("dd", {}, value)]),
  );
}

function section(title, ...children) {
  return el("section", {}, el("h3", {}, title), ...children);
}

/** The whole name, however long, in a box that scrolls. */
function fullName(name) {
  return el(
    "div",
    { class: "full", tabindex: name.length > 200 ? "0" : null },
    el("bdi", {}, plain(name)),
  );
}

function link(label, item, title = "") {
  return el(
    "button",
    { type: "button", class: "link", title, click: () => select(item, "details") },
    label,
  );
}

function nodeLink(plan, node) {
  const row = plan.nodes[node];
  return link(
    [el("b", {}, short(row.op, 18)), " ", nameOf(row.name, 26)],
    { type: "node", id: node },
    short(row.name, 600),
  );
}

function commLink(plan, index) {
  const comm = plan.comms[index];
  return link(
    `${plain(comm.kind)} ${size(comm.bytes)} ${seconds(comm.seconds)} @${deviceText(plan, comm.ranks)}`,
    { type: "comm", id: index },
  );
}

const LISTED = 30; // links of one list

function links(items, build) {
  const shown = items.slice(0, LISTED).map((item) => el("li", {}, build(item)));
  if (items.length > LISTED)
    shown.push(el("li", { class: "soft" }, `and ${items.length - LISTED} more`));
  return el("ul", { class: "links" }, shown);
}

function listSection(title, items, build) {
  return items.length ? section(`${title} (${items.length})`, links(items, build)) : null;
}

function nodeDetails(plan, { id }, actions) {
  const row = plan.nodes[id];
  const group = plan.groups[row.group];
  const sources = [...new Set(plan.incoming[id].map((edge) => plan.edges[edge].u))];
  const targets = [...new Set(plan.outgoing[id].map((edge) => plan.edges[edge].v))];
  return [
    el("h2", {}, el("bdi", {}, short(row.op, 60))),
    fullName(row.name),
    el(
      "div",
      { class: "buttons" },
      el("button", { type: "button", click: () => actions.reveal(id) }, "Show in graph"),
      el("button", { type: "button", click: () => actions.open("timeline") }, "In timeline"),
    ),
    facts([
      ["Devices", `@${deviceText(plan, group.devices)} (${plain(group.mesh)})`],
      ["Sharding", row.kind],
      ["Cut loops", plain(row.cut) || "none"],
      ["Not cut because", plain(row.opaque)],
      ["Seconds", `${seconds(row.seconds)} on the busiest device`],
      [
        "FLOPs",
        row.flops === row.local_flops
          ? flops(row.flops)
          : `${flops(row.flops)}, ${flops(row.local_flops)} a device`,
      ],
      ["Bytes", `${size(row.bytes)} read and written`],
      ["Position", positionText(plan, id)],
    ]),
    whyNot(row),
    tensorTable("Inputs", row.inputs),
    tensorTable("Outputs", row.outputs),
    listSection("Communications", [...new Set(plan.commsOfNode[id])], (comm) =>
      commLink(plan, comm),
    ),
    listSection("Reads from", sources, (node) => nodeLink(plan, node)),
    listSection("Read by", targets, (node) => nodeLink(plan, node)),
    pathSection(plan, plan.holder[id]),
  ].filter(Boolean);
}

/** "1 of 220" is the first task of the schedule. */
function positionText(plan, ref) {
  if (!plan.position.has(ref)) return null;
  return `${count(plan.position.get(ref) + 1)} of ${count(plan.tasks.length)}`;
}

function pathSection(plan, block) {
  const path = blocksAround(plan, block);
  return listSection("Inside", path, (at) =>
    link(short(plan.blocks[at].label, 40), { type: "block", id: at }),
  );
}

function whyNot(row) {
  const { runner_up: other, options } = row;
  if (!other)
    return section(
      "Why not otherwise?",
      el("p", {}, options === 1 ? "It has one strategy only." : "No other strategy was priced."),
    );
  const taken = other.why ? `It is not taken: ${plain(other.why)}.` : "";
  const verdict = other.fits ? taken : "It would not fit the memory.";
  return section(
    "Why not otherwise?",
    el(
      "p",
      {},
      `Best of ${count(options - 1)} other ${options === 2 ? "strategy" : "strategies"}, all other nodes as they are. ${verdict}`,
    ),
    facts([
      ["Strategy", `${plain(other.cut) || "not cut"} on ${plain(other.group)}`],
      ["Step time", `${seconds(other.step_s)} (${change(other.step_change_s, seconds)})`],
      ["All busy seconds", change(other.work_change_s, seconds)],
      ["Fits memory", other.fits ? "yes" : "no"],
    ]),
  );
}

function tensorTable(title, tensors) {
  if (!tensors.length) return null;
  const rows = tensors
    .slice(0, LISTED)
    .map((tensor) => [
      el(
        "tr",
        { class: "head" },
        el(
          "td",
          { colspan: "3" },
          nameOf(tensor.name, 34),
          el(
            "span",
            { class: "soft" },
            ` ${plain(tensor.dtype)}${tensor.constant ? ", constant" : ""}`,
          ),
        ),
      ),
      el(
        "tr",
        {},
        el("td", {}, shape(tensor.shape)),
        el("td", {}, shape(tensor.local)),
        el("td", {}, plain(tensor.sharding)),
      ),
    ]);
  const heads = ["whole shape", "local shape", "sharding"].map((head) =>
    el("th", { scope: "col" }, head),
  );
  return section(
    `${title} (${tensors.length})`,
    el(
      "div",
      { class: "scroll-x" },
      el(
        "table",
        { class: "tensors" },
        el("thead", {}, el("tr", {}, heads)),
        el("tbody", {}, rows.flat()),
      ),
    ),
  );
}

function commDetails(plan, { id }, actions) {
  const comm = plan.comms[id];
  const end = (node, other) => (node < 0 ? other : nodeLink(plan, node));
  return [
    el("h2", {}, plain(comm.kind)),
    fullName(comm.value),
    el(
      "div",
      { class: "buttons" },
      el("button", { type: "button", click: () => actions.open("timeline") }, "In timeline"),
    ),
    facts([
      ["Devices", `@${deviceText(plan, comm.ranks)}`],
      ["Bytes", `${size(comm.bytes)} between devices`],
      ["Seconds", `${seconds(comm.seconds)} on the busiest device`],
      ["Algorithm", plain(comm.algorithm)],
      ["From", end(comm.producer, "graph input")],
      ["To", end(comm.consumer, "graph output")],
      ["Position", positionText(plan, commRef(id))],
    ]),
  ];
}

function blockDetails(plan, { id }, actions) {
  const block = plan.blocks[id];
  const sums = blockSums(plan, id);
  const alike = plan.blocks.flatMap((other, index) =>
    block.kind >= 0 && other.kind === block.kind ? [index] : [],
  );
  const open = actions.isOpen(id);
  return [
    el("h2", {}, "Block"),
    fullName(block.label),
    el(
      "div",
      { class: "buttons" },
      el(
        "button",
        { type: "button", click: () => actions.toggle(id) },
        open ? "− Close" : "+ Open",
      ),
      alike.length > 1
        ? el(
            "button",
            { type: "button", click: () => actions.toggleAll(alike, !open) },
            `${open ? "Close" : "Open"} all ${alike.length}`,
          )
        : null,
    ),
    facts([
      ["Repeat", block.count > 1 ? `${block.index + 1} of ${block.count}` : null],
      ["Nodes", `${count(sums.nodes)}, ${count(sums.sharded)} sharded`],
      ["Devices", `@${deviceText(plan, sums.devices)}`],
      ["Seconds", `${seconds(sums.seconds)} summed over nodes`],
      [
        "Communications",
        sums.comms ? `${count(sums.comms)} inside, ${seconds(sums.commSeconds)}` : null,
      ],
      ["FLOPs", flops(sums.flops)],
      ["Bytes", `${size(sums.bytes)} read and written`],
    ]),
    section(
      "Types",
      el(
        "ul",
        { class: "links" },
        sums.ops
          .slice(0, 12)
          .map(([op, many]) => el("li", {}, `${count(many)} × ${short(op, 40)}`)),
      ),
    ),
    pathSection(plan, block.parent),
  ].filter(Boolean);
}

function edgeDetails(plan, { values, comms }) {
  return [
    el("h2", {}, "Edge"),
    el(
      "p",
      {},
      `${count(values.length)} value${values.length === 1 ? "" : "s"}, ${count(comms.length)} communication${comms.length === 1 ? "" : "s"}`,
    ),
    listSection("Communications", comms, (comm) => commLink(plan, comm)),
    listSection("Values", values, (value) => [
      nameOf(value.value, 36),
      value.bytes === undefined ? "" : ` ${size(value.bytes)}`,
    ]),
    listSection(
      "Between nodes",
      values.filter((value) => value.u !== undefined),
      (value) => [nodeLink(plan, value.u), " → ", nodeLink(plan, value.v)],
    ),
  ].filter(Boolean);
}

function terminalDetails(plan, { ids }) {
  const rows = ids.slice(0, LISTED).flatMap((id) => {
    const terminal = plan.terminals[id];
    return [
      fullName(terminal.name),
      facts([
        ["Shape", shape(terminal.shape)],
        ["Type", plain(terminal.dtype)],
      ]),
      links(terminal.nodes, (node) => nodeLink(plan, node)),
    ];
  });
  return [
    el("h2", {}, `Graph ${plan.terminals[ids[0]].kind}${ids.length > 1 ? "s" : ""}`),
    ...rows,
  ];
}

function deviceDetails(plan, { id }) {
  const device = plan.devices[id];
  const nodes = plan.nodes.filter((node) => plan.groups[node.group].devices.includes(id)).length;
  return [
    el("h2", {}, `Device ${deviceText(plan, [id])}`),
    fullName(device.name),
    facts([
      ["Shown", device.members.length > 1 ? `one of ${count(device.members.length)} alike` : null],
      ["Nodes", count(nodes)],
      ["Compute", seconds(device.compute_s)],
      ["Communication", seconds(device.comm_s)],
      ["Peak memory", `${size(device.peak_bytes)} of ${size(device.limit_bytes)}`],
      ["Weights", size(device.weights_bytes)],
      ["Sent", size(device.sent_bytes)],
    ]),
  ];
}
