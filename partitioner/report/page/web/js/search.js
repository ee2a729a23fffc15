// Search by name and type: a combobox over a listbox.

const SEARCH_SHOWN = 60;

function startSearch(plan, reveal) {
  const input = byId("search");
  const list = byId("search-results");
  const names = plan.nodes.map((node) => [plain(node.name).toLowerCase(), node.op.toLowerCase()]);
  const state = { at: -1, hits: [] };
  const close = () => {
    list.hidden = true;
    input.setAttribute("aria-expanded", "false");
    input.removeAttribute("aria-activedescendant");
  };
  const take = (node) => {
    close();
    select({ type: "node", id: node }, "search");
    reveal(node);
  };
  const point = (at) => {
    state.at = at;
    [...list.children].forEach((row, index) =>
      row.setAttribute("aria-selected", String(index === at)),
    );
    const row = list.children[at];
    if (!row) return;
    row.scrollIntoView({ block: "nearest" });
    input.setAttribute("aria-activedescendant", row.id);
  };
  const find = () => {
    const text = input.value.trim().toLowerCase();
    if (!text) return close();
    state.hits = searchHits(names, text);
    list.replaceChildren(
      ...state.hits.slice(0, SEARCH_SHOWN).map((node, index) => searchRow(plan, node, index, take)),
    );
    const more = state.hits.length > SEARCH_SHOWN ? `, the first ${SEARCH_SHOWN} shown` : "";
    byId("search-count").textContent = `${count(state.hits.length)} found${more}`;
    list.hidden = !state.hits.length;
    input.setAttribute("aria-expanded", String(!list.hidden));
    point(state.hits.length ? 0 : -1);
  };
  input.addEventListener("input", find);
  input.addEventListener("focus", find);
  input.addEventListener("blur", () =>
    setTimeout(() => document.activeElement !== input && close(), 150),
  );
  input.addEventListener("keydown", (event) => {
    const shown = list.children.length;
    if (event.key === "Escape") return close();
    if (event.key === "Enter" && state.hits[state.at] !== undefined && !list.hidden)
      return take(state.hits[state.at]);
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step || !shown) return;
    event.preventDefault();
    point((state.at + step + shown) % shown);
  });
  document.addEventListener("keydown", (event) => {
    const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(document.activeElement?.tagName ?? "");
    if (event.key !== "/" || typing || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    input.focus();
    input.select();
  });
}

/** Nodes whose type or name has the text: types first that are it, then that begin with it. */
function searchHits(names, text) {
  const ranked = names.map(([name, op], node) => {
    if (op === text) return [0, node];
    if (op.startsWith(text)) return [1, node];
    return name.includes(text) ? [2, node] : op.includes(text) ? [3, node] : [4, node];
  });
  return ranked
    .filter(([rank]) => rank < 4)
    .sort((a, b) => a[0] - b[0] || a[1] - b[1])
    .map(([, node]) => node);
}

function searchRow(plan, node, index, take) {
  const row = plan.nodes[node];
  return el(
    "li",
    {
      role: "option",
      id: `hit-${index}`,
      "aria-selected": "false",
      mousedown: (event) => {
        event.preventDefault();
        take(node);
      },
    },
    el("b", {}, short(row.op, 20)),
    nameOf(row.name, 44),
    el("span", { class: "soft" }, `@${plan.groupNames[row.group]}`),
  );
}
