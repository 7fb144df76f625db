"use strict";
const plan = JSON.parse(document.getElementById("data").textContent);
const GIB = 2 ** 30;
const LOOKS = {
  "parameters": ["--c0", 100], "unsharded parameters": ["--c0", 70], "gradients": ["--c0", 50],
  "optimizer states": ["--c0", 30], "checkpoints": ["--c1", 100], "sequence chunks": ["--c1", 60], "tokens": ["--c1", 40],
  "hidden states": ["--c2", 100], "attention": ["--c2", 75], "MLP": ["--c2", 50], "exchange": ["--c2", 30],
  "scan": ["--c2", 15],
  "logits and loss": ["--c3", 100], "buffers": ["--c4", 100], "copies in flight": ["--c4", 60], "weights": ["--c0", 100],
  "file of a checkpoint": ["--c4", 80], "processes": ["--c5", 80],
  "fragmentation": ["--c5", 60], "fixed": ["--c5", 100],
};
const byId = (id) => document.getElementById(id);
const number = (value, digits = 0) =>
  value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const element = (tag, text, properties = {}) =>
  Object.assign(document.createElement(tag), { textContent: text }, properties);
const total = (sizes) => Object.values(sizes).reduce((sum, size) => sum + size, 0);
const chosen = { machine: plan.machines.length - 1, length: plan.lengths.indexOf(plan.length), name: null };

function draw() {
  const machine = plan.machines[chosen.machine], length = plan.lengths[chosen.length];
  const options = machine.at[chosen.length], best = machine.fits[chosen.length] ? "recommended" : "nearest";
  const picked = options.find((option) => option.name === chosen.name);
  if (!picked) chosen.name = null;
  const option = picked || options[0], fits = option.level < 2;
  byId("length-shown").textContent = `${number(length)} tokens`;
  byId("arrangement").replaceChildren(
    element("option", `${best}: ${options[0].name}`, { value: "" }),
    ...options.map((one) => element("option", one.name, { value: one.name })),
  );
  byId("arrangement").value = chosen.name ?? "";
  byId("warning").textContent = plan.warnings[chosen.length];
  drawTiles(option, machine.longest[option.name], fits);
  byId("bars").replaceChildren(...[
    ["A device", option.device, plan.device_bytes, option.peaks[0]],
    ["Host, a node", option.host, plan.host_bytes, option.peaks[1]],
  ].filter(([, sizes]) => total(sizes) > 0).map((row) => bar(...row)));
  const command = `${machine.launcher} ${plan.run_flags[chosen.length]} ${option.flags}`;
  const words = fits ? command.split(" ") : [`${option.name} does not fit ${number(length)} tokens.`];
  byId("command").replaceChildren(...words.flatMap((word) => [element("span", word), " "]));
  byId("copy").hidden = !fits;
  byId("nodes").hidden = !fits || !machine.launcher.includes("RANK");
  drawChoices(machine, options, option);
}

function drawTiles(option, longest, fits) {
  const tiles = [
    ["tokens/s a device", fits ? number(option.speed) : "does not fit"],
    ["seconds a step", fits ? number(option.seconds, option.seconds < 10 ? 2 : 1) : "–"],
    ["sequences a step", number(option.sequences)],
    ["memory used", `${number(100 * option.used)}%`],
    ["longest that fits", longest ? number(longest) : "–"],
    ["a checkpoint", `${number(option.checkpoint / GIB, 1)} GiB`],
  ];
  byId("tiles").replaceChildren(...tiles.map(([name, value]) => {
    const tile = document.createElement("div");
    tile.append(element("dt", name), element("dd", value, { className: value === "does not fit" ? "full" : "" }));
    return tile;
  }));
}

function bar(name, sizes, limit, peak) {
  const used = total(sizes), end = 1.02 * Math.max(used, limit);
  const figure = document.createElement("figure"), box = document.createElement("div"), parts = document.createElement("div");
  const legend = document.createElement("ul"), caption = element("figcaption", `${name}: `);
  const share = `${number(used / GIB, 1)} of ${number(limit / GIB, 1)} GiB, at its peak: ${peak}`;
  caption.append(element("span", share, { className: used > limit ? "full" : "" }));
  box.className = "bar";
  parts.className = "parts";
  legend.className = "legend";
  for (const [category, size] of Object.entries(sizes)) {
    const [color, part] = LOOKS[category] ?? ["--c5", 40];
    const look = `color-mix(in srgb, var(${color}) ${part}%, var(--card))`, text = `${category} ${number(size / GIB, 1)} GiB`;
    const piece = element("i", "", { title: text }), item = document.createElement("li"), key = document.createElement("i");
    piece.style.setProperty("--own", look);
    piece.style.width = `${(100 * size) / end}%`;
    key.style.setProperty("--own", look);
    item.append(key, text);
    parts.append(piece);
    if (size >= 0.05 * GIB) legend.append(item);
  }
  const line = element("div", "", { className: "limit" });
  line.style.left = `${(100 * limit) / end}%`;
  line.append(element("span", `${number(limit / GIB, 1)} GiB`));
  box.append(parts, line);
  box.setAttribute("role", "img");
  box.setAttribute("aria-label", `${name}: ${share}`);
  figure.append(caption, box, legend);
  return figure;
}

function drawChoices(machine, options, shown) {
  byId("choices").replaceChildren(...options.map((one) => {
    const row = document.createElement("tr"), fits = one.level < 2, longest = machine.longest[one.name];
    const choose = () => { chosen.name = one.name; draw(); };
    row.append(element("th", one.name, { scope: "row" }));
    for (const text of [
      fits ? number(one.speed) : "–", fits ? number(one.seconds, one.seconds < 10 ? 2 : 1) : "–",
      number(total(one.device) / GIB, 1), number(total(one.host) / GIB, 1), longest ? number(longest) : "–",
    ]) row.append(element("td", text));
    row.tabIndex = 0;
    row.className = one.level ? "dim" : "";
    row.setAttribute("aria-selected", String(one.name === shown.name));
    row.addEventListener("click", choose);
    row.addEventListener("keydown", (event) => { if (event.key === "Enter") choose(); });
    return row;
  }));
}

byId("devices").append(...plan.machines.map((machine, at) => element("option", `${machine.gpus} × ${plan.device}`, { value: at })));
byId("devices").value = chosen.machine;
byId("length").max = plan.lengths.length - 1;
byId("length").value = chosen.length;
byId("devices").addEventListener("change", (event) => { chosen.machine = Number(event.target.value); draw(); });
byId("length").addEventListener("input", (event) => { chosen.length = Number(event.target.value); draw(); });
byId("arrangement").addEventListener("change", (event) => { chosen.name = event.target.value || null; draw(); });
byId("copy").addEventListener("click", () => navigator.clipboard?.writeText(byId("command").textContent.trim()));
draw();
