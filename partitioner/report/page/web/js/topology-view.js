// The cluster as a picture: devices, and under them the links of each level, wide where fast.

const DRAWN_DEVICES = 16; // with more, groups of the innermost level stand for their devices
const DRAWN_GROUPS = 8;
const LINK_PX = [2, 14]; // of the slowest and the fastest level

/** Units to draw: {name, many, first, colour}; devices, or groups of them. */
function topologyUnits(plan) {
  const devices = plan.devices.flatMap((row, lane) =>
    row.members.map((number) => ({ number, lane, name: row.name })),
  );
  devices.sort((a, b) => a.number - b.number);
  const size = devices.length > DRAWN_DEVICES ? plan.traffic.links[0].size : 1;
  const units = [];
  for (let first = 0; first < devices.length; first += size) {
    const members = devices.slice(first, first + size);
    const names = [...new Set(members.map(({ name }) => name))];
    units.push({
      numbers: ranges(members.map(({ number }) => number)),
      name: names.join(", "),
      lane: members[0].lane,
    });
  }
  return { units, size };
}

/** Width of the links of a level, by its bandwidth among those of all levels. */
function linkWidth(links, { bandwidth_bytes_per_s: rate }) {
  const known = links.map((link) => link.bandwidth_bytes_per_s).filter((one) => one !== null);
  const [least, most] = [Math.min(...known), Math.max(...known)];
  if (rate === null || known.length < 2 || least === most) return LINK_PX[1];
  const place = Math.log(rate / least) / Math.log(most / least);
  return LINK_PX[0] + place * (LINK_PX[1] - LINK_PX[0]);
}

function topology(plan, width) {
  const { links } = plan.traffic;
  const { units, size: each } = topologyUnits(plan);
  const shown = units.slice(0, units.length > DRAWN_GROUPS && each > 1 ? DRAWN_GROUPS : units.length);
  const levels = links.filter((link) => link.size > 1);
  const side = 150; // pixels for the names of the levels
  const more = units.length > shown.length ? 70 : 0;
  const step = (width - side - more) / Math.max(1, shown.length);
  const height = 46 + 34 * levels.length;
  const picture = svg("svg", { width, height, class: "topology", role: "img" });
  const label = (x, y, text, kind, anchor = "middle") =>
    svg("text", { x, y, class: kind, "text-anchor": anchor }, text);
  let joints = shown.map((unit, at) => ({ x: (at + 0.5) * step, bottom: 36 }));
  shown.forEach((unit, at) => {
    const box = Math.min(step - 6, 92);
    const text = step > 62 ? `${unit.numbers}: ${short(unit.name, Math.floor(box / 7) - 4)}` : unit.numbers;
    const rect = { x: joints[at].x - box / 2, y: 4, width: box, height: 32, rx: 4 };
    picture.append(
      svg("rect", { ...rect, class: "unit", fill: deviceColour(unit.lane) }),
      label(joints[at].x, 25, plain(text), "unit-name"),
    );
  });
  if (more) picture.append(label(width - side - 62, 25, `+ ${count(units.length - shown.length)} more`, "level-name", "start"));
  levels.forEach((level, row) => {
    const y = 56 + 34 * row;
    const thick = linkWidth(links, level);
    const inside = Math.max(1, Math.round(level.size / (row ? levels[row - 1].size : each)));
    const kind = level.total_bytes ? "link used" : "link";
    const next = [];
    for (let first = 0; first < joints.length; first += inside) {
      const part = joints.slice(first, first + inside);
      const x = part.reduce((sum, joint) => sum + joint.x, 0) / part.length;
      const [left, right] = [part[0].x, part[part.length - 1].x];
      const open = row === levels.length - 1 && more ? width - side - 8 : right;
      for (const joint of part)
        picture.append(
          svg("line", { x1: joint.x, x2: joint.x, y1: joint.bottom, y2: y, class: kind, "stroke-width": thick }),
        );
      picture.append(
        svg("line", { x1: left - thick / 2, x2: open + thick / 2, y1: y, y2: y, class: kind, "stroke-width": thick }),
      );
      next.push({ x, bottom: y });
    }
    joints = next;
    picture.append(
      label(width - side + 8, y - 2, plain(short(level.level, 20)), "level-name", "start"),
      label(
        width - side + 8,
        y + 11,
        `${bandwidth(level.bandwidth_bytes_per_s)}, ${size(level.total_bytes)}`,
        "level-rate",
        "start",
      ),
    );
  });
  picture.append(svg("title", {}, topologyText(levels)));
  return picture;
}

function topologyText(levels) {
  const words = levels.map(
    (level) =>
      `${plain(level.level)} joins ${count(level.size)} devices at ` +
      `${bandwidth(level.bandwidth_bytes_per_s)} and carries ${size(level.total_bytes)}`,
  );
  return `${words.join("; ")}.`;
}

function showTopology(plan) {
  const box = byId("traffic-topology");
  if (box.clientWidth && plan.devices.length && plan.traffic.links.length)
    box.replaceChildren(topology(plan, box.clientWidth));
}
