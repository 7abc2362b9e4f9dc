/* The page: leaderboard, figures, tables, and the theme. A page model comes from holdfast.report.page. */
"use strict";
{
  const { el, formatNumber, isDark, colourOf, tooltip, announcer, setPalette, FigureView } = Holdfast;

  function leaderboard(board, state) {
    const keys = ["method", "seeds", ...board.columns.map(c => c.name)];
    const value = (row, k) => (k === 0 ? row.label : k === 1 ? row.seeds : row.cells[k - 2].value);
    const order = board.rows.map((row, i) => ({ row, i }));
    if (state.sort !== undefined) {
      order.sort((a, b) => {
        const [x, y] = [value(a.row, state.sort), value(b.row, state.sort)];
        if (x === null || y === null) return (x === null) - (y === null);
        return (x < y ? -1 : x > y ? 1 : 0) * (state.down ? -1 : 1);
      });
    }
    const head = keys.map((name, k) => {
      const sorted = state.sort === k ? (state.down ? "descending" : "ascending") : null;
      const button = el(
        "button",
        { type: "button", title: k > 1 ? board.columns[k - 2].help : null },
        name,
        el("span", { "aria-hidden": "true" }, sorted ? (state.down ? " ↓" : " ↑") : ""),
      );
      button.addEventListener("click", () => {
        state.down = state.sort === k ? !state.down : k > 1 && board.columns[k - 2].better === "high";
        state.sort = k;
        state.redraw();
        state.host.querySelectorAll("thead button")[k].focus();
      });
      return el("th", { scope: "col", "aria-sort": sorted }, button);
    });
    const rows = order.map(({ row, i }) => {
      const swatch = el("i", { class: "swatch" });
      swatch.style.background = colourOf(row.colour);
      const cells = row.cells.map((cell, c) =>
        el("td", { class: board.best[c].includes(i) ? "best" : null }, cell.text),
      );
      return el(
        "tr",
        {},
        el("th", { scope: "row" }, swatch, row.label),
        el("td", {}, String(row.seeds)),
        ...cells,
      );
    });
    return [
      el("h2", {}, "Leaderboard"),
      el(
        "p",
        { class: "reading" },
        "One row per method, the best of each column in bold; click a column's head to sort by it. ",
        board.note,
      ),
      el(
        "div",
        { class: "scroll", tabindex: "0", role: "region", "aria-label": "Leaderboard" },
        el("table", { class: "board" }, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...rows)),
      ),
    ];
  }

  function listed(title, reading, head, rows) {
    if (!rows.length) return "";
    return el(
      "section",
      {},
      el("h2", {}, title),
      el("p", { class: "reading" }, reading),
      el(
        "div",
        { class: "scroll", tabindex: "0", role: "region", "aria-label": title },
        el(
          "table",
          {},
          el("thead", {}, el("tr", {}, ...head.map(name => el("th", { scope: "col" }, name)))),
          el("tbody", {}, ...rows.map(row => el("tr", {}, ...row.map(cell => el("td", {}, cell))))),
        ),
      ),
    );
  }

  /* Scrolls to a section without changing the address, in which the dashboard keeps its selection. */
  function link(id, text) {
    return el(
      "a",
      {
        href: `#${id}`,
        onclick: event => {
          event.preventDefault();
          const section = document.getElementById(id);
          section.scrollIntoView();
          section.focus({ preventScroll: true });
        },
      },
      text,
    );
  }

  function render(container, model) {
    setPalette(model.palette);
    const views = new Map();
    const board = el("section", { class: "figure", id: "leaderboard", tabindex: "-1" });
    const state = {
      host: board,
      redraw: () => board.replaceChildren(...leaderboard(model.leaderboard, state)),
    };
    const figures = el("div", { class: "figures" }),
      tail = el("div", {}),
      contents = el("nav", { class: "contents", "aria-label": "Figures" });
    container.replaceChildren(contents, board, figures, tail, tooltip, announcer);

    function fill(next, partial) {
      model = partial
        ? {
            ...model,
            ...next,
            figures: model.figures.map(old => next.figures.find(f => f.name === old.name) || old),
          }
        : next;
      setPalette(model.palette);
      state.redraw();
      const wanted = new Set(model.figures.map(f => f.name));
      for (const [name, view] of views)
        if (!wanted.has(name)) {
          view.close();
          view.section.remove();
          views.delete(name);
        }
      for (const figure of partial ? next.figures : model.figures) {
        if (!wanted.has(figure.name)) continue;
        if (views.has(figure.name)) views.get(figure.name).update(figure);
        else {
          const view = new FigureView(figure);
          views.set(figure.name, view);
          figures.append(view.section);
          view.draw();
        }
      }
      if (partial) return;
      contents.replaceChildren(
        link("leaderboard", "Leaderboard"),
        ...model.figures.map(f => link(`figure-${f.name}`, f.title)),
      );
      tail.replaceChildren(
        listed(
          "Incidents",
          `Clients without a usable update: ${model.incidents.counts}.`,
          ["run", "round", "client", "kind", "detail"],
          model.incidents.rows,
        ),
        listed(
          "Runs",
          `The settings of the runs; all of them are in each run's experiment.yaml. ${model.runs.common}`,
          model.runs.head,
          model.runs.rows,
        ),
        listed(
          "Not shown",
          "Figures that need values which these runs did not record.",
          ["figure", "why"],
          model.missing,
        ),
      );
    }

    const redraw = () => {
      setPalette(model.palette);
      state.redraw();
      for (const view of views.values()) {
        for (const { view: panel } of view.views) panel.draw();
        view.updateTexts();
      }
    };
    fill(model, false);
    let waiting = 0;
    const observer = new ResizeObserver(() => {
      cancelAnimationFrame(waiting);
      waiting = requestAnimationFrame(() => {
        for (const view of views.values()) view.resize();
      });
    });
    observer.observe(container);
    const listening = new AbortController(),
      { signal } = listening;
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw, { signal });
    document.addEventListener("holdfast-theme", redraw, { signal });
    /* For print everything is redrawn in the light theme and in the width of the paper. */
    const root = document.documentElement;
    let theme;
    addEventListener(
      "beforeprint",
      () => {
        theme = root.dataset.theme;
        root.dataset.theme = "light";
        root.classList.add("paper");
        redraw();
      },
      { signal },
    );
    addEventListener(
      "afterprint",
      () => {
        if (theme === undefined) delete root.dataset.theme;
        else root.dataset.theme = theme;
        root.classList.remove("paper");
        redraw();
      },
      { signal },
    );
    const close = () => {
      listening.abort();
      observer.disconnect();
      for (const view of views.values()) view.close();
    };
    return { update: next => fill(next, false), patch: next => fill(next, true), close, views };
  }

  function themeButton(button) {
    const kept = (() => {
      try {
        return localStorage.getItem("holdfast-theme");
      } catch {
        return null;
      }
    })();
    const set = theme => {
      document.documentElement.dataset.theme = theme;
      button.textContent = theme === "dark" ? "Light" : "Dark";
      button.setAttribute("aria-label", `Switch to the ${theme === "dark" ? "light" : "dark"} theme`);
      try {
        localStorage.setItem("holdfast-theme", theme);
      } catch {
        /* a page from disk may have no storage */
      }
      document.dispatchEvent(new Event("holdfast-theme"));
    };
    button.textContent = (kept || (isDark() ? "dark" : "light")) === "dark" ? "Light" : "Dark";
    if (kept) set(kept);
    button.addEventListener("click", () => set(isDark() ? "light" : "dark"));
  }

  Object.assign(Holdfast, { render, themeButton });
}
