/* The dashboard: the table of runs, the selection (kept in the address), and live updates. */
"use strict";
(() => {
  const { el, formatNumber } = Holdfast;
  const COLUMNS = [
    ["run", "name"],
    ["state", "state"],
    ["method", "method"],
    ["data", "data"],
    ["rounds", "rounds"],
    ["accuracy", "accuracy"],
    ["changed", "modified"],
  ];
  const FULL_REDRAW_MS = 10000, // between redraws of the figures that are not live
    RETRY_MS = 5000, // before a new event stream where the browser does not reconnect
    AGE_UPDATE_MS = 15000; // between updates of how long ago runs changed
  const find = id => document.getElementById(id);
  const table = document.querySelector("table.runs"),
    page = find("page"),
    search = find("search");
  const sort = { by: "modified", down: true };
  let runs = [],
    chosen = new Set(new URLSearchParams(location.hash.slice(1)).getAll("run"));
  let view = null,
    source = null,
    lastFull = 0,
    loading = null,
    redrawTimer = 0,
    retryTimer = 0;

  function ago(seconds) {
    const passed = Math.max(0, Date.now() / 1000 - seconds);
    const [size, unit] =
      passed < 90 ? [1, "s"] : passed < 5400 ? [60, "min"] : passed < 129600 ? [3600, "h"] : [86400, "d"];
    return `${Math.round(passed / size)} ${unit} ago`;
  }

  function showHead() {
    table.tHead.rows[0].replaceChildren(
      el("th", { scope: "col" }, el("span", { class: "visually-hidden" }, "show")),
      ...COLUMNS.map(([title, key]) => {
        const sorted = sort.by === key ? (sort.down ? "descending" : "ascending") : null;
        const button = el(
          "button",
          { type: "button" },
          title,
          el("span", { "aria-hidden": "true" }, sorted ? (sort.down ? " ↓" : " ↑") : ""),
        );
        button.addEventListener("click", () => {
          sort.down = sort.by === key ? !sort.down : ["rounds", "accuracy", "modified"].includes(key);
          sort.by = key;
          showHead();
          showList();
          [...table.tHead.querySelectorAll("button")][COLUMNS.findIndex(c => c[1] === key)].focus();
        });
        return el("th", { scope: "col", "aria-sort": sorted }, button);
      }),
    );
  }

  function showList() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const kept = runs.filter(run => {
      const text = `${run.name} ${run.method} ${run.data} ${run.state}`.toLowerCase();
      return words.every(word => text.includes(word));
    });
    kept.sort((a, b) => {
      const [x, y] = [a[sort.by], b[sort.by]];
      if (x === null || y === null) return (x === null) - (y === null);
      return (x < y ? -1 : x > y ? 1 : 0) * (sort.down ? -1 : 1);
    });
    const focused = document.activeElement && document.activeElement.dataset.run;
    table.tBodies[0].replaceChildren(
      ...kept.map(run => {
        const box = el("input", { type: "checkbox", "data-run": run.name, "aria-label": `Show ${run.name}` });
        box.checked = chosen.has(run.name);
        box.disabled = run.state === "corrupt";
        box.addEventListener("change", () => {
          if (box.checked) chosen.add(run.name);
          else chosen.delete(run.name);
          applySelection();
        });
        const row = el(
          "tr",
          { class: run.state },
          el("td", {}, box),
          el("td", {}, run.name),
          el(
            "td",
            { title: run.problem },
            el("span", { class: `state ${run.state}` }, run.state),
            run.problem ? ` ${run.problem}` : "",
          ),
          el("td", {}, run.method ?? "–"),
          el("td", {}, run.data ?? "–"),
          el("td", {}, String(run.rounds)),
          el(
            "td",
            {},
            run.metric !== "accuracy" && run.accuracy !== null ? `${run.metric} ` : "",
            formatNumber(run.accuracy, run.percent),
          ),
          el("td", {}, ago(run.modified)),
        );
        row.addEventListener("click", event => {
          if (event.target !== box && !box.disabled) box.click();
        });
        return row;
      }),
    );
    if (focused) {
      const again = [...table.querySelectorAll("input")].find(input => input.dataset.run === focused);
      if (again) again.focus();
    }
    find("count").textContent =
      kept.length === runs.length ? `${runs.length} runs` : `${kept.length} of ${runs.length} runs`;
  }

  const query = () => new URLSearchParams([...chosen].map(name => ["run", name])).toString();

  function problems(found) {
    find("problems").replaceChildren(
      ...found.map(([name, problem]) => el("p", { class: "problem", role: "alert" }, `${name}: ${problem}`)),
    );
  }

  function clear(sentence) {
    if (view) view.close();
    view = null;
    page.replaceChildren(el("p", { class: "reading" }, sentence));
  }

  function show(model, partial) {
    problems(model.problems || []);
    if (!model.figures) {
      clear("Nothing to draw yet.");
      return;
    }
    if (!view) view = Holdfast.render(page, model);
    else if (partial) view.patch(model);
    else view.update(model);
  }

  async function loadAll() {
    const requested = query();
    lastFull = Date.now();
    loading = requested;
    let model;
    try {
      model = await (await fetch(`/api/figures?${requested}`)).json();
    } catch {
      return; // the server is down: the first event after its return loads the figures
    } finally {
      if (loading === requested) loading = null;
    }
    if (requested !== query()) return;
    if (model.error) {
      problems([["selection", model.error]]);
      return;
    }
    show(model, false);
  }

  function applySelection() {
    history.replaceState(null, "", chosen.size ? `#${query()}` : location.pathname);
    showList();
    clearTimeout(redrawTimer);
    problems([]);
    clear(chosen.size ? "Reading…" : "Choose one or more runs above to see and compare them.");
    if (chosen.size) loadAll();
    follow();
  }

  function follow() {
    clearTimeout(retryTimer);
    if (source) source.close();
    source = new EventSource(`/api/events?${query()}`);
    source.addEventListener("open", () => {
      find("live").textContent = "Live.";
    });
    source.addEventListener("error", () => {
      find("live").textContent = "Connection lost, trying again…";
      // Browsers reconnect by themselves, except after an invalid response.
      if (source.readyState === EventSource.CLOSED) retryTimer = setTimeout(follow, RETRY_MS);
    });
    source.addEventListener("runs", event => {
      runs = JSON.parse(event.data);
      showList();
    });
    source.addEventListener("figures", event => {
      if (loading === query()) return; // all figures are on their way
      if (!view) return loadAll(); // a run's first round
      show(JSON.parse(event.data), true);
      clearTimeout(redrawTimer);
      redrawTimer = setTimeout(loadAll, Math.max(0, FULL_REDRAW_MS - (Date.now() - lastFull)));
    });
  }

  Holdfast.themeButton(find("theme"));
  search.addEventListener("input", showList);
  find("clear").addEventListener("click", () => {
    chosen = new Set();
    applySelection();
  });
  addEventListener("hashchange", () => {
    chosen = new Set(new URLSearchParams(location.hash.slice(1)).getAll("run"));
    applySelection();
  });
  setInterval(showList, AGE_UPDATE_MS);
  showHead();
  fetch("/api/runs")
    .then(answer => answer.json())
    .then(found => {
      runs = found;
      applySelection();
    });
})();
