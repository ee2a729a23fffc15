// Colours: Okabe and Ito's eight, which colour-blind people can tell apart, and the page's own.

const DEVICE_COLOURS = [
  "#0072b2",
  "#e69f00",
  "#009e73",
  "#cc79a7",
  "#56b4e9",
  "#d55e00",
  "#f0e442",
  "#8f8f8f",
];

function deviceColour(device) {
  return DEVICE_COLOURS[device % DEVICE_COLOURS.length];
}

/** The background of a swatch with some colours, one beside the other. */
function striped(colours) {
  const stops = colours.flatMap((colour, at) => [
    `${colour} ${(100 * at) / colours.length}%`,
    `${colour} ${(100 * (at + 1)) / colours.length}%`,
  ]);
  return `linear-gradient(90deg,${stops})`;
}

/** Black or white, whichever can be read on a colour. */
function inkOn(colour) {
  const [red, green, blue] = [1, 3, 5]
    .map((at) => parseInt(colour.slice(at, at + 2), 16) / 255)
    .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.2 ? "#000000" : "#ffffff";
}

/** The page's colours as the style sheet has them now. */
function theme() {
  const style = getComputedStyle(document.documentElement);
  const get = (name) => style.getPropertyValue(`--${name}`).trim();
  return {
    surface: get("surface"),
    raised: get("raised"),
    ink: get("ink"),
    soft: get("soft"),
    line: get("line"),
    idle: get("idle"),
    comm: get("comm"),
    accent: get("accent"),
    warn: get("warn"),
    weights: get("weights"),
    activations: get("activations"),
    buffers: get("buffers"),
    executor: get("executor"),
    ramp: [get("ramp-0"), get("ramp-1"), get("ramp-2"), get("ramp-3")],
    font: get("font"),
  };
}

/**
 * Fills of groups of devices.
 *
 * Groups that share no device are plain, each with the next of the colours. Where groups
 * overlap, a group of several devices shows the colours of all of them as stripes.
 */
function groupFills(groups, used) {
  const seen = new Set();
  let overlap = false;
  for (const index of used) {
    for (const device of groups[index].devices) {
      overlap ||= seen.has(device);
      seen.add(device);
    }
  }
  const order = [...used].sort((a, b) => groups[a].devices[0] - groups[b].devices[0]);
  return groups.map(({ devices }, index) => {
    const striped = overlap && devices.length > 1;
    if (striped) return { striped, colours: devices.slice(0, 8).map(deviceColour) };
    return {
      striped,
      colours: [deviceColour(overlap ? devices[0] : Math.max(0, order.indexOf(index)))],
    };
  });
}

const themeListeners = [];

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  for (const listener of themeListeners) listener();
}

function startTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const button = byId("theme");
  const show = () => {
    const now = document.documentElement.dataset.theme;
    button.textContent = now === "dark" ? "Light" : "Dark";
    button.setAttribute("aria-label", `Switch to ${now === "dark" ? "light" : "dark"} colours`);
  };
  themeListeners.push(show);
  setTheme(dark.matches ? "dark" : "light");
  dark.addEventListener("change", () => setTheme(dark.matches ? "dark" : "light"));
  button.addEventListener("click", () =>
    setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"),
  );
}
