// Starts the page for the data that is in it.

function startPlan(data) {
  const plan = readPlan(data);
  startHead(data);
  const overview = startOverview(plan);
  const graph = startGraph(plan);
  const timeline = startTimeline(plan);
  const memory = startMemory(plan);
  const traffic = startTraffic(plan);
  const measured = plan.measured && startMeasured(plan);
  const actions = {
    open: (id) => {
      open(id);
      if (id === "timeline") zoomToSelection(timeline);
    },
    reveal: (node) => {
      open("graph");
      revealNode(graph, node);
    },
    isOpen: (block) => graph.open.has(block),
    toggle: (block) => {
      open("graph");
      const around = blocksAround(plan, plan.blocks[block].parent);
      if (around.some((at) => !graph.open.has(at)))
        setOpen(graph, new Set([...graph.open, ...around]), "none");
      toggleBlock(graph, { id: `b${block}`, type: "block", index: block });
      select({ type: "block", id: block }, "details");
    },
    toggleAll: (blocks, opening) => {
      open("graph");
      const next = new Set(graph.open);
      for (const block of blocks) opening ? next.add(block) : next.delete(block);
      setOpen(graph, next, `b${blocks[0]}`);
      select(selection.current, "details");
    },
  };
  startDetails(plan, actions);
  byId("traffic-turn").append(plain(plan.head.turn));
  if (plan.head.step !== null) startStages(plan);
  const open = startTabs([
    { id: "overview", label: "Overview", show: () => showOverview(overview) },
    { id: "graph", label: "Graph", show: () => showGraph(graph) },
    ...(plan.head.step === null ? [] : [{ id: "stages", label: "Stages", show: () => {} }]),
    { id: "timeline", label: "Timeline", show: () => showTimeline(timeline) },
    { id: "memory", label: "Memory", show: () => showMemory(memory) },
    { id: "traffic", label: "Traffic", show: () => showTraffic(traffic) },
    { id: "nodes", label: "Nodes", show: startNodes(plan) },
    { id: "why", label: "Why not", show: startWhy(plan) },
    ...(measured
      ? [{ id: "measured", label: "Measured", show: () => showMeasured(measured) }]
      : []),
  ]);
  byId("overview-graph").addEventListener("click", () => open("graph"));
  startSearch(plan, overview, (node) => !byId("panel-graph").hidden && revealNode(graph, node));
  return {
    plan,
    overview,
    graph,
    timeline,
    memory,
    traffic,
    measured,
    select,
    selection,
    open,
    setOpen: (blocks) => setOpen(graph, new Set(blocks)),
  };
}

const STARTERS = { plan: startPlan, diff: startDiff, sweep: startSweep };

function startPage() {
  const data = JSON.parse(byId("data").textContent);
  startTheme();
  document.body.dataset.kind = data.kind;
  document.title = short(data.title, 80);
  byId("title").append(short(data.title, 90));
  byId("title").title = short(data.title, 600);
  byId("licences-open").addEventListener("click", () => byId("licences").showModal());
  byId("licences-text").textContent = byId("licence-texts").textContent;
  window.page = STARTERS[data.kind](data); // for the console and the tests
  requestAnimationFrame(() =>
    setTimeout(() => {
      document.documentElement.dataset.ready = "1";
      window.__ready = true;
      window.__readyMs = performance.now(); // since the start of navigation
    }),
  );
}

startPage();
