/* The dashboard: the list of runs, the selection (kept in the address), and live updates. */
"use strict";
(() => {
  const { el, shown } = Holdfast;
  const COLUMNS = [
    ["run", "name"],
    ["state", "state"],
    ["method", "method"],
    ["data", "data"],
    ["rounds", "rounds"],
    ["accuracy", "accuracy"],
    ["changed", "modified"],
  ];
  const FULL_EVERY = 10000, // milliseconds between redrawing the figures that are not live
    AGAIN_AFTER = 5000, // before a server is asked again that a browser has given up on
    TICK = 15000; // between telling anew how long ago a run changed
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
    asking = null,
    waiting = 0,
    retrying = 0;

  function ago(seconds) {
    const passed = Math.max(0, Date.now() / 1000 - seconds);
    const [size, unit] =
      passed < 90 ? [1, "s"] : passed < 5400 ? [60, "min"] : passed < 129600 ? [3600, "h"] : [86400, "d"];
    return `${Math.round(passed / size)} ${unit} ago`;
  }

  function head() {
    table.tHead.rows[0].replaceChildren(
      el("th", { scope: "col" }, el("span", { class: "unseen" }, "show")),
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
          head();
          list();
          [...table.tHead.querySelectorAll("button")][COLUMNS.findIndex(c => c[1] === key)].focus();
        });
        return el("th", { scope: "col", "aria-sort": sorted }, button);
      }),
    );
  }

  function list() {
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
          select();
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
          el("td", {}, shown(run.accuracy, true)),
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

  async function full() {
    const asked = query();
    lastFull = Date.now();
    asking = asked;
    let model;
    try {
      model = await (await fetch(`/api/figures?${asked}`)).json();
    } catch {
      return; // nobody answers: the first event of a server that is back asks again
    } finally {
      if (asking === asked) asking = null;
    }
    if (asked !== query()) return;
    if (model.error) {
      problems([["selection", model.error]]);
      return;
    }
    show(model, false);
  }

  function select() {
    history.replaceState(null, "", chosen.size ? `#${query()}` : location.pathname);
    list();
    clearTimeout(waiting);
    problems([]);
    clear(chosen.size ? "Reading…" : "Choose one or more runs above to see and compare them.");
    if (chosen.size) full();
    follow();
  }

  function follow() {
    clearTimeout(retrying);
    if (source) source.close();
    source = new EventSource(`/api/events?${query()}`);
    source.addEventListener("open", () => {
      find("live").textContent = "Live.";
    });
    source.addEventListener("error", () => {
      find("live").textContent = "Connection lost, trying again…";
      // A browser tries again by itself, but not after an answer it cannot use.
      if (source.readyState === EventSource.CLOSED) retrying = setTimeout(follow, AGAIN_AFTER);
    });
    source.addEventListener("runs", event => {
      runs = JSON.parse(event.data);
      list();
    });
    source.addEventListener("figures", event => {
      if (asking === query()) return; // all figures are on their way
      if (!view) return full(); // a run's first round
      show(JSON.parse(event.data), true);
      clearTimeout(waiting);
      waiting = setTimeout(full, Math.max(0, FULL_EVERY - (Date.now() - lastFull)));
    });
  }

  Holdfast.themeButton(find("theme"));
  search.addEventListener("input", list);
  find("clear").addEventListener("click", () => {
    chosen = new Set();
    select();
  });
  addEventListener("hashchange", () => {
    chosen = new Set(new URLSearchParams(location.hash.slice(1)).getAll("run"));
    select();
  });
  setInterval(list, TICK);
  head();
  fetch("/api/runs")
    .then(answer => answer.json())
    .then(found => {
      runs = found;
      select();
    });
})();
