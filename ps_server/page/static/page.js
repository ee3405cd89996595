// The page: takes parts of the job's state and draws those that have come.
"use strict";
window.ps = window.ps || {};
(function (ps) {
  const $ = (id) => document.getElementById(id);
  const EVENTS = 400, MANY = 9;

  function chartOf(curve) {
    const bytes = !curve.reported && curve.name === "bytes/s";
    return new ps.Chart(curve.name, !curve.reported, bytes ? ps.bytes : ps.number, bytes ? "/s" : "");
  }

  ps.Page = class {
    // live: its title is the name of the job; a report has the title that it was given.
    constructor(live) {
      this.live = live;
      const named = (row) => row.name;
      this.tables = {
        workers: new ps.Table($("workers"), "worker", ps.COLUMNS.workers, named, true),
        shards: new ps.Table($("shards"), "shard", ps.COLUMNS.shards, named, true),
        tables: new ps.Table($("tables"), "table", ps.COLUMNS.tables, (row) => (row.model === "model" ? row.table : `${row.model}: ${row.table}`), true),
        publications: new ps.Table($("publications"), "name", ps.COLUMNS.publications, named, true),
        readers: new ps.Table($("readers"), "reader", ps.COLUMNS.readers, (row) => `${row.publication}: ${row.name}`, true),
        checkpoints: new ps.Table($("checkpoints"), "written", ps.COLUMNS.checkpoints, (row) => ps.time(row.at_seconds, true), false),
      };
      this.charts = new Map();
      this.curves = null;
      $("filter").addEventListener("input", (event) => this.tables.workers.filter(event.target.value));
    }
    // Forget what an earlier coordinator told.
    reset() { this.curves = null; $("events").replaceChildren(); }
    take(message) {
      if (message.head) this.head = message.head;
      if (message.clock && this.head) {
        ps.drawTiles($("tiles"), this.head, message.clock.at - message.clock.began);
        $("subtitle").textContent = this.head.models.join() === "model" ? "" : this.head.models.join(", ");
        if (this.live && this.head.job) $("title").textContent = this.head.job;
        document.title = (this.head.alerts.length ? `(${this.head.alerts.length}) ` : "") + `${this.head.state} · ${$("title").textContent}`;
        ps.drawAlerts($("alerts"), this.head.alerts);
      }
      if (message.clock) ps.now = message.clock.at;
      for (const name of ["workers", "shards", "tables", "publications", "readers", "checkpoints"]) if (message[name]) this.takeTable(name, ps.objects(message[name]));
      if (message.publications || message.readers) this.countReaders();
      else if (message.clock && this.tables.publications.data.length) this.tables.publications.update(this.tables.publications.data);
      if (message.placement) this.takePlacement(ps.objects(message.placement));
      if (message.curves) this.takeCurves(message.curves);
      if (message.events) ps.addEvents($("events"), message.events, EVENTS);
      if (message.configuration) ps.drawPairs($("configuration"), message.configuration);
    }
    takeTable(name, rows) {
      if (name === "checkpoints") rows.reverse();
      this.tables[name].update(rows);
      if (name === "tables" || name === "publications" || name === "checkpoints") $(name).closest("section").hidden = !rows.length;
      if (name !== "workers") return;
      const workers = rows.filter((row) => !row.evaluator);
      if (workers.length >= MANY) ps.drawSpeeds($("speeds"), workers);
      else $("speeds").hidden = true;
    }
    // Of many readers those that are furthest behind are told.
    countReaders() {
      const shown = this.tables.readers.data.length;
      const more = this.tables.publications.data.reduce((sum, row) => sum + row.readers, 0) - shown;
      $("readers").closest("div").hidden = !shown;
      $("more-readers").hidden = more <= 0;
      $("more-readers").textContent = `and ${more} more readers`;
    }
    takePlacement(entries) {
      const figures = [], models = [...new Set(entries.map((entry) => entry.model))];
      for (const model of models) {
        for (const table of [false, true]) {
          const of = entries.filter((entry) => entry.model === model && entry.table === table);
          if (of.length) figures.push(ps.drawPlacement(model, of, table));
        }
      }
      $("placement").replaceChildren(...figures);
      $("placement").closest("section").hidden = !figures.length;
    }
    takeCurves(told) {
      const known = this.curves;
      if (!told.first || !known) this.curves = told;
      else {
        const join = (before, after) => before.slice(0, told.first).concat(after);
        this.curves = { ...told, times: join(known.times, told.times), curves: told.curves.map((curve, at) => {
          const old = known.curves[at];
          return { ...curve, mean: join(old.mean, curve.mean), low: join(old.low, curve.low), high: join(old.high, curve.high) };
        }) };
      }
      const order = [...this.curves.curves].sort((a, b) => b.reported - a.reported);
      for (const curve of order) {
        const key = `${curve.reported} ${curve.name}`;
        if (!this.charts.has(key)) {
          if (!curve.mean.some((value) => value)) continue;
          this.charts.set(key, chartOf(curve));
          const figures = order.map((each) => this.charts.get(`${each.reported} ${each.name}`)).filter(Boolean);
          $("curves").replaceChildren(...figures.map((chart) => chart.figure));
        }
        this.charts.get(key).update(this.curves.times, curve);
      }
    }
  };
})(window.ps);
