// Stages: the devices, seconds, memory and messages of each, as `partition show` has them.

function startStages(plan) {
  const { step } = plan.head;
  byId("stages-sentence").append(plain(step.sentence));
  byId("stages-table").append(stageTable(plan, step.stages));
  byId("stages-legend").append(
    "Forward and backward: busy seconds of a micro-batch. Weights: with the optimizer's state. In " +
      "flight: most micro-batches at once, with what each keeps for the backward pass. Sends: of a " +
      "micro-batch, forward and backward, to other stages.",
  );
}

function stageTable(plan, stages) {
  const heads = ["Stage", "Devices", "Nodes", "Forward", "Backward", "Weights", "In flight", "Sends"];
  const rows = stages.map((stage, at) => [
    String(at),
    stageDevices(plan, stage.devices),
    count(stage.nodes),
    seconds(stage.forward_s),
    seconds(stage.backward_s),
    size(stage.weights_bytes),
    `${count(stage.in_flight)} × ${size(stage.kept_bytes)} = ${size(stage.in_flight * stage.kept_bytes)}`,
    stage.sends_to.map((to, index) => `${size(stage.sends_bytes[index])} to ${to}`).join(", ") || "–",
  ]);
  return plainTable(heads, rows, [0, 2, 3, 4, 5]);
}

/** A stage's devices, with their name if it is the same for all. */
function stageDevices(plan, devices) {
  const names = new Set(devices.map((device) => plan.devices[device].name));
  const name = names.size === 1 ? `: ${plain([...names][0])}` : "";
  return `${deviceText(plan, devices)}${name}`;
}
