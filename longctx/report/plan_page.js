"use strict";
const page = JSON.parse(document.getElementById("data").textContent);
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
const secondsOf = (one) => (one.fits ? number(one.seconds_per_step, one.seconds_per_step < 10 ? 2 : 1) : "–");
const chosen = { plan: page.plans.length - 1, length: page.lengths.indexOf(page.length), name: null };

function draw() {
  const plan = page.plans[chosen.plan], length = page.lengths[chosen.length], first = plan.recommended[chosen.length];
  const known = plan.choices[length], machine = plan.machine;
  const options = [...known.filter((one) => one.arrangement === first), ...known.filter((one) => one.arrangement !== first)];
  const picked = options.find((option) => option.arrangement === chosen.name);
  if (!picked) chosen.name = null;
  const option = picked || options[0], fits = option.fits;
  byId("length-shown").textContent = `${number(length)} tokens`;
  byId("arrangement").replaceChildren(
    element("option", `${first ? "recommended" : "nearest"}: ${options[0].arrangement}`, { value: "" }),
    ...options.map((one) => element("option", one.arrangement, { value: one.arrangement })),
  );
  byId("arrangement").value = chosen.name ?? "";
  byId("warning").textContent = page.warnings[chosen.length];
  drawTiles(option, plan.arrangements[option.arrangement].longest);
  byId("bars").replaceChildren(...[
    ["A device", option.device_bytes, machine.device_bytes, option.device_peak],
    ["Host, a node", option.host_bytes, machine.host_bytes, option.host_peak],
  ].filter(([, sizes]) => total(sizes) > 0).map((row) => bar(...row)));
  const command = `${plan.launcher} ${page.run_flags[chosen.length]} ${option.flags}`;
  const words = fits ? command.split(" ") : [`${option.arrangement} does not fit ${number(length)} tokens.`];
  byId("command").replaceChildren(...words.flatMap((word) => [element("span", word), " "]));
  byId("copy").hidden = !fits;
  byId("nodes").hidden = !fits || !plan.launcher.includes("RANK");
  drawChoices(plan, options, option);
}

function drawTiles(option, longest) {
  const tiles = [
    ["tokens/s a device", option.fits ? number(option.tokens_per_second_per_device) : "does not fit"],
    ["seconds a step", secondsOf(option)],
    ["sequences a step", number(option.sequences_per_step)],
    ["memory used", `${number(100 * option.used)}%`],
    ["longest that fits", longest ? number(longest) : "–"],
    ["a checkpoint", `${number(option.disk_bytes.checkpoint / GIB, 1)} GiB`],
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

function drawChoices(plan, options, shown) {
  byId("choices").replaceChildren(...options.map((one) => {
    const row = document.createElement("tr"), longest = plan.arrangements[one.arrangement].longest;
    const choose = () => { chosen.name = one.arrangement; draw(); };
    row.append(element("th", one.arrangement, { scope: "row" }));
    for (const text of [
      one.fits ? number(one.tokens_per_second_per_device) : "–", secondsOf(one),
      number(total(one.device_bytes) / GIB, 1), number(total(one.host_bytes) / GIB, 1), longest ? number(longest) : "–",
    ]) row.append(element("td", text));
    row.tabIndex = 0;
    row.className = one.used > 1 - page.free_part ? "dim" : "";
    row.setAttribute("aria-selected", String(one.arrangement === shown.arrangement));
    row.addEventListener("click", choose);
    row.addEventListener("keydown", (event) => { if (event.key === "Enter") choose(); });
    return row;
  }));
}

byId("devices").append(...page.plans.map(({ machine }, at) => element("option", `${machine.gpus} × ${machine.device}`, { value: at })));
byId("devices").value = chosen.plan;
byId("length").max = page.lengths.length - 1;
byId("length").value = chosen.length;
byId("devices").addEventListener("change", (event) => { chosen.plan = Number(event.target.value); draw(); });
byId("length").addEventListener("input", (event) => { chosen.length = Number(event.target.value); draw(); });
byId("arrangement").addEventListener("change", (event) => { chosen.name = event.target.value || null; draw(); });
byId("copy").addEventListener("click", () => navigator.clipboard?.writeText(byId("command").textContent.trim()));
draw();
