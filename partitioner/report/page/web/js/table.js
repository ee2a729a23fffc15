// A table of any length: sorted by its heads, filtered by text, only the rows in sight are made.

const ROW_HEIGHT = 28; // also of the heads
const LETTER_PX = 7.8; // of the table's font, about

/**
 * Columns are {title, value(row), cell(row, letters)?, number?, width}; rows any values.
 * Returns {element, show(filter), mark(predicate), rows()}.
 */
function makeTable({ label, columns, rows, onRow = null, text = null, minWidth = 0 }) {
  const state = { rows, sort: null, down: false, at: -1, marked: () => false };
  const spacer = el("div", { class: "spacer", role: "rowgroup" });
  const grid = `grid-template-columns:${columns.map((column) => column.width ?? "1fr").join(" ")};min-width:${minWidth}px`;
  const heads = columns.map((column) => headCell(column, () => sortBy(column)));
  const header = el("div", { class: "row headers", role: "row", style: grid }, heads);
  const body = el(
    "div",
    { class: "table", role: "table", "aria-label": label, tabindex: "0" },
    header,
    el("div", { class: "rows" }, spacer),
  );

  const draw = () => {
    const first = Math.max(0, Math.floor(body.scrollTop / ROW_HEIGHT) - 4);
    const last = Math.min(
      state.rows.length,
      first + Math.ceil((body.clientHeight || 600) / ROW_HEIGHT) + 8,
    );
    spacer.style.cssText = `height:${state.rows.length * ROW_HEIGHT}px;min-width:${minWidth}px`;
    const letters = heads.map((head) => Math.floor((head.offsetWidth || 200) / LETTER_PX));
    const made = [];
    for (let at = first; at < last; at += 1) made.push(makeRow(state.rows[at], at, letters));
    spacer.replaceChildren(...made);
    body.setAttribute("aria-rowcount", String(state.rows.length + 1));
  };
  const makeRow = (row, at, letters) => {
    const cells = columns.map((column, index) =>
      el(
        "div",
        { role: "cell", class: column.number ? "number" : null },
        column.cell ? column.cell(row, letters[index]) : String(column.value(row) ?? "–"),
      ),
    );
    const classes = [
      "row",
      onRow ? "click" : "",
      state.marked(row) ? "marked" : "",
      at === state.at ? "at" : "",
    ].join(" ");
    const style = `${grid};top:${at * ROW_HEIGHT}px`;
    return el(
      "div",
      {
        role: "row",
        class: classes,
        style,
        "aria-rowindex": String(at + 2),
        click: () => choose(at),
      },
      cells,
    );
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
      head.setAttribute(
        "aria-sort",
        columns[at] !== column ? "none" : state.down ? "descending" : "ascending",
      ),
    );
    show();
  };
  let filter = "";
  const show = (wanted = filter) => {
    filter = wanted;
    const needle = wanted.trim().toLowerCase();
    state.rows =
      needle && text ? rows.filter((row) => text(row).toLowerCase().includes(needle)) : [...rows];
    if (state.sort) state.rows.sort(order(state.sort.value, state.down));
    state.at = -1;
    body.scrollTop = 0;
    draw();
  };
  const scrollTo = (at) => {
    if (at * ROW_HEIGHT < body.scrollTop) body.scrollTop = at * ROW_HEIGHT;
    const below = (at + 2) * ROW_HEIGHT - body.clientHeight;
    if (below > body.scrollTop) body.scrollTop = below;
  };
  body.addEventListener("scroll", framed(draw));
  body.addEventListener("keydown", (event) => {
    const page = Math.max(1, Math.floor(body.clientHeight / ROW_HEIGHT) - 1);
    const last = state.rows.length - 1;
    const to = {
      ArrowDown: state.at + 1,
      ArrowUp: state.at - 1,
      PageDown: state.at + page,
      PageUp: state.at - page,
      Home: 0,
      End: last,
    }[event.key];
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
  new ResizeObserver(framed(() => body.clientHeight && draw())).observe(body);
  return { element: body, show, mark, draw, count: () => state.rows.length };
}

function headCell(column, sort) {
  return el(
    "div",
    { role: "columnheader", "aria-sort": "none", class: column.number ? "number" : null },
    el("button", { type: "button", click: sort }, column.title),
  );
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

/** A small table, all rows made at once: heads and rows of cells; text that is a number stands right. */
function plainTable(heads, rows, numbers) {
  const cell = (tag, at, content) =>
    el(
      tag,
      { class: numbers.includes(at) ? "number" : null, scope: tag === "th" ? "col" : null },
      content,
    );
  return el(
    "table",
    {},
    el(
      "thead",
      {},
      el(
        "tr",
        {},
        heads.map((head, at) => cell("th", at, head)),
      ),
    ),
    el(
      "tbody",
      {},
      rows.map((row) =>
        el(
          "tr",
          {},
          row.map((content, at) => cell("td", at, content ?? "–")),
        ),
      ),
    ),
  );
}
