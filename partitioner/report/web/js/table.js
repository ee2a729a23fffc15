// A table of any length: sorted by its heads, filtered by text, only the rows in sight are made.

const ROW_HEIGHT = 28;

/**
 * Columns are {title, value(row), cell(row)?, number?, width}; rows any values.
 * Returns {element, show(filter), mark(predicate), rows()}.
 */
function makeTable({ label, columns, rows, onRow = null, text = null }) {
  const state = { rows, sort: null, down: false, at: -1, marked: () => false };
  const body = el("div", { class: "rows", role: "rowgroup", tabindex: "0", "aria-label": `${label}: rows` });
  const spacer = el("div", { class: "spacer", role: "presentation" });
  body.append(spacer);
  const grid = `grid-template-columns:${columns.map((column) => column.width ?? "1fr").join(" ")}`;
  const heads = columns.map((column) => headCell(column, () => sortBy(column)));
  const header = el("div", { class: "row headers", role: "row", style: grid }, heads);
  const element = el("div", { class: "table", role: "table", "aria-label": label }, el("div", { role: "rowgroup" }, header), body);

  const draw = () => {
    const first = Math.max(0, Math.floor(body.scrollTop / ROW_HEIGHT) - 4);
    const last = Math.min(state.rows.length, first + Math.ceil((body.clientHeight || 600) / ROW_HEIGHT) + 8);
    spacer.style.height = `${state.rows.length * ROW_HEIGHT}px`;
    const made = [];
    for (let at = first; at < last; at += 1) made.push(makeRow(state.rows[at], at));
    spacer.replaceChildren(...made);
    element.setAttribute("aria-rowcount", String(state.rows.length + 1));
  };
  const makeRow = (row, at) => {
    const cells = columns.map((column) =>
      el("div", { role: "cell", class: column.number ? "number" : null }, column.cell ? column.cell(row) : String(column.value(row) ?? "–")));
    const classes = ["row", onRow ? "click" : "", state.marked(row) ? "marked" : "", at === state.at ? "at" : ""].join(" ");
    const style = `${grid};top:${at * ROW_HEIGHT}px`;
    return el("div", { role: "row", class: classes, style, "aria-rowindex": String(at + 2), click: () => choose(at) }, cells);
  };
  const choose = (at) => {
    state.at = at;
    if (onRow) onRow(state.rows[at]);
    draw();
  };
  const sortBy = (column) => {
    state.down = state.sort === column ? !state.down : Boolean(column.number);
    state.sort = column;
    heads.forEach((head, at) =>
      head.setAttribute("aria-sort", columns[at] !== column ? "none" : state.down ? "descending" : "ascending"));
    show();
  };
  let filter = "";
  const show = (wanted = filter) => {
    filter = wanted;
    const needle = wanted.trim().toLowerCase();
    state.rows = needle && text ? rows.filter((row) => text(row).toLowerCase().includes(needle)) : [...rows];
    if (state.sort) state.rows.sort(order(state.sort.value, state.down));
    state.at = -1;
    body.scrollTop = 0;
    draw();
  };
  const scrollTo = (at) => {
    if (at * ROW_HEIGHT < body.scrollTop) body.scrollTop = at * ROW_HEIGHT;
    const below = (at + 1) * ROW_HEIGHT - body.clientHeight;
    if (below > body.scrollTop) body.scrollTop = below;
  };
  body.addEventListener("scroll", framed(draw));
  body.addEventListener("keydown", (event) => {
    const page = Math.max(1, Math.floor(body.clientHeight / ROW_HEIGHT) - 1);
    const last = state.rows.length - 1;
    const to = { ArrowDown: state.at + 1, ArrowUp: state.at - 1, PageDown: state.at + page, PageUp: state.at - page, Home: 0, End: last }[event.key];
    if (to === undefined || last < 0) return;
    event.preventDefault();
    const at = Math.min(last, Math.max(0, to));
    scrollTo(at);
    choose(at);
  });
  const mark = (predicate, scroll) => {
    state.marked = predicate;
    const at = scroll ? state.rows.findIndex(predicate) : -1;
    if (at >= 0) {
      state.at = at;
      scrollTo(at);
    }
    draw();
  };
  show();
  return { element, show, mark, draw, count: () => state.rows.length };
}

function headCell(column, sort) {
  return el("div", { role: "columnheader", "aria-sort": "none", class: column.number ? "number" : null },
    el("button", { type: "button", click: sort }, column.title));
}

function order(value, down) {
  const sign = down ? -1 : 1;
  return (a, b) => {
    const [left, right] = [value(a), value(b)];
    if (left === right) return 0;
    if (left === null || left === undefined) return 1;
    if (right === null || right === undefined) return -1;
    return left < right ? -sign : sign;
  };
}
