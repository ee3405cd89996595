// Charts in SVG: a curve with its range, bars for many workers, and which shard holds what.
"use strict";
window.ps = window.ps || {};
(function (ps) {
  const NS = "http://www.w3.org/2000/svg";
  const WIDTH = 380, HEIGHT = 132, LEFT = 50, RIGHT = 8, TOP = 10, BOTTOM = 20;

  // An SVG element; every text that comes from a job is a text node.
  ps.svg = function (name, attributes, text) {
    const made = document.createElementNS(NS, name);
    for (const key in attributes) made.setAttribute(key, attributes[key]);
    if (text !== undefined) made.textContent = text;
    return made;
  };

  ps.number = function (value) {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-4 || size >= 1e15)) return value.toExponential(2);
    if (size >= 1e4) {
      for (const [unit, name] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
        if (size >= unit) return (value / unit).toPrecision(3) + " " + name;
      }
    }
    return Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(4)));
  };

  ps.bytes = function (value) {
    if (!value) return "0 B";
    const units = ["B", "kB", "MB", "GB", "TB", "PB"];
    const step = Math.min(units.length - 1, Math.floor(Math.log10(Math.abs(value)) / 3));
    const shown = value / Math.pow(1000, step);
    return (step && shown < 100 ? shown.toFixed(1) : Math.round(shown)) + " " + units[step];
  };

  ps.duration = function (seconds) {
    if (seconds === null || seconds === undefined) return "–";
    if (seconds < 60) return Math.round(seconds) + " s";
    const minutes = Math.floor(seconds / 60);
    if (minutes < 60) return minutes + " min";
    const hours = Math.floor(minutes / 60);
    if (hours < 48) return hours + " h " + (minutes % 60) + " min";
    return Math.floor(hours / 24) + " d " + (hours % 24) + " h";
  };

  ps.time = function (seconds, withDate) {
    const at = new Date(seconds * 1000), two = (n) => String(n).padStart(2, "0");
    const clock = two(at.getHours()) + ":" + two(at.getMinutes()) + ":" + two(at.getSeconds());
    return withDate ? at.getFullYear() + "-" + two(at.getMonth() + 1) + "-" + two(at.getDate()) + " " + clock : clock;
  };

  // Round values that divide [low, high] into about `count` parts.
  ps.ticks = function (low, high, count) {
    const rough = (high - low) / count, power = Math.pow(10, Math.floor(Math.log10(rough)));
    const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough * 0.999);
    const found = [];
    for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) found.push(Number((n * step).toPrecision(12)));
    return found;
  };

  function bounds(lows, highs, zero) {
    let low = Infinity, high = -Infinity;
    for (const value of lows) if (value !== null && value < low) low = value;
    for (const value of highs) if (value !== null && value > high) high = value;
    if (low > high) return [0, 1];
    if (zero && low > 0) low = 0;
    if (low === high) { const pad = Math.abs(low) * 0.1 || 1; return [zero ? Math.min(0, low) : low - pad, high + pad]; }
    const pad = (high - low) * 0.05;
    return [zero && low === 0 ? 0 : low - pad, high + pad];
  }

  // Runs of points whose value is known.
  function runs(values) {
    const found = [];
    let run = null;
    values.forEach((value, at) => {
      if (value === null) { run = null; return; }
      if (!run) found.push((run = []));
      run.push(at);
    });
    return found;
  }

  // A figure that draws one curve again and again; `zero`: its axis begins at 0.
  ps.Chart = class {
    constructor(title, zero, show, suffix) {
      this.zero = zero; this.axis = show; this.show = (value) => show(value) + suffix; this.data = null; this.title = title;
      this.figure = document.createElement("figure");
      const caption = document.createElement("figcaption");
      const name = document.createElement("span");
      name.textContent = title; name.title = title;
      this.value = document.createElement("span");
      this.value.className = "value";
      caption.append(name, this.value);
      this.drawing = ps.svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" });
      this.figure.append(caption, this.drawing);
      this.drawing.addEventListener("pointermove", (event) => this.point(event));
      this.drawing.addEventListener("pointerleave", () => { this.hover = null; this.draw(); });
    }
    update(times, curve) {
      this.data = { times, curve };
      this.draw();
    }
    x(at) {
      const { times } = this.data, span = times[times.length - 1] - times[0] || 1;
      return LEFT + ((times[at] - times[0]) / span) * (WIDTH - LEFT - RIGHT);
    }
    point(event) {
      const box = this.drawing.getBoundingClientRect(), x = ((event.clientX - box.left) / box.width) * WIDTH;
      let best = null;
      if (this.data) this.data.times.forEach((_, at) => { if (best === null || Math.abs(this.x(at) - x) < Math.abs(this.x(best) - x)) best = at; });
      this.hover = best;
      this.draw();
    }
    draw() {
      const { times, curve } = this.data, [low, high] = bounds(curve.low, curve.high, this.zero);
      const y = (value) => TOP + (1 - (value - low) / (high - low)) * (HEIGHT - TOP - BOTTOM);
      const parts = [];
      for (const tick of ps.ticks(low, high, 3)) {
        parts.push(ps.svg("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(tick), y2: y(tick) }));
        parts.push(ps.svg("text", { x: LEFT - 6, y: y(tick) + 4, "text-anchor": "end" }, this.axis(tick)));
      }
      const span = times[times.length - 1] - times[0];
      parts.push(ps.svg("text", { x: LEFT, y: HEIGHT - 4 }, ps.time(times[0], span > 80000)));
      parts.push(ps.svg("text", { x: WIDTH - RIGHT, y: HEIGHT - 4, "text-anchor": "end" }, ps.time(times[times.length - 1], span > 80000)));
      const place = (at, value) => `${this.x(at).toFixed(1)},${y(value).toFixed(1)}`;
      for (const run of runs(curve.mean)) {
        if (run.some((at) => curve.high[at] !== curve.low[at])) {
          const back = [...run].reverse().map((at) => place(at, curve.low[at]));
          parts.push(ps.svg("polygon", { class: "range", points: [...run.map((at) => place(at, curve.high[at])), ...back].join(" ") }));
        }
        if (run.length === 1) parts.push(ps.svg("circle", { class: "last", cx: this.x(run[0]), cy: y(curve.mean[run[0]]), r: 2 }));
        else parts.push(ps.svg("polyline", { class: "curve", points: run.map((at) => place(at, curve.mean[at])).join(" ") }));
      }
      const known = runs(curve.mean).pop(), last = known ? known[known.length - 1] : null;
      if (this.hover !== null && this.hover !== undefined && this.hover < times.length) {
        const at = this.hover;
        parts.push(ps.svg("line", { class: "cross", x1: this.x(at), x2: this.x(at), y1: TOP, y2: HEIGHT - BOTTOM }));
        if (curve.mean[at] !== null) parts.push(ps.svg("circle", { class: "cross-dot", cx: this.x(at), cy: y(curve.mean[at]), r: 3 }));
        this.value.textContent = ps.time(times[at], span > 80000) + "  " + this.shown(curve, at);
      } else {
        this.value.textContent = last === null ? "–" : this.show(curve.mean[last]);
      }
      this.drawing.setAttribute("aria-label", `${this.title}: last ${last === null ? "unknown" : this.show(curve.mean[last])}, from ${this.show(low)} to ${this.show(high)}`);
      this.drawing.replaceChildren(...parts);
    }
    shown(curve, at) {
      if (curve.mean[at] === null) return "–";
      const range = curve.low[at] === curve.high[at] ? "" : ` (${this.show(curve.low[at])} … ${this.show(curve.high[at])})`;
      return this.show(curve.mean[at]) + range;
    }
  };

  function element(name, className, text) {
    const made = document.createElement(name);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  }

  function captioned(title, value) {
    const caption = element("figcaption");
    caption.append(element("span", "", title), element("span", "value", value));
    return caption;
  }

  // One bar for each worker: its speed; who is slow or lost has another colour, and says so in its title.
  ps.drawSpeeds = function (figure, workers) {
    const most = Math.max(1e-9, ...workers.map((worker) => worker.steps_per_second));
    const slow = workers.filter((worker) => worker.straggler).map((worker) => worker.name);
    const bars = element("div", "bars");
    bars.setAttribute("role", "img");
    bars.setAttribute("aria-label", `Steps per second of ${workers.length} workers, up to ${ps.number(most)}` + (slow.length ? `; the others wait for ${slow.join(", ")}` : ""));
    for (const worker of workers) {
      const kind = ps.tone(worker.state) === "bad" ? "wrong" : worker.straggler ? "straggler" : ps.isGone(worker.state) ? "gone" : "";
      const bar = element("i", kind);
      bar.style.height = Math.max(4, (worker.steps_per_second / most) * 100) + "%";
      bar.title = `${worker.name}: ${worker.state}, ${ps.number(worker.steps_per_second)} steps/s` + (worker.straggler ? ", straggler" : "");
      bars.append(bar);
    }
    const ends = element("p", "ends");
    ends.append(element("span", "", workers[0].name), element("span", "", workers[workers.length - 1].name));
    figure.replaceChildren(captioned("Steps per second by worker", `up to ${ps.number(most)}`), bars, ends);
    figure.hidden = false;
  };

  // Each shard a row, each variable a piece of it; the row of the fullest shard has the whole width.
  ps.drawPlacement = function (model, entries, table) {
    const shards = [...new Set(entries.flatMap((entry) => Object.keys(entry.amounts)))].map(Number).sort((a, b) => a - b);
    const show = table ? (n) => ps.number(n) + " buckets" : ps.bytes;
    const total = (shard) => entries.reduce((sum, entry) => sum + (entry.amounts[shard] || 0), 0);
    const most = Math.max(1, ...shards.map(total)), figure = element("figure"), list = element("dl", "holds");
    for (const shard of shards) {
      const row = element("dd"), line = element("div", "row");
      entries.forEach((entry, number) => {
        if (!entry.amounts[shard]) return;
        const piece = element("i", `k${number % 8}`);
        piece.style.width = (entry.amounts[shard] / most) * 100 + "%";
        piece.title = `${entry.name} on shard ${shard}: ${show(entry.amounts[shard])}`;
        line.append(piece);
      });
      row.append(line, element("span", "", show(total(shard))));
      list.append(element("dt", "", `shard ${shard}`), row);
    }
    const legend = element("ul", "legend");
    entries.slice(0, 8).forEach((entry, number) => {
      const item = element("li"), mark = element("i", `k${number}`);
      mark.setAttribute("aria-hidden", "true");
      item.append(mark, `${entry.name} · ${show(Object.values(entry.amounts).reduce((a, b) => a + b, 0))}`);
      legend.append(item);
    });
    if (entries.length > 8) legend.append(element("li", "", `and ${entries.length - 8} more`));
    figure.append(captioned((table ? "Tables" : "Variables") + (model === "model" ? "" : ` of ${model}`), ""), list, legend);
    return figure;
  };
})(window.ps);
