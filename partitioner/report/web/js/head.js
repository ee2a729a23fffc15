// The verdict at the top of the page.

function tile(label, value, sub = "", bad = false) {
  return el(
    "div",
    { class: bad ? "tile bad" : "tile" },
    el("dt", {}, label),
    el("dd", {}, value),
    el("dd", { class: "sub" }, sub),
  );
}

function startHead(data) {
  const { head } = data;
  const cost = head.objective === "memory" ? size : seconds;
  const one = (value) =>
    value === null ? "does not fit one device" : `one device ${seconds(value)}`;
  byId("subtitle").append(
    `${head.objective} on ${plain(head.cluster)} · ${plain(head.strategy)} · ${plain(head.status)} · ${plain(head.solver)}`,
  );
  byId("subtitle").title = plain(head.searched);
  byId("tiles").append(
    tile("Step time", seconds(head.step_s), one(head.step_s_one)),
    tile(
      "Speed-up",
      head.speedup === null ? "–" : `${digits(head.speedup)}×`,
      head.speedup === null ? "does not fit one device" : "over one device",
      head.speedup !== null && head.speedup < 1,
    ),
    tile("Latency", seconds(head.latency_s), one(head.latency_s_one)),
    tile("Communication", share(head.communication), "of busy seconds"),
    tile("Balance", share(head.balance), "mean / largest load"),
    tile("Memory free", share(head.headroom), "fullest device", head.headroom < 0),
    tile("Devices", `${head.devices_used} of ${head.devices}`, "used"),
    tile("Cost", cost(head.cost), `bound ${cost(head.bound)}, gap ${share(head.gap)}`),
  );
  byId("limit").append(plain(head.limit));
  byId("worth").append(plain(head.worth));
  const notes = [...head.notes, head.searched].filter(Boolean);
  byId("notes").hidden = !notes.length;
  byId("notes-title").append(`Notes (${notes.length})`);
  byId("notes-list").append(...notes.map((note) => el("li", {}, plain(note))));
}
