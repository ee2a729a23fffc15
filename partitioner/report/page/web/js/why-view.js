// Why not otherwise: the searched spaces, and the best other strategy of each operator.

function startWhy(plan) {
  const { head } = plan;
  const cost = head.objective === "memory" ? size : seconds;
  const most = Math.max(...head.spaces.map((space) => space.cost ?? space.bound ?? 0), 0) || 1;
  const known = head.spaces.filter((space) => space.cost !== null || space.bound !== null);
  const rows = [
    ...known.map((space) => spaceRow(head, space, cost, most)),
    ...notSearched(head.spaces.filter((space) => !known.includes(space))),
  ];
  byId("why-spaces").append(...(rows.length ? rows : ["The plan does not say what was searched."]));
  const nodes = plan.nodes.flatMap((row, index) => (row.runner_up ? [index] : []));
  nodes.sort((a, b) => rankOf(plan, a) - rankOf(plan, b));
  byId("why-count").append(nodes.length ? `${count(nodes.length)} operators` : "none was priced");
  byId("why-nodes").hidden = !nodes.length;
  const table = makeTable({
    label: "Best other strategies",
    minWidth: 760,
    rows: nodes,
    columns: whyColumns(plan),
    onRow: (index) => select({ type: "node", id: index }, "why"),
  });
  byId("why-nodes").append(table.element);
  const moves = movesTable(plan, cost);
  return () => {
    table.show("");
    moves?.show("");
  };
}

/** The spaces without a plan and without a bound: a row for each reason. */
function notSearched(spaces) {
  const byReason = new Map();
  for (const { space, why } of spaces) byReason.set(why, [...(byReason.get(why) ?? []), plain(space)]);
  return [...byReason].map(([why, names]) => {
    const more = names.length > 3 ? ` and ${count(names.length - 3)} more` : "";
    return el(
      "div",
      { class: "space" },
      el("span", { class: "space-name", title: names.join(", ") }, names.slice(0, 3).join(", ") + more),
      el("span", { class: "space-bar" }),
      el("b", { class: "number" }, "no plan"),
      el("span", {}, plain(why)),
    );
  });
}

function spaceRow(head, space, cost, most) {
  const least = space.cost ?? space.bound;
  const width = Math.max(0.4, (100 * least) / most);
  const why = space.chosen ? "chosen" : plain(space.why);
  const opens = space.changes && {
    type: "button",
    "aria-expanded": "false",
    click: ({ currentTarget }) => openSpace(space, currentTarget),
  };
  return el(
    "div",
    { class: space.chosen ? "space chosen" : "space" },
    el("span", { class: "space-name" }, spaceName(head, space)),
    el("span", { class: "space-bar" }, el("i", { class: space.cost === null ? "bound" : "", style: `width:${width}%` })),
    el("b", { class: "number" }, space.cost === null ? `≥ ${cost(least)}` : cost(space.cost)),
    el("span", {}, why),
    opens ? el("button", opens, "Compare") : el("span", {}),
  );
}

/** Shows under the spaces how the best plan of one differs from the chosen plan, or hides it. */
function openSpace(space, button) {
  const panel = byId("why-changes");
  const open = button.getAttribute("aria-expanded") !== "true";
  for (const other of document.querySelectorAll("#why-spaces button"))
    other.setAttribute("aria-expanded", String(open && other === button));
  panel.hidden = !open;
  if (open) panel.replaceChildren(...spaceChanges(space));
}

function spaceChanges({ space, changes }) {
  const { verdict, figures, moved, moved_count: nodes, same, traffic } = changes;
  const column = (title, rows) => el("div", {}, el("h3", {}, title), ...rows);
  const decisions = moved.slice(0, 200).map((row) => [
    nameOf(row.name, 44),
    plain(row.before),
    plain(row.after),
    change(row.seconds_after - row.seconds_before, seconds),
  ]);
  const sent = traffic.map((row) => [
    plain(row.kind),
    `${count(row.count_before)} → ${count(row.count_after)}`,
    `${size(row.bytes_before)} → ${size(row.bytes_after)}`,
  ]);
  const heads = ["Figure", "Chosen", short(space, 24), "Change", "Relative"];
  return [
    el("p", { class: "space-verdict" }, plain(verdict)),
    el(
      "div",
      { class: "space-tables" },
      column("Figures", [plainTable(heads, figureRows(figures), [1, 2, 3, 4])]),
      column("Communications", [plainTable(["Kind", "Count", "Bytes"], sent, [1, 2])]),
    ),
    el("h3", {}, `${count(nodes)} operators run otherwise, ${count(same)} alike`),
    plainTable(["Operators", "Chosen", short(space, 24), "Seconds"], decisions, [3]),
  ];
}

/** The plans with one block elsewhere; null where none was priced. */
function movesTable(plan, cost) {
  const { moves } = plan;
  byId("why-moves-count").append(
    moves.length
      ? `${count(moves.length)} ${moves.length > 1 ? "changes" : "change"} of the plan`
      : "none was priced",
  );
  byId("why-moves").hidden = !moves.length;
  if (!moves.length) return null;
  const text = (title, key, width) => ({
    title,
    width,
    value: (at) => moves[at][key],
    cell: (at, letters) => nameOf(moves[at][key], letters),
  });
  const table = makeTable({
    label: "Whole blocks elsewhere",
    minWidth: 860,
    rows: moves.map((_, at) => at),
    columns: [
      text("Block", "label", "2fr"),
      text("Runs on", "at", "1.1fr"),
      text("Instead", "to", "1.4fr"),
      {
        title: "Cost",
        width: "90px",
        number: true,
        value: (at) => moves[at].change,
        cell: (at) => change(moves[at].change, cost),
      },
      {
        title: "Reason",
        width: "3fr",
        value: (at) => moves[at].reason,
        cell: (at) => el("span", { title: plain(moves[at].reason) }, plain(moves[at].reason)),
      },
    ],
    onRow: (at) => select(blockItem(plan, moves[at]), "why"),
  });
  byId("why-moves").style.maxHeight = `${48 + 28 * moves.length}px`;
  byId("why-moves").append(table.element);
  return table;
}

function blockItem(plan, { first, last }) {
  const block = plan.blocks.findIndex((row) => row.first === first && row.last === last);
  return block >= 0 ? { type: "block", id: block } : { type: "node", id: first };
}

/** What fits comes first, then what changes the step least, then the work; what is ruled out last. */
function rankOf(plan, index) {
  const { fits, why, step_change_s, work_change_s } = plan.nodes[index].runner_up;
  return (fits ? 0 : 1e9) + (why ? 1e6 : 0) + step_change_s + 1e-6 * work_change_s;
}

/** Why a node's best other strategy was not taken. */
function whyOther(plan, other) {
  if (!other.fits) return "does not fit in memory";
  if (other.step_change_s > 1e-12)
    return `the busiest device takes ${seconds(other.step_change_s)} more a ${plan.head.turn}`;
  if (other.why) return plain(other.why);
  if (other.work_change_s > 1e-12)
    return `same step, but ${seconds(other.work_change_s)} more work on all devices together`;
  return "costs the same";
}

function whyColumns(plan) {
  const node = (index) => plan.nodes[index];
  return [
    { title: "Operator", width: "120px", value: (i) => node(i).op, cell: (i) => nameOf(node(i).op, 16) },
    { title: "Name", width: "2fr", value: (i) => node(i).name, cell: (i) => nameOf(node(i).name, 60) },
    {
      title: "Instead",
      width: "1.4fr",
      value: (i) => node(i).runner_up.cut,
      cell: (i) => `${plain(node(i).runner_up.cut || "whole")} ${plain(node(i).runner_up.group)}`,
    },
    {
      title: "Step",
      width: "90px",
      number: true,
      value: (i) => node(i).runner_up.step_change_s,
      cell: (i) => change(node(i).runner_up.step_change_s, seconds),
    },
    {
      title: "Reason",
      width: "3fr",
      value: (i) => whyOther(plan, node(i).runner_up),
      cell: (i) => whyOther(plan, node(i).runner_up),
    },
  ];
}
