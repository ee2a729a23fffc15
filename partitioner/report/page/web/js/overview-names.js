// Names in the overview: of boxes, of what a lane runs, and in the sentence above.

/** One sentence on what is where, and how it is cut. */
function overviewAnswer({ plan, axes }) {
  const { lanes, boxes } = plan.ribbon;
  if (!boxes.length) return "The plan has no operators that take time.";
  const words = axes.map((axis) => `${axis} cuts ${axisWords(boxes, axis)}`);
  const cut = words.length ? `${words.join("; ")}. ` : "Nothing is cut: every operator runs whole. ";
  const where =
    lanes.length > 1
      ? laneSentence(plan)
      : `All layers on ${devicesOfLane(plan, lanes[0])}. `;
  const copies = /\bcopies=(\d+)/.exec(lanes[0].mesh);
  return plain((copies ? `${copies[1]} whole copies take requests in turn. ` : "") + where + cut);
}

/** "device 0" or "devices 0-3". */
function devicesOfLane(plan, row) {
  const several = row.devices.length > 1 || plan.devices[row.devices[0]].members.length > 1;
  return `${several ? "devices" : "device"} ${deviceText(plan, row.devices)}`;
}

/** "Devices 0-1: embed, layers 0-5; devices 2-3: ...", of many lanes the first and the last. */
function laneSentence(plan) {
  const told = [];
  for (const { devices, runs } of plan.ribbon.lanes) {
    const last = told.at(-1);
    if (last?.runs === runs) last.devices.push(...devices);
    else told.push({ devices: [...devices], runs });
  }
  const named = told.filter(({ runs }) => runs);
  if (!named.length) return `${count(plan.ribbon.lanes.length)} lanes share the layers. `;
  const parts = named.map((row) => `${devicesOfLane(plan, row)}: ${short(row.runs, 200)}`);
  if (parts.length > 4) parts.splice(3, parts.length - 4, `${count(parts.length - 4)} more lanes`);
  return `${parts.join("; ").replace(/^./, (first) => first.toUpperCase())}. `;
}

function axisWords(boxes, axis) {
  const sums = new Map();
  for (const box of boxes) {
    if (box.parent >= 0) continue;
    const words = box.cuts.find((cut) => cut.axis === axis)?.words ?? [];
    for (const word of words) sums.set(word, (sums.get(word) ?? 0) + box.seconds);
  }
  const cut = [...sums].filter(([word]) => !["replicated", "weights", "sums"].includes(word));
  const words = cut.sort((a, b) => b[1] - a[1]).map(([word]) => word);
  if (!words.length) return "nothing";
  return words.length === 1
    ? words[0]
    : `${words.slice(0, -1).join(", ")} and ${words[words.length - 1]}`;
}

function axisColour(view, axis) {
  return AXIS_COLOURS[view.axes.indexOf(axis) % AXIS_COLOURS.length];
}

/** The module path of a box, without what all paths share. */
function boxLabel(plan, box) {
  return box.label.slice(plan.prefix) || box.label;
}

/** The last two modules of paths, which is what differs: "transformer.h.9" is "h.9". */
function tailName(name) {
  return name
    .split(", ")
    .map((path) => {
      const parts = path.split(".");
      return parts.slice(/^\d+$/.test(parts.at(-2)) ? -3 : -2).join(".");
    })
    .join(", ");
}

function boxName(plan, box, narrow = false) {
  const repeat = box.count > 1 ? ` × ${box.count}` : "";
  const label = narrow ? tailName(boxLabel(plan, box)) : boxLabel(plan, box);
  return box.label ? `${short(label, 60)}${repeat}` : `${short(box.ops, 80)}${repeat}`;
}

/** How much of their paths labels share, up to a dot. */
function commonLength(labels) {
  const named = labels.filter(Boolean);
  if (named.length < 2) return 0;
  let at = 0;
  while (named.every((label) => label[at] !== undefined && label[at] === named[0][at])) at += 1;
  const end = named[0].lastIndexOf(".", at - 1) + 1;
  // A number alone says nothing: its list stays with it.
  return named.some((label) => /^\d/.test(label.slice(end)))
    ? named[0].lastIndexOf(".", end - 2) + 1
    : end;
}
