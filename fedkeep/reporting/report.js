// What a reader can do with the report: hide methods, smooth lines, point at values, sort tables. The page is whole
// without it. Values are read back from the paths and pixels that are drawn; nothing is loaded and nothing is stored.
"use strict";
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const make = (tag, parent, properties = {}) => parent.appendChild(Object.assign(document.createElement(tag), properties));
  const tip = make("div", document.body, { className: "tip", hidden: true });
  tip.setAttribute("role", "status");

  function show(event, lines) {
    tip.replaceChildren();
    for (const [text, colour] of lines) {
      const line = make("div", tip, { textContent: text });
      if (colour) line.style.setProperty("--c", colour);
    }
    tip.hidden = !lines.length;
    const box = tip.getBoundingClientRect(), gap = 14;
    const left = event.clientX + gap + box.width > innerWidth ? event.clientX - gap - box.width : event.clientX + gap;
    tip.style.left = Math.max(4, left) + "px";
    tip.style.top = Math.max(4, Math.min(event.clientY + gap, innerHeight - box.height - 4)) + "px";
  }

  // Lines: [x, y] from 0 to 1000, y downwards.
  const points = (path) => (path.match(/-?[\d.]+ -?[\d.]+/g) || []).map((pair) => pair.split(" ").map(Number));
  const charts = all(".chart").map((figure) => {
    const { x0, x1, y0, y1 } = Object.fromEntries(Object.entries(figure.dataset).map(([key, value]) => [key, Number(value)]));
    const lines = all("g[data-m]", figure).map((group) => {
      const path = group.querySelector(".line");
      return { group, path, drawn: points(path.getAttribute("d")), raw: points(path.dataset.raw || path.getAttribute("d")) };
    });
    const rule = make("i", figure.querySelector(".plot"), { className: "rule", hidden: true });
    return { figure, lines, rule, round: (x) => x0 + (x / 1000) * (x1 - x0), value: (y) => y0 + (1 - y / 1000) * (y1 - y0) };
  });

  for (const chart of charts) {
    const plot = chart.figure.querySelector(".plot");
    const leave = () => { chart.rule.hidden = true; show({ clientX: 0, clientY: 0 }, []); };
    plot.addEventListener("pointerleave", leave);
    plot.addEventListener("pointermove", (event) => {
      const box = plot.getBoundingClientRect();
      const at = (1000 * (event.clientX - box.left)) / box.width;
      const lines = chart.lines.filter((line) => !line.group.classList.contains("off") && line.drawn.length);
      if (!lines.length) return leave();
      const nearest = (line) => line.drawn.reduce((a, b) => (Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a));
      const x = lines.map((line) => nearest(line)[0]).reduce((a, b) => (Math.abs(b - at) < Math.abs(a - at) ? b : a));
      const here = lines.map((line) => [line, nearest(line)]).filter(([, point]) => Math.abs(point[0] - x) < 1);
      here.sort((a, b) => a[1][1] - b[1][1]);
      chart.rule.hidden = false;
      chart.rule.style.left = x / 10 + "%";
      const values = here.map(([line, point]) => [
        `${chart.value(point[1]).toFixed(Math.abs(chart.value(point[1])) < 10 ? 2 : 1)}  ${line.group.dataset.name}`,
        line.group.style.getPropertyValue("--c"),
      ]);
      show(event, [[`round ${Math.round(chart.round(x))}`, ""], ...values]);
    });
  }

  // The legend becomes buttons that hide methods, and gets a slider for the running mean.
  const legend = document.querySelector(".legend");
  if (legend) {
    for (const item of all("li", legend)) {
      const button = document.createElement("button");
      button.type = "button";
      button.setAttribute("aria-pressed", "true");
      button.append(...item.childNodes);
      item.append(button);
      button.addEventListener("click", () => {
        const on = button.getAttribute("aria-pressed") !== "true";
        button.setAttribute("aria-pressed", String(on));
        for (const group of all(`.chart [data-m="${item.dataset.m}"]`)) group.classList.toggle("off", !on);
      });
    }
    const longest = Math.max(1, ...charts.flatMap((chart) => chart.lines.map((line) => line.raw.length)));
    if (longest > 3) {
      const row = make("li", legend, { className: "smooth" });
      const label = make("label", row, { textContent: "running mean of " });
      const slider = make("input", label, { type: "range", min: 1, max: Math.max(2, Math.min(50, Math.ceil(longest / 3))), value: legend.dataset.window });
      const count = make("output", label, { textContent: legend.dataset.window });
      slider.addEventListener("input", () => {
        const width = Number(slider.value);
        count.textContent = slider.value;
        for (const chart of charts) {
          for (const line of chart.lines) {
            line.drawn = line.raw.map(([x], i) => {
              const part = line.raw.slice(Math.max(0, i + 1 - width), i + 1);
              return [x, part.reduce((sum, point) => sum + point[1], 0) / part.length];
            });
            line.path.setAttribute("d", "M" + line.drawn.map(([x, y]) => `${x} ${y.toFixed(1)}`).join("L"));
          }
          chart.figure.classList.toggle("bare", width !== Number(legend.dataset.window)); // bands are not smoothed anew
        }
      });
    }
  }

  // Maps: the opacity of a pixel is its value.
  for (const figure of all(".map")) {
    const image = figure.querySelector("img"), what = JSON.parse(figure.dataset.what);
    const rows = JSON.parse(figure.dataset.rows), columns = JSON.parse(figure.dataset.columns);
    let pixels = null;
    image.addEventListener("pointerleave", () => show({ clientX: 0, clientY: 0 }, []));
    image.addEventListener("pointermove", (event) => {
      if (!pixels) {
        const canvas = Object.assign(document.createElement("canvas"), { width: image.naturalWidth, height: image.naturalHeight });
        const context = canvas.getContext("2d");
        context.drawImage(image, 0, 0);
        pixels = context.getImageData(0, 0, canvas.width, canvas.height).data;
      }
      const box = image.getBoundingClientRect(), inside = (share, size) => Math.max(0, Math.min(size - 1, Math.floor(share * size)));
      const column = inside((event.clientX - box.left) / box.width, image.naturalWidth);
      const row = inside((event.clientY - box.top) / box.height, image.naturalHeight);
      const [red, green, , alpha] = pixels.slice(4 * (row * image.naturalWidth + column));
      const value = what.log ? Math.expm1((alpha / 255) * Math.log1p(what.top)) : (alpha / 255) * what.top;
      const text = what.top >= 20 ? `${what.log && value > 30 ? "about " : ""}${value.toFixed(0)}` : value.toFixed(2);
      const known = alpha === 0 || Math.abs(red - green) > 8;
      show(event, [[`${what.rows} ${rows[row]}, ${what.columns} ${columns[column]}`, ""], [known ? text + what.unit : "not measured", ""]]);
    });
  }

  // Tables sort by the first number in a cell, or by text; a second click turns the order.
  for (const table of all("table.sortable")) {
    const heads = all("thead th", table), body = table.tBodies[0];
    heads.forEach((head, place) => {
      if ("fixed" in head.dataset) return;
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") !== "descending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const sizes = { kB: 1e3, MB: 1e6, GB: 1e9, TB: 1e12 };
        const key = (row) => {
          const text = row.cells[place].textContent.trim();
          const number = parseFloat(text.replace(/,/g, ""));
          return place && !Number.isNaN(number) ? number * (sizes[text.split(" ")[1]] || 1) : place ? -Infinity : text;
        };
        const order = (a, b) => (a < b ? -1 : a > b ? 1 : 0);
        const sorted = [...body.rows].sort((a, b) => (down && place ? -1 : down ? 1 : place ? 1 : -1) * order(key(a), key(b)));
        body.append(...sorted);
      });
    });
  }
})();
