// Long graphs in columns: a layout from the top down, cut between ranks, beside each other.

const COLUMN_GAP = 90; // pixels between columns, in which edges go up to the next
const MOST_COLUMNS = 12;
const LANES = 7; // beside each other in a gap

/** The level in as many columns as make its shape that of the canvas; itself if one is enough. */
function inColumns(level, aspect) {
  const many = Math.min(MOST_COLUMNS, Math.round(Math.sqrt((aspect * level.h) / level.w)));
  const cuts = many < 2 ? [] : columnCuts(level, many);
  if (!cuts.length) return level;
  const starts = [level.top, ...cuts];
  const columnOf = (y) => starts.findLastIndex((start, at) => at === 0 || start <= y);
  const moved = (point, column = columnOf(point.y)) => ({
    ...point,
    x: point.x + column * (level.w + COLUMN_GAP),
    y: point.y - starts[column] + level.top,
  });
  const ends = [...cuts, level.top + level.h];
  const heights = ends.map((end, at) => end - starts[at]);
  const centres = new Map(level.nodes.map((node) => [node.id, node]));
  return {
    ...level,
    nodes: level.nodes.map((node) => moved(node)),
    routes: level.routes.map((route, at) => ({
      ...route,
      label: route.label && moved(route.label),
      points: columnRoute(level, route, at, { starts, columnOf, moved, centres, heights }),
    })),
    w: starts.length * level.w + cuts.length * COLUMN_GAP,
    h: Math.max(...heights),
  };
}

/** Heights at which no box stands, near equal parts of the whole, with the fewest edges. */
function columnCuts(level, many) {
  const spans = level.nodes.map(({ y, height }) => [y - height / 2, y + height / 2]);
  spans.sort((a, b) => a[0] - b[0]);
  const gaps = [];
  let end = -Infinity;
  for (const [from, to] of spans) {
    if (from > end && end > -Infinity) gaps.push((from + end) / 2);
    end = Math.max(end, to);
  }
  const crossing = (y) =>
    level.routes.filter(({ points: [first], from, to }) => {
      const ys = [from, to].map((id) => level.nodes.find((node) => node.id === id)?.y ?? first?.y);
      return Math.min(...ys) < y && y < Math.max(...ys);
    }).length;
  const size = level.h / many;
  const cuts = [];
  for (let at = 1; at < many; at += 1) {
    const target = level.top + at * size;
    const near = gaps.filter(
      (y) => Math.abs(y - target) <= 0.5 * size && y > (cuts.at(-1) ?? -Infinity),
    );
    if (!near.length) continue;
    const costs = near.map((y) => crossing(y) + (3 * Math.abs(y - target)) / size);
    cuts.push(near[costs.indexOf(Math.min(...costs))]);
  }
  return cuts;
}

/** The bends of an edge: where it leaves a column, it goes up the gap to the next one's top. */
function columnRoute(level, { points, from, to }, number, { starts, columnOf, moved, centres, heights }) {
  const path = [centres.get(from), ...points, centres.get(to)];
  const bends = [];
  const shift = (6 * ((number % LANES) - (LANES - 1) / 2));
  for (let at = 1; at < path.length; at += 1) {
    const [a, b] = [path[at - 1], path[at]];
    const [first, last] = [columnOf(a.y), columnOf(b.y)];
    const step = Math.sign(last - first);
    for (let column = first; column !== last; column += step) {
      const [left, right] = [Math.min(column, column + step), Math.max(column, column + step)];
      const x = a.x + ((b.x - a.x) * (starts[right] - a.y)) / (b.y - a.y || 1);
      const lane = level.left + right * (level.w + COLUMN_GAP) - COLUMN_GAP / 2 + shift;
      const below = level.top + heights[left] - 4;
      const turn = [
        { x: x + left * (level.w + COLUMN_GAP), y: below },
        { x: lane, y: below },
        { x: lane, y: level.top + 4 },
        { x: x + right * (level.w + COLUMN_GAP), y: level.top + 4 },
      ];
      bends.push(...(step > 0 ? turn : turn.reverse()));
    }
    if (at < path.length - 1) bends.push(moved({ x: b.x, y: b.y }));
  }
  return bends;
}
