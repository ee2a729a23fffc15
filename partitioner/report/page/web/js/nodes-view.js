// All nodes as a table: what the graph's canvas shows, for reading and for screen readers.

function startNodes(plan) {
  const rows = plan.nodes.map((_, index) => index);
  const node = (index) => plan.nodes[index];
  const table = makeTable({
    label: "Nodes",
    minWidth: 890,
    rows,
    text: (index) =>
      `${node(index).op} ${plain(node(index).name)} ${node(index).kind} ${node(index).cut} @${plan.groupNames[node(index).group]}`,
    onRow: (index) => select({ type: "node", id: index }, "nodes"),
    columns: [
      { title: "#", value: (index) => index, number: true, width: "48px" },
      {
        title: "Type",
        value: (index) => node(index).op,
        cell: (index, letters) => nameOf(node(index).op, letters),
        width: "minmax(104px,1.2fr)",
      },
      {
        title: "Name",
        value: (index) => node(index).name,
        cell: (index, letters) => nameOf(node(index).name, letters),
        width: "minmax(150px,3fr)",
      },
      {
        title: "Devices",
        value: (index) => node(index).group,
        cell: (index) => `@${short(plan.groupNames[node(index).group], 12)}`,
        width: "66px",
      },
      { title: "Sharding", value: (index) => node(index).kind, width: "80px" },
      {
        title: "Cut",
        value: (index) => node(index).cut,
        cell: (index, letters) => nameOf(node(index).cut || "–", letters),
        width: "minmax(60px,1fr)",
      },
      {
        title: "Seconds",
        value: (index) => node(index).seconds,
        cell: (index) => seconds(node(index).seconds),
        number: true,
        width: "76px",
      },
      {
        title: "FLOPs",
        value: (index) => node(index).flops,
        cell: (index) => flops(node(index).flops),
        number: true,
        width: "92px",
      },
      {
        title: "Bytes",
        value: (index) => node(index).bytes,
        cell: (index) => size(node(index).bytes),
        number: true,
        width: "76px",
      },
      {
        title: "Runner-up",
        value: (index) => node(index).runner_up?.step_change_s ?? null,
        number: true,
        width: "86px",
        cell: (index) => change(node(index).runner_up?.step_change_s, seconds),
      },
    ],
  });
  const filter = byId("nodes-filter");
  const show = () => {
    table.show(filter.value);
    byId("nodes-count").textContent = `${count(table.count())} of ${count(rows.length)}`;
  };
  filter.addEventListener("input", framed(show));
  byId("nodes-table").append(table.element);
  const view = { shown: false };
  const mark = (item, from) => {
    if (!view.shown) return;
    const refs = refsOf(plan, item);
    table.mark((index) => refs.has(index), from !== "nodes" && refs.size > 0);
  };
  onSelect(mark);
  return () => {
    if (!view.shown) show();
    view.shown = true;
    mark(selection.current, "tabs");
  };
}
