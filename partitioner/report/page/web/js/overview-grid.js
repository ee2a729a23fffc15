// Many lanes as a grid of their devices: coloured by stage, shaded by load.

const MOST_LANES = 16; // more are a grid at first
const MOST_CELLS = 2048; // of more devices a cell stands for all that are equal
const LIGHTEST = 12; // percent of its colour that a cell without load has

/** Busy seconds of the device that stands for those of a report's row. */
function loadOf({ compute_s, comm_s }) {
  return compute_s + comm_s;
}

/** The cells of rows of devices: {text, load}, one a device or, of very many, one a row. */
function cellsOf(plan, rows) {
  const many = plan.devices.reduce((sum, row) => sum + row.members.length, 0) > MOST_CELLS;
  return rows.flatMap((at) => {
    const row = plan.devices[at];
    const texts = many ? [`devices ${deviceText(plan, [at])}`] : row.members.map((one) => `device ${one}`);
    return texts.map((text) => ({ text, load: loadOf(row) }));
  });
}

/** A card of each lane, and one of the devices that run nothing. */
function deviceGrid(view) {
  const { plan } = view;
  const { lanes } = plan.ribbon;
  const most = Math.max(...plan.devices.map(loadOf)) || 1;
  const used = new Set(lanes.flatMap(({ devices }) => devices));
  const idle = plan.devices.flatMap((_, at) => (used.has(at) ? [] : [at]));
  const cards = lanes.map((lane, at) =>
    gridCard(view, most, {
      devices: lane.devices,
      title: [stageText(lane), laneTitle(plan, lane)].filter(Boolean).join(" \u00b7 "),
      runs: plain(lane.runs),
      colour: laneColour(plan, at),
    }),
  );
  if (idle.length)
    cards.push(
      gridCard(view, most, {
        devices: idle,
        title: deviceText(plan, idle),
        runs: "run nothing",
        colour: "#8f8f8f",
      }),
    );
  return el("div", { class: "device-grid" }, cards);
}

function gridCard(view, most, { devices, title, runs, colour }) {
  const cells = cellsOf(view.plan, devices);
  const loads = cells.map(({ load }) => load);
  const [least, heaviest] = [Math.min(...loads), Math.max(...loads)];
  const busy = least === heaviest ? seconds(least) : `${seconds(least)} to ${seconds(heaviest)}`;
  return el(
    "button",
    {
      type: "button",
      class: "device-card",
      title: `${title}: ${runs}`,
      "aria-label": `${title}: ${runs}, busy ${busy}`,
      style: `--fill:${colour}`,
      click: () => select({ type: "device", id: devices[0] }, "overview"),
    },
    el("span", { class: "device-title" }, el("b", {}, title), el("span", { class: "soft" }, busy)),
    el("span", { class: "lane-what short" }, runs),
    el(
      "span",
      { class: "device-cells" },
      cells.map(({ text, load }) => {
        const shade = LIGHTEST + ((100 - LIGHTEST) * load) / most;
        const tip = `${text}: busy ${seconds(load)}, ${share(load / most)} of the busiest`;
        return el("i", { title: tip, style: `--load:${shade.toFixed(1)}%` });
      }),
    ),
  );
}

/** The colour of a lane's first box, as in the other views. */
function laneColour(plan, lane) {
  const box = plan.ribbon.boxes.find(({ lanes }) => lanes.includes(lane));
  return box ? plan.fills[plan.nodes[box.nodes[0]].group].colours[0] : deviceColour(lane);
}

function gridLegend({ plan }) {
  const most = Math.max(...plan.devices.map(loadOf));
  const shades = [LIGHTEST, 50, 100].map((at) => `color-mix(in srgb, var(--soft) ${at}%, var(--surface))`);
  return [
    key(striped(shades), `busy from 0 to ${seconds(most)} a ${plain(plan.head.turn)}`),
    el("span", { class: "key soft" }, "a card has the devices that run the same, in the colour of their stage"),
  ];
}
