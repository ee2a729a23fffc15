// Names in the overview: of boxes, of what a lane runs, and in the sentence above.

const LEAST_TOLD = 0.05; // a box with a smaller share of its lane's seconds is not in the sentence

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

/** "Devices 0-1 run embed, blocks.0-5; devices 2-3 run ..." */
function laneSentence(plan) {
  const { lanes, boxes } = plan.ribbon;
  const few = lanes.length > 4 ? [0, 1, 2, lanes.length - 1] : lanes.map((_, at) => at);
  const parts = few.map((at) => {
    const row = lanes[at];
    const own = boxes.filter((box) => box.parent < 0 && box.part === "forward");
    const here = own.filter((box) => box.lanes.includes(at));
    const whole = here.reduce((sum, box) => sum + box.seconds, 0);
    const named = here.filter((box) => box.label && box.seconds >= LEAST_TOLD * whole);
    named.sort((a, b) => a.start_s - b.start_s);
    const labels = named.flatMap((box) => boxLabel(plan, box).split(", "));
    const names = rangedNames(labels).slice(0, 4).map((name) => short(name, 30)).join(", ");
    const nodes = here.flatMap((box) => box.nodes);
    const [first, end] = [Math.min(...nodes), Math.max(...nodes)];
    const name = (index) => short(plan.nodes[index].name, 24);
    const what = names || (nodes.length ? `${name(first)} to ${name(end)}` : "");
    return what ? `${devicesOfLane(plan, row)}: ${what}` : "";
  });
  if (!parts.some(Boolean)) return `${count(lanes.length)} lanes share the layers. `;
  if (lanes.length > 4) parts.splice(3, 0, `${count(lanes.length - 4)} more lanes`);
  const told = parts.filter(Boolean).join("; ");
  return `${told.replace(/^./, (first) => first.toUpperCase())}. `;
}

/** ["head", "h.4", "h.5", "h.6"] -> ["head", "h.4-6"]: each name once, runs of numbers as one. */
function rangedNames(names) {
  const merged = [];
  for (const name of new Set(names)) {
    const [, stem, first, last] = /^(.*\.)(\d+)(?:-(\d+))?$/.exec(name) ?? [];
    const before = merged.at(-1);
    if (stem !== undefined && before?.stem === stem && Number(first) <= before.last + 1)
      before.last = Math.max(before.last, Number(last ?? first));
    else merged.push({ name, stem, first, last: Number(last ?? first) });
  }
  return merged.map(({ name, stem, first, last }) =>
    stem === undefined || Number(first) === last ? name : `${stem}${first}-${last}`,
  );
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

/** The modules of a lane, those of most seconds, by the end of their names. */
function laneWhat(plan, lane) {
  const { boxes, lanes } = plan.ribbon;
  if (lanes.length < 2) return "";
  const own = boxes.filter(
    (box) => box.parent < 0 && box.label && box.part === "forward" && box.lanes.includes(lane),
  );
  const most = [...own].sort((a, b) => b.seconds - a.seconds).slice(0, 4);
  const names = new Set(
    own.filter((box) => most.includes(box)).map((box) => tailName(boxLabel(plan, box))),
  );
  return plain([...names].join(", "));
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
