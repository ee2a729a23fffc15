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
      : `All layers on devices ${deviceText(plan, lanes[0].devices)}. `;
  return plain(where + cut);
}

/** "Devices 0-1 run embed, blocks.0-5; devices 2-3 run ..." */
function laneSentence(plan) {
  const { lanes, boxes } = plan.ribbon;
  const parts = lanes.slice(0, 4).map((row, at) => {
    const own = boxes.filter((box) => box.parent < 0 && box.part === "forward");
    const named = own.filter((box) => box.lanes.includes(at) && box.label);
    const many = row.devices.length > 1 || plan.devices[row.devices[0]].members.length > 1;
    const who = `${many ? "devices" : "device"} ${deviceText(plan, row.devices)}`;
    named.sort((a, b) => b.seconds - a.seconds);
    const names = [...new Set(named.slice(0, 3).map((box) => short(boxLabel(plan, box), 30)))].join(", ");
    const nodes = own.filter((box) => box.lanes.includes(at)).flatMap((box) => box.nodes);
    const [first, end] = [Math.min(...nodes), Math.max(...nodes)];
    const name = (index) => short(plan.nodes[index].name, 24);
    const what = names || (nodes.length ? `${name(first)} to ${name(end)}` : "");
    return what ? `${who}: ${what}` : "";
  });
  const told = parts.filter(Boolean);
  const more = lanes.length > 4 ? ", ..." : "";
  if (!told.length) return `${count(lanes.length)} lanes share the layers. `;
  return `${told.join("; ").replace(/^./, (first) => first.toUpperCase())}${more}. `;
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
