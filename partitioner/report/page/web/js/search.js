// Search by what the page shows: a combobox over a listbox.
//
// Nodes are found by name and type, by the tensors that they read and make, and by the module or
// layer that holds them; blocks, parts of the overview, communications and devices by their names,
// devices also by their stages and by what they run. A path may have dots or slashes.

const SEARCH_SHOWN = 60;

function startSearch(plan, overview, reveal) {
  const input = byId("search");
  const list = byId("search-results");
  let entries = null; // made when they are first asked for
  const state = { at: -1, hits: [] };
  const close = () => {
    list.hidden = true;
    input.setAttribute("aria-expanded", "false");
    input.removeAttribute("aria-activedescendant");
  };
  const take = ({ item, box }) => {
    close();
    if (box !== undefined) overview.chosen = box;
    select(item, "search");
    if (item.type === "node") reveal(item.id);
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
    const text = searchable(input.value.trim());
    if (!text) return close();
    entries ??= searchEntries(plan, overview);
    state.hits = searchHits(plan, entries, text);
    list.replaceChildren(
      ...state.hits.slice(0, SEARCH_SHOWN).map((entry, index) => searchRow(entry, index, take)),
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

/** A text as it is compared: paths have dots, as the page shows modules. */
function searchable(text) {
  return plain(text).toLowerCase().replaceAll("/", ".");
}

/** All that can be found: {kind, name, where, item}, and `box`, of a part of the overview. */
function searchEntries(plan, overview) {
  const at = (group) => `@${plan.groupNames[group]}`;
  const ofNode = (id) => ({ item: { type: "node", id }, where: at(plan.nodes[id].group) });
  const entries = plan.nodes.map(({ op, name }, id) => ({ kind: op, name, ...ofNode(id) }));
  plan.blocks.forEach(({ label, part }, id) => {
    const name = part === "backward" ? `${label} backward` : label;
    entries.push({ kind: "block", name, item: { type: "block", id }, where: "" });
  });
  plan.ribbon.boxes.forEach((box, index) => {
    const name = boxName(plan, box);
    const where = `@${deviceText(plan, devicesOfBox(overview, box))}`;
    entries.push({ kind: box.part, name, where, item: itemOfBox(overview, index), box: index });
  });
  const tensors = new Map(); // by name the node that makes it, else the first that reads it
  for (const side of ["outputs", "inputs"])
    plan.nodes.forEach((node, id) => {
      for (const { name } of node[side]) if (!tensors.has(name)) tensors.set(name, id);
    });
  for (const [name, id] of tensors) entries.push({ kind: "tensor", name, ...ofNode(id) });
  plan.comms.forEach(({ kind, value, ranks }, id) =>
    entries.push({
      kind,
      name: value,
      item: { type: "comm", id },
      where: `@${deviceText(plan, ranks)}`,
    }),
  );
  laneNames(plan).forEach((name, id) =>
    entries.push({ kind: "device", name, also: laneWords(plan, id), item: { type: "device", id }, where: "" }),
  );
  for (const entry of entries) {
    entry.text = searchable(entry.name);
    entry.also = (entry.also ?? []).map(searchable);
    entry.type = entry.kind.toLowerCase();
  }
  return entries;
}

/** What the page says of a lane beside its name: its devices, its stages and what it runs. */
function laneWords(plan, id) {
  const rows = plan.ribbon.lanes.filter(({ devices }) => devices.includes(id));
  const stages = rows.flatMap((row) => [stageText(row), ...row.stages.map((stage) => `stage ${stage}`)]);
  const where = deviceText(plan, [id]);
  return [`device ${where}`, `devices ${where}`, ...stages, ...rows.map(({ runs }) => runs)];
}

/**
 * Entries that have the text: types that are it, that begin with it, names that end with it, others.
 *
 * "layer 3" finds what is in a module of that number. What stands for one thing is found once, and
 * a communication only where the node that it follows is not.
 */
function searchHits(plan, entries, text) {
  const number = /^layers? (\d+)$/.exec(text)?.[1];
  const layer = number === undefined ? null : new RegExp(`[a-z_]\\.${number}(\\.|$)`);
  const ends = number === undefined ? null : new RegExp(`[a-z_]\\.${number}( backward)?$`);
  const has = (name) => name.includes(text) || Boolean(layer?.test(name));
  const ranked = entries.map((entry, at) => {
    const { text: name, type, also } = entry;
    const said = name === text || name.endsWith(`.${text}`) || also.includes(text);
    const whole = said || Boolean(ends?.test(name));
    const other = type.includes(text) || also.some((words) => words.includes(text));
    const ranks = [type === text, type.startsWith(text), whole, has(name), other];
    return [ranks.indexOf(true), at, entry];
  });
  ranked.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
  const seen = new Set();
  return ranked.flatMap(([rank, , entry]) => {
    const { item, kind } = entry;
    const own = entry.box === undefined ? `${item.type} ${item.id}` : `box ${entry.box}`;
    const named = item.type === "comm" && !kind.toLowerCase().includes(text);
    const follows = named && seen.has(`node ${plan.comms[item.id].producer}`);
    if (rank < 0 || seen.has(own) || follows) return [];
    seen.add(own);
    return [entry];
  });
}

function searchRow(entry, index, take) {
  return el(
    "li",
    {
      role: "option",
      id: `hit-${index}`,
      "aria-selected": "false",
      mousedown: (event) => {
        event.preventDefault();
        take(entry);
      },
    },
    el("b", {}, short(entry.kind, 20)),
    nameOf(entry.name, 44),
    el("span", { class: "soft" }, entry.where),
  );
}
