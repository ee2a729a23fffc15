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

/** What the speed-up is over, or why there is none. */
function overOne(head) {
  if (head.step_s_one === null) return "does not fit one device";
  return head.speedup === null ? "a step takes no time" : "over one device";
}

function startHead(data) {
  const { head } = data;
  const certified = head.status !== ""; // without it there is no bound and no gap
  const cost = head.objective === "memory" ? size : seconds;
  const one = (value) =>
    value === null ? "does not fit one device" : `one device ${seconds(value)}`;
  const facts = [
    `${head.objective} on ${plain(head.cluster)}`,
    plain(head.strategy),
    certified ? plain(head.status) : "not certified",
    plain(head.solver),
    head.seed === null ? "" : `seed ${head.seed}`,
  ];
  if (head.step !== null) facts.push(plain(head.step.sentence));
  byId("subtitle").append(facts.filter(Boolean).join(" · "));
  byId("subtitle").title = plain(head.searched);
  byId("tiles").append(
    tile("Step time", seconds(head.step_s), one(head.step_s_one)),
    tile(
      "Speed-up",
      head.speedup === null ? "–" : times(head.speedup),
      overOne(head),
      head.speedup !== null && head.speedup < 1,
    ),
    head.step === null
      ? tile("Latency", seconds(head.latency_s), one(head.latency_s_one))
      : tile("Bubble", share(head.step.bubble), `${count(head.step.micro_batches)} micro-batches`),
    tile("Communication", share(head.communication), "of busy seconds"),
    tile("Balance", share(head.balance), "mean / largest load"),
    tile("Memory free", share(head.headroom), "fullest device", head.headroom < 0),
    tile("Devices", `${head.devices_used} of ${head.devices}`, "used"),
    tile(
      "Cost",
      cost(head.cost),
      certified ? `bound ${cost(head.bound)}, gap ${share(head.gap)}` : "not certified",
    ),
  );
  byId("verdict").append(plain(head.verdict));
  showSpaces(head, cost);
  byId("limit").append(plain(head.limit));
  byId("worth").append(plain(head.worth));
  const stop = (text) => (text && !/[.!?]$/.test(text) ? `${text}.` : text);
  const folded = head.folded && stop(`Folded: ${head.folded}`);
  const searched = head.searched && stop(`The bound covers what was searched: ${head.searched}`);
  const notes = [...head.trials, ...head.notes, searched, folded].filter(Boolean);
  byId("notes").hidden = !notes.length;
  byId("notes-title").append(`Notes (${notes.length})`);
  byId("notes-list").append(...notes.map((note) => el("li", {}, plain(note))));
}

/** The searched spaces in one line: "inter 194 µs (chosen), hybrid 402 µs, intra 705 µs". */
function showSpaces(head, cost) {
  const planned = head.spaces.filter((space) => space.cost !== null);
  byId("spaces").hidden = planned.length < 2;
  if (planned.length < 2) return;
  const texts = planned.slice(0, 5).map((space) => {
    return `${plain(space.space)} ${cost(space.cost)}${space.chosen ? " (chosen)" : ""}`;
  });
  const more = planned.length - texts.length;
  byId("spaces").append(`Searched: ${texts.join(", ")}${more ? `, ${count(more)} more` : ""}.`);
}
