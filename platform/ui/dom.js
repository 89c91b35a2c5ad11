// Making elements, and keeping lists of them in step with data.

/** An element. `props`: properties, or attributes where the name has a dash, "role" or "class"; children: nodes or text. */
export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name === "class") node.className = value;
    else if (name === "style") node.style.cssText = value;
    else if (name.includes("-") || name === "role" || name === "tabindex") node.setAttribute(name, value);
    else node[name] = value;
  }
  node.append(...children);
  return node;
}

/**
 * Makes the children of `parent` one a datum, in order. Nodes with the same key are kept, so that they can change
 * smoothly and keep the focus. `make(datum)` returns a node, `update(node, datum)` shows the datum in it.
 */
export function keepInStep(parent, data, keyOf, make, update = () => {}) {
  const known = new Map([...parent.children].map((node) => [node.dataset.key, node]));
  let before = parent.firstElementChild;
  for (const datum of data) {
    const key = keyOf(datum);
    let node = known.get(key);
    known.delete(key);
    if (!node) {
      node = make(datum);
      node.dataset.key = key;
    }
    update(node, datum);
    if (node === before) before = before.nextElementSibling;
    else parent.insertBefore(node, before);
  }
  for (const node of known.values()) node.remove();
}

/** Lets a row be opened by mouse and by keyboard; `open` may fail, which is shown. */
export function openable(node, open) {
  const tryOpen = () => open().catch((error) => showDetail("This cannot be shown", el("p", { class: "bad" }, error.message)));
  node.setAttribute("tabindex", "0");
  node.addEventListener("click", tryOpen);
  node.addEventListener("keydown", (event) => {
    // A button clicks by itself.
    if (event.key === "Enter" && node.tagName !== "BUTTON") tryOpen();
  });
  return node;
}

/** Shows a title and nodes in the one dialog of the page. */
export function showDetail(title, ...nodes) {
  document.getElementById("detail-title").textContent = title;
  document.getElementById("detail-body").replaceChildren(...nodes);
  const dialog = document.getElementById("detail");
  if (!dialog.open) dialog.showModal();
}

/** Pairs of a name and a value on one line. */
export function factsLine(facts) {
  const shown = facts.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return el("div", { class: "facts-line" }, ...shown.map(([name, value]) => el("div", {}, el("span", {}, `${name} `), String(value))));
}
