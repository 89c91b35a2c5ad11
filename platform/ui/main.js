// Keeps the page up to date: memory once a second, the rest every other second, nothing while nobody looks.

import { ApiError, get, setKey } from "./api.js";
import { el, keepInStep } from "./dom.js";
import { showMemory } from "./memory.js";
import { showSessions } from "./sessions.js";
import { showTraces, traceQuery } from "./traces.js";

const EVERY_MS = 1000;
const connection = document.getElementById("connection");
const keyForm = document.getElementById("key-form");
let round = 0;
let seesPools = true;
let timer = 0;

/** Tenants may not ask for pools. */
async function pools() {
  if (!seesPools) return null;
  try {
    return (await get("/v1/pools")).data;
  } catch (error) {
    if (!(error instanceof ApiError) || error.status !== 403) throw error;
    seesPools = false;
    return null;
  }
}

async function refresh() {
  const [found, namespaces] = await Promise.all([pools(), get("/v1/namespaces")]);
  showMemory(found, namespaces.data);
  showNamespaceChoice(namespaces.data.map((namespace) => namespace.id));
  if (round % 2 === 0) {
    const [models, sessions, traces] = await Promise.all([
      get("/v1/models"),
      get("/v1/sessions", { limit: 200 }),
      get("/v1/traces", traceQuery()),
    ]);
    showModels(models.data);
    showSessions(sessions.data);
    showTraces(traces.data, traces.silent_nodes);
  }
  round += 1;
}

function showModels(models) {
  const make = (model) => el("li", {}, model.id);
  const update = (node, model) => {
    node.className = model.ready ? "ready" : "";
    node.title = model.ready ? "a replica is connected" : "no replica is connected";
  };
  keepInStep(document.getElementById("models"), models, (model) => model.id, make, update);
}

function showNamespaceChoice(ids) {
  const select = document.getElementById("trace-filter").elements.namespace;
  const shown = [...select.options].slice(1).map((option) => option.value);
  if (shown.join("\n") !== ids.join("\n")) {
    const chosen = select.value;
    select.replaceChildren(select.options[0], ...ids.map((id) => el("option", { value: id }, id)));
    select.value = ids.includes(chosen) ? chosen : "";
  }
}

async function tick() {
  clearTimeout(timer);
  try {
    if (!document.hidden) {
      await refresh();
      showConnection("live", true);
      showPage(true);
    }
  } catch (error) {
    if (!(error instanceof ApiError)) console.error(error);
    showConnection(error.status ? error.message : "the platform does not answer", false);
    if (error.status === 401) {
      document.getElementById("key-message").textContent = sessionStorage.length ? error.message : "";
      showPage(false);
      return;
    }
  }
  timer = setTimeout(tick, EVERY_MS);
}

function showConnection(text, live) {
  connection.textContent = text;
  connection.classList.toggle("live", live);
}

function showPage(shown) {
  document.getElementById("page").hidden = !shown;
  keyForm.hidden = shown;
}

function restart() {
  round = 0;
  seesPools = true;
  tick();
}

keyForm.addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(document.getElementById("key").value.trim());
  restart();
});
document.getElementById("trace-filter").addEventListener("input", () => {
  round = 0;
  tick();
});
document.getElementById("trace-filter").addEventListener("submit", (event) => event.preventDefault());
document.addEventListener("visibilitychange", () => !document.hidden && tick());
restart();
