// The options of all charts: fonts, tooltips, axes and zooms in the colours of the page.

/** The options that all charts share, with a tooltip; `tooltip` says when it shows and what. */
function chartOption(now, tooltip) {
  return {
    animation: false,
    backgroundColor: "transparent",
    textStyle: { fontFamily: now.font, color: now.ink, fontSize: 12 },
    tooltip: {
      confine: true,
      backgroundColor: now.raised,
      borderColor: now.line,
      textStyle: { color: now.ink, fontSize: 12 },
      extraCssText: "max-width:420px;white-space:normal",
      ...tooltip,
    },
    aria: { enabled: false },
  };
}

/** An axis of numbers; `label` is of its labels, as `formatter`. */
function valueAxis(now, label, more = {}) {
  return { ...axis("value", now, label), ...more };
}

/** An axis of names. */
function nameAxis(now, names, label, more = {}) {
  return { ...axis("category", now, label), data: names, ...more };
}

function axis(type, now, label) {
  return {
    type,
    axisLine: { show: true, lineStyle: { color: now.soft } },
    axisTick: { show: false },
    axisLabel: { color: now.ink, fontSize: 12, ...label },
    splitLine: { lineStyle: { color: now.line } },
    nameTextStyle: { color: now.ink, fontSize: 12 },
  };
}

/** Zooms of the horizontal axis, by the wheel and by a slider below the chart. */
function axisZoom(now, { bottom, height, format, span = [] }) {
  const [startValue, endValue] = span;
  return [
    { type: "inside", xAxisIndex: 0, filterMode: "none", startValue, endValue },
    {
      type: "slider",
      xAxisIndex: 0,
      filterMode: "none",
      bottom,
      height,
      labelFormatter: format,
      ...zoomLook(now),
    },
  ];
}

/** A slider beside the chart that scrolls through lanes, of which `room` have room at once. */
function laneScroll(now, room, place) {
  return {
    type: "slider",
    yAxisIndex: 0,
    startValue: 0,
    endValue: room,
    showDetail: false,
    ...place,
    ...zoomLook(now),
  };
}

function zoomLook(now) {
  return {
    borderColor: now.line,
    backgroundColor: "transparent",
    fillerColor: now.accent + "33",
    handleStyle: { color: now.accent },
    moveHandleStyle: { color: now.soft },
    textStyle: { color: now.ink, fontSize: 11 },
    brushSelect: false,
    showDataShadow: false,
  };
}
