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

/** {communication, balance, headroom} of a measured run; null where there was none. */
function measuredFigures({ measured, devices }) {
  const unknown = { communication: null, balance: null, headroom: null };
  if (!measured || !measured.ranks.length) return unknown;
  const { ranks } = measured;
  const loads = ranks.map((rank) => rank.compute_s + rank.comm_s + rank.other_s);
  const busy = loads.reduce((sum, load) => sum + load, 0);
  if (!busy) return unknown;
  const limits = new Map(devices.flatMap((row) => row.members.map((rank) => [rank, row.limit_bytes])));
  const peaks = ranks.map((rank) => rank.peak_bytes);
  return {
    communication: ranks.reduce((sum, rank) => sum + rank.comm_s, 0) / busy,
    balance: busy / loads.length / Math.max(...loads),
    headroom: peaks.some((peak) => peak === null)
      ? null
      : Math.min(...peaks.map((peak, rank) => 1 - peak / limits.get(rank))),
  };
}

function startHead(data) {
  const { head } = data;
  const certified = head.status !== ""; // without it there is no bound and no gap
  const cost = head.objective === "memory" ? size : seconds;
  const one = (value) =>
    value === null ? "does not fit one device" : `one device ${seconds(value)}`;
  const measured = measuredFigures(data);
  const delivered = (text) => (head.delivered === null ? "" : `; ${text} with results on every rank`);
  const timeTile = (label, predicted, alone, real, whole) =>
    real === null
      ? tile(label, seconds(predicted), `predicted; ${one(alone)}${delivered(seconds(whole))}`)
      : tile(label, seconds(real), `measured; predicted ${seconds(predicted)}`);
  const shareTile = (label, predicted, sub, real, bad = false) =>
    real === null
      ? tile(label, share(predicted), `predicted; ${sub}`, bad)
      : tile(label, share(real), `measured; predicted ${share(predicted)}`, bad);
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
    timeTile(
      head.turn === "step" ? "Step time" : "Between requests",
      head.step_s,
      head.step_s_one,
      head.step_measured_s,
      head.delivered?.step_s,
    ),
    tile(
      "Gain",
      head.gain === null ? "–" : times(head.gain),
      plain(head.gain_of),
      head.gain !== null && head.gain < 1,
    ),
    head.step === null
      ? timeTile(
          "Latency",
          head.latency_s,
          head.latency_s_one,
          head.latency_measured_s,
          head.delivered?.latency_s,
        )
      : shareTile("Bubble", head.step.bubble, `${count(head.step.micro_batches)} micro-batches`, null),
    shareTile(
      "Communication",
      head.communication,
      `of busy seconds${delivered(share(head.delivered?.communication))}`,
      measured.communication,
    ),
    shareTile("Balance", head.balance, "mean / largest load", measured.balance),
    shareTile("Memory free", head.headroom, "fullest device", measured.headroom, head.headroom < 0),
    tile("Devices", `${count(head.devices_used)} of ${count(head.devices)}`, "used"),
    tile(
      "Cost",
      cost(head.cost),
      certified
        ? `predicted; bound ${cost(head.bound)}, gap ${share(head.gap)}`
        : "predicted; not certified",
    ),
  );
  byId("verdict").append(plain(head.verdict));
  byId("verdict").title = plain(head.verdict);
  showSpaces(head, cost);
  byId("limit").append(plain(head.limit));
  byId("instead").append(plain(head.instead));
  const stop = (text) => (text && !/[.!?]$/.test(text) ? `${text}.` : text);
  const folded = head.folded && stop(`Folded: ${head.folded}`);
  const searched = head.searched && stop(`The bound covers what was searched: ${head.searched}`);
  const delivery = head.delivery && stop(head.delivery[0].toUpperCase() + head.delivery.slice(1));
  const notes = [delivery, ...head.trials, ...head.notes, searched, folded].filter(Boolean);
  byId("notes").hidden = !notes.length;
  byId("notes-title").append(`Notes (${notes.length})`);
  byId("notes-list").append(...notes.map((note) => el("li", {}, plain(note))));
}

/** A space, with its number of devices where another of that name has a plan too. */
function spaceName(head, space) {
  const many = head.spaces.filter((other) => other.space === space.space).length > 1;
  const used = many && space.devices_used !== null ? ` on ${count(space.devices_used)}` : "";
  return `${plain(space.space)}${used}`;
}

/** The text of a space; of one that was compared with the chosen plan, a link to that. */
function spaceLink(head, space, text) {
  if (!space.changes) return text;
  const show = () => {
    byId("tab-why").click();
    const button = byId("why-spaces").children[head.spaces.indexOf(space)].querySelector("button");
    if (button.getAttribute("aria-expanded") !== "true") button.click();
    button.focus();
  };
  return el("button", { type: "button", class: "link", click: show }, text);
}

/** The searched spaces in one line: "inter 194 µs (chosen), intra 705 µs, hybrid (none better)". */
function showSpaces(head, cost) {
  const known = head.spaces.filter((space) => space.cost !== null || space.bound !== null);
  byId("spaces").hidden = known.length < 2;
  if (known.length < 2) return;
  const parts = known.slice(0, 5).flatMap((space, at) => {
    const figure = space.cost === null ? "(none better)" : cost(space.cost);
    const text = `${spaceName(head, space)} ${figure}${space.chosen ? " (chosen)" : ""}`;
    return [at ? ", " : "Searched: ", spaceLink(head, space, text)];
  });
  const more = known.length - 5;
  byId("spaces").append(...parts, `${more > 0 ? `, ${count(more)} more` : ""}.`);
}
