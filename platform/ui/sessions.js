// Sessions: whose they are, how long, and what was said.

import { get } from "./api.js";
import { el, factsLine, keepInStep, openable, showDetail } from "./dom.js";
import { ago, clock, count, milliseconds } from "./format.js";
import { openTrace } from "./traces.js";

/** Shows a page of `/v1/sessions`, the last used first. */
export function showSessions(sessions) {
  const body = document.querySelector("#sessions tbody");
  body.querySelectorAll(".empty").forEach((cell) => cell.parentElement.remove());
  const sorted = [...sessions].sort((one, other) => other.last_used - one.last_used || one.id.localeCompare(other.id));
  keepInStep(body, sorted, (session) => session.id, makeRow, updateRow);
  if (!sessions.length) {
    body.append(el("tr", {}, el("td", { class: "empty", colSpan: 6 }, "No sessions. POST /v1/sessions makes one.")));
  }
}

function makeRow(session) {
  const row = el("tr", {}, ...["", "", "mono quiet", "number", "number", "quiet"].map((name) => el("td", { class: name })));
  return openable(row, () => openSession(session.id));
}

function updateRow(row, session) {
  const [id, namespace, owner, turns, tokens, used] = row.children;
  const tags = [session.busy && "writing", session.pinned && "pinned", session.parent && "fork"].filter(Boolean);
  id.replaceChildren(session.id, ...tags.map((tag) => el("span", { class: "tag" }, tag)));
  id.title = session.id;
  namespace.textContent = session.namespace;
  owner.textContent = session.owner ?? "–";
  owner.title = session.owner ? `epoch ${session.epoch}` : "no turn yet";
  turns.textContent = count(session.num_turns);
  tokens.textContent = count(session.num_tokens);
  used.textContent = ago(session.last_used);
}

async function openSession(id) {
  const session = await get(`/v1/sessions/${encodeURIComponent(id)}`);
  const traces = (await get("/v1/traces", { session: id, limit: 500 })).data;
  showDetail(
    id,
    factsLine([
      ["model", session.model],
      ["namespace", session.namespace],
      ["parent", session.parent],
      ["owner", session.owner ?? "–"],
      ["epoch", session.epoch],
      ["tokens", count(session.num_tokens)],
      ["in memory", blocksText(session.blocks)],
      ["used", ago(session.last_used)],
      ["lives", session.ttl_s ? `${session.ttl_s} s without use` : "until it is deleted"],
    ]),
    ...section("Its moves", "moves", movesOf(id, traces).map((move) => el("li", {}, move))),
    ...session.turns.map(turn),
    ...section("Its requests", "requests", traces.map(request)),
  );
}

function section(title, name, lines) {
  return lines.length ? [el("h3", {}, title), el("ul", { class: name }, ...lines)] : [];
}

/** Every change of the replica in its requests, the last first: between two of them, or while one ran; and its forks. */
function movesOf(id, traces) {
  const moves = [];
  let before = null;
  for (const trace of [...traces].reverse()) {
    if (trace.name.startsWith("fork ") && trace.session === id) {
      const branches = Object.entries(trace.session_replicas).filter(([name]) => name !== id);
      const places = branches.map(([name, replicas]) => (replicas.length ? `${name} at ${replicas.at(-1)}` : name));
      moves.unshift(`${clock(trace.started)}  forked${places.length ? `: ${places.join(", ")}` : ", no branch is kept"}`);
      continue;
    }
    (trace.session_replicas[id] ?? []).forEach((replica, attempt) => {
      if (before && replica !== before) moves.unshift(`${clock(trace.started)}  ${before} → ${replica}${attempt ? ", while a request ran" : ""}`);
      before = replica;
    });
  }
  return moves;
}

/** How many of the full blocks of its log each pool has; null before anybody knows. */
function blocksText(blocks) {
  if (!blocks) return null;
  const found = Object.entries(blocks.device).map(([pool, number]) => `${count(number)} in ${pool.split("-")[0]}`);
  return `${found.join(", ") || "none"} of ${count(blocks.full)} blocks`;
}

/** A line that opens the waterfall. */
function request(trace) {
  const text = `${clock(trace.started)}  ${trace.name}, ${milliseconds(trace.duration_ms)}, ${count(trace.output_tokens)} tokens`;
  const failed = trace.error_type ? ` (${trace.error_type})` : "";
  return el("li", {}, openable(el("button", { type: "button" }, text, failed), () => openTrace(trace.id)));
}

function turn(each) {
  const said = [...each.messages, { role: "assistant", content: each.answer }];
  const lines = said.flatMap(({ role, content }) => [
    el("b", {}, role),
    el("p", {}, typeof content === "string" ? content : JSON.stringify(content)),
  ]);
  return el("div", { class: "turn", title: `tokens ${each.start} to ${each.end}` }, ...lines);
}
