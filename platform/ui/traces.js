// Requests, and the waterfall of one.

import { get } from "./api.js";
import { el, factsLine, keepInStep, openable, showDetail } from "./dom.js";
import { clock, count, milliseconds } from "./format.js";

/** Shows the list of `/v1/traces`; what silent nodes have is missing in it. */
export function showTraces(traces, silentNodes) {
  const note = document.getElementById("silent-nodes");
  note.hidden = !silentNodes.length;
  note.textContent = silentText(silentNodes);
  const body = document.querySelector("#traces tbody");
  body.querySelectorAll(".empty").forEach((cell) => cell.parentElement.remove());
  const longest = Math.max(1, ...traces.map((trace) => trace.duration_ms));
  keepInStep(body, traces, (trace) => `${trace.id} ${trace.namespace}`, makeRow, (row, trace) => updateRow(row, trace, longest));
  if (!traces.length) {
    body.append(el("tr", {}, el("td", { class: "empty", colSpan: 6 }, "No requests yet, or none that match.")));
  }
}

/** What the filter asks for, as parameters of `/v1/traces`. */
export function traceQuery() {
  const form = document.getElementById("trace-filter");
  return {
    namespace: form.elements.namespace.value,
    session: form.elements.session.value.trim(),
    min_ms: form.elements.min_ms.value,
    failed: form.elements.failed.checked,
    limit: 100,
  };
}

function makeRow(trace) {
  const bar = el("td", {}, el("div", { class: "duration" }, el("i"), el("span")));
  const row = el("tr", {}, ...["quiet", "", "", "number", "number"].map((name) => el("td", { class: name })), bar);
  return openable(row, () => openTrace(trace.id));
}

function updateRow(row, trace, longest) {
  const [when, name, namespace, prompt, output, duration] = row.children;
  row.classList.toggle("failed", trace.num_errors > 0);
  when.textContent = clock(trace.started);
  const tag = trace.error_type ?? (trace.complete ? null : "no end yet");
  name.replaceChildren(trace.name, ...(tag ? [el("span", { class: trace.error_type ? "tag bad" : "tag" }, tag)] : []));
  name.title = trace.error ?? trace.id;
  namespace.textContent = trace.namespace;
  prompt.textContent = count(trace.input_tokens);
  if (trace.cached_tokens) prompt.append(el("span", { class: "quiet" }, ` (${count(trace.cached_tokens)})`));
  output.textContent = count(trace.output_tokens);
  duration.querySelector("i").style.width = `${(60 * trace.duration_ms) / longest}%`;
  duration.querySelector("span").textContent = milliseconds(trace.duration_ms);
}

/** Opens the waterfall of a trace. */
export async function openTrace(id) {
  const trace = await get(`/v1/traces/${id}`);
  const processes = [...new Set(trace.spans.map((span) => span.process))];
  const total = Math.max(trace.duration_ms, 0.001);
  const [root] = trace.spans;
  const marks = [0, 0.25, 0.5, 0.75, 1].map((share) => el("span", {}, milliseconds(share * total)));
  showDetail(
    root.name,
    factsLine([
      ["trace", trace.id],
      ["began", `${new Date(trace.started * 1000).toISOString().slice(0, 10)} ${clock(trace.started)}`],
      ["took", milliseconds(trace.duration_ms)],
      ["namespace", root.attributes["remora.namespace"]],
      ["session", root.attributes["remora.session.id"]],
      ["prompt", tokens(root.attributes["gen_ai.usage.input_tokens"])],
      ["cached", tokens(root.attributes["gen_ai.usage.cache_read.input_tokens"])],
      ["output", tokens(root.attributes["gen_ai.usage.output_tokens"])],
    ]),
    ...(trace.silent_nodes.length ? [el("p", { class: "bad" }, silentText(trace.silent_nodes))] : []),
    el("div", { class: "axis" }, el("span", {}, "span"), el("div", {}, ...marks), el("span")),
    el("div", { class: "waterfall" }, ...inTree(trace.spans).map(([span, depth]) => spanRow(span, depth, total, processes))),
  );
}

function silentText(nodes) {
  return nodes.length ? `Spans of ${nodes.length} nodes that do not answer are missing: ${nodes.map((id) => id.slice(0, 8)).join(", ")}` : "";
}

function tokens(number) {
  return number === undefined ? null : `${count(number)} tokens`;
}

/** Spans with their depth, children behind their parents; parents that are not in the trace are the caller's. */
function inTree(spans) {
  const known = new Set(spans.map((span) => span.id));
  const below = Map.groupBy(spans, (span) => (known.has(span.parent) ? span.parent : null));
  const found = [];
  const add = (span, depth) => {
    found.push([span, depth]);
    for (const child of below.get(span.id) ?? []) add(child, depth + 1);
  };
  for (const root of below.get(null) ?? []) add(root, 0);
  return found;
}

function spanRow(span, depth, total, processes) {
  const left = (100 * span.start_ms) / total;
  const width = (100 * span.duration_ms) / total;
  const hue = `var(--hue-${processes.indexOf(span.process) % 8})`;
  const facts = [
    ...(span.error_type ? [[span.error_type, span.error]] : []),
    ["process", `${span.process} (${span.pid})`],
    ["starts", `${span.start_ms.toFixed(1)} ms`],
    ...Object.entries(span.attributes),
  ];
  return el(
    "details",
    { class: span.error_type ? "span failed" : "span", style: `--hue:${hue}` },
    el(
      "summary",
      {},
      el("span", { class: "what", style: `padding-left:${16 * depth}px` }, span.name, el("small", {}, span.process.replace(/^remora\./, ""))),
      el("div", { class: "lane" }, el("i", { style: `left:min(${left}%, 100% - 2px);width:${width}%` })),
      el("span", { class: "number" }, milliseconds(span.duration_ms)),
    ),
    el(
      "dl",
      { class: "attributes" },
      ...facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, typeof value === "object" ? JSON.stringify(value) : String(value))]),
    ),
  );
}
