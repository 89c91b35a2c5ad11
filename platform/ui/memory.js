// Pools, and the namespaces in each as bars against guarantee and limit.

import { el, keepInStep } from "./dom.js";
import { bytes, count, percent } from "./format.js";

const NUM_HUES = 8;
const HISTORY_S = 180;
const LEAST_HISTORY_S = 20;
/** "pool namespace" → [time, bytes held] of the last minutes, as this page has seen them. */
const history = new Map();

/**
 * Shows pools and namespaces as `/v1/pools` and `/v1/namespaces` answer them. Tenants are not shown pools: `pools` is
 * then null, and bars are drawn against the largest limit.
 */
export function showMemory(pools, namespaces) {
  const hues = new Map(namespaces.map((namespace, index) => [namespace.id, `var(--hue-${index % NUM_HUES})`]));
  const ids = [...new Set(namespaces.flatMap((namespace) => Object.keys(namespace.pools)))].sort();
  const shown = ids.map((id) => {
    const rows = namespaces
      .filter((namespace) => namespace.pools[id])
      .map((namespace) => ({ ...namespace.pools[id], id: namespace.id, model: namespace.model, hue: hues.get(namespace.id), pool: id }));
    const pool = pools?.find((each) => each.id === id) ?? null;
    return { id, pool, rows, scale: pool?.data_bytes ?? Math.max(1, ...rows.map((row) => row.limit_bytes)) };
  });
  const root = document.getElementById("pools");
  if (!shown.length) {
    root.replaceChildren(el("div", { class: "card empty" }, "No pool answers yet."));
    return;
  }
  root.querySelectorAll(".empty").forEach((node) => node.remove());
  keepInStep(root, shown, (each) => each.id, makePool, updatePool);
}

function makePool() {
  return el(
    "article",
    { class: "card pool" },
    el("div", { class: "pool-head" }, el("h3"), el("span", { class: "figures" })),
    el("div", { class: "arena", role: "img" }),
    el("div", { class: "namespaces" }),
  );
}

function updatePool(node, { id, pool, rows, scale }) {
  node.querySelector("h3").textContent = pool ? `${id.split("-")[0]} · ${pool.kind}` : id.split("-")[0];
  const held = rows.reduce((sum, row) => sum + row.used_bytes + row.cached_bytes, 0);
  const arena = node.querySelector(".arena");
  arena.hidden = !pool;
  if (pool) {
    node.querySelector(".figures").textContent =
      `${bytes(held)} of ${bytes(scale)} held · ${pool.num_unleased_extents} of ${pool.num_extents} extents free · ` +
      `${pool.leases.length} replicas` + (pool.num_restarts ? ` · came back ${pool.num_restarts} times` : "");
    arena.setAttribute("aria-label", `${bytes(held)} of ${bytes(scale)} held`);
    const parts = rows.flatMap((row) => [
      { key: `${row.id} used`, kind: "used", row, size: row.used_bytes },
      { key: `${row.id} cached`, kind: "cached", row, size: row.cached_bytes },
    ]);
    parts.push({ key: "free", kind: "free", row: null, size: Math.max(0, scale - held) });
    keepInStep(arena, parts, (part) => part.key, makePart, updatePart);
  }
  keepInStep(node.querySelector(".namespaces"), rows, (row) => row.id, makeNamespace, (each, row) => updateNamespace(each, row, scale));
}

function makePart({ kind, row }) {
  return el("div", { class: kind, style: row ? `--hue:${row.hue}` : "" });
}

function updatePart(node, { kind, row, size }) {
  node.style.flexGrow = size;
  node.title = row ? `${row.id}: ${bytes(size)} ${kind === "used" ? "in use" : "cached"}` : `${bytes(size)} free`;
}

function makeNamespace(row) {
  const fact = (name, title) => el("span", { class: name, title }, el("b"), name);
  return el(
    "div",
    { class: "namespace", style: `--hue:${row.hue}` },
    el("div", { class: "name" }, el("strong", { title: row.id }, row.id), el("span", {}, row.model)),
    el(
      "div",
      { class: "bar", role: "img" },
      ...["room", "held used", "cached", "borrowed", "guarantee", "limit"].map((name) => el("div", { class: name })),
    ),
    sparkline(),
    el(
      "div",
      { class: "facts" },
      fact("held", "in use and cached"),
      fact("guaranteed", "nobody can take it away"),
      fact("limit", "never more than this"),
      fact("hits", "share of prompt tokens found in the cache since the pool began"),
      fact("running", "sequences that hold memory, and those that wait for it"),
    ),
  );
}

function updateNamespace(node, row, scale) {
  const share = (size) => `${Math.min(100, (100 * size) / scale)}%`;
  const held = row.used_bytes + row.cached_bytes;
  const place = (name, left, width) => {
    const part = node.querySelector(`.bar .${name}`);
    part.style.left = left;
    if (width !== undefined) part.style.width = width;
  };
  place("room", "0", share(row.limit_bytes));
  place("used", "0", share(row.used_bytes));
  place("cached", share(row.used_bytes), share(row.cached_bytes));
  const borrowed = Math.max(0, held - row.guaranteed_bytes);
  place("borrowed", share(held - borrowed), share(borrowed));
  place("guarantee", share(row.guaranteed_bytes));
  place("limit", `min(${share(row.limit_bytes)}, 100% - 2px)`);
  node.querySelector(".bar .guarantee").hidden = !row.guaranteed_bytes;
  const text = `${bytes(row.used_bytes)} in use, ${bytes(row.cached_bytes)} cached, ${bytes(row.guaranteed_bytes)} guaranteed, limit ${bytes(row.limit_bytes)}`;
  node.querySelector(".bar").setAttribute("aria-label", text);
  node.querySelector(".bar").title = text;
  const fact = (name, value) => (node.querySelector(`.facts .${name} b`).textContent = value);
  fact("held", bytes(held));
  fact("guaranteed", bytes(row.guaranteed_bytes));
  fact("limit", bytes(row.limit_bytes));
  fact("hits", percent(row.lookup_tokens ? row.hit_tokens / row.lookup_tokens : null));
  fact("running", row.num_waiting ? `${count(row.num_running)} + ${count(row.num_waiting)}` : count(row.num_running));
  node.querySelector(".facts .running").classList.toggle("alert", row.num_waiting > 0);
  draw(node.querySelector(".spark"), remember(`${row.pool} ${row.id}`, held), Math.max(row.limit_bytes, 1));
}

function remember(key, held) {
  const now = Date.now() / 1000;
  const points = [...(history.get(key) ?? []), [now, held]].filter(([time]) => time > now - HISTORY_S);
  history.set(key, points);
  return points;
}

function sparkline() {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("class", "spark");
  svg.setAttribute("viewBox", "0 0 100 100");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  svg.append(document.createElementNS("http://www.w3.org/2000/svg", "path"));
  return svg;
}

/** What was held over the last minutes, against what was held most. */
function draw(svg, points, limit) {
  const top = Math.max(limit / 50, ...points.map(([, held]) => held)) * 1.1;
  const last = points[points.length - 1][0];
  const span = Math.max(LEAST_HISTORY_S, last - points[0][0]);
  const xy = points.map(([time, held]) => `${(100 - (100 * (last - time)) / span).toFixed(2)},${(100 - (100 * held) / top).toFixed(2)}`);
  const first = xy[0].split(",")[0];
  svg.firstElementChild.setAttribute("d", `M${first},102 L${xy.join(" L")} L100,102 Z`);
}
