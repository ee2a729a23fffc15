// An ARIA tablist; a view draws when its tab is first shown.

/**
 * Tabs over panels: [{id, label, show}]; `show` runs whenever the tab is shown.
 *
 * The head is whole above the first view, and one line above the others.
 */
function startTabs(views) {
  const list = byId("tabs");
  const tabs = views.map(({ id, label }) =>
    el(
      "button",
      { role: "tab", id: `tab-${id}`, "aria-controls": `panel-${id}`, type: "button" },
      label,
    ),
  );
  const show = (index, focus = false) => {
    views.forEach(({ id }, at) => {
      tabs[at].setAttribute("aria-selected", String(at === index));
      tabs[at].tabIndex = at === index ? 0 : -1;
      byId(`panel-${id}`).hidden = at !== index;
    });
    document.body.classList.toggle("low-head", index > 0);
    if (focus) tabs[index].focus();
    views[index].show();
  };
  tabs.forEach((tab, index) => tab.addEventListener("click", () => show(index)));
  list.addEventListener("keydown", (event) => {
    const at = tabs.indexOf(document.activeElement);
    const last = tabs.length - 1;
    const next = {
      ArrowRight: at === last ? 0 : at + 1,
      ArrowLeft: at ? at - 1 : last,
      Home: 0,
      End: last,
    }[event.key];
    if (at < 0 || next === undefined) return;
    event.preventDefault();
    show(next, true);
  });
  for (const { id } of views) {
    byId(`panel-${id}`).setAttribute("role", "tabpanel");
    byId(`panel-${id}`).setAttribute("aria-labelledby", `tab-${id}`);
  }
  list.append(...tabs);
  const open = (id) => show(views.findIndex((view) => view.id === id));
  open(views[0].id);
  return open;
}
