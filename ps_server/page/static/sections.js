// The parts of the page: tables that keep their rows, tiles, events. Every text that comes from a job is a text node.
"use strict";
window.ps = window.ps || {};
(function (ps) {
  const GOOD = ["live"], BAD = ["lost", "failed", "missing", "silent"], GONE = ["left", "stopped", "lost", "failed", "missing"];
  ps.tone = (state) => (GOOD.includes(state) ? "good" : BAD.includes(state) ? "bad" : state === "busy" ? "warn" : "");
  ps.isGone = (state) => GONE.includes(state);

  // [{fields, rows}] as objects.
  ps.objects = (part) => part.rows.map((row) => Object.fromEntries(part.fields.map((field, at) => [field, row[at]])));

  function words(element, text) { if (element.textContent !== text) element.textContent = text; }
  function node(name, className, text) {
    const made = document.createElement(name);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  }

  const state = { title: "state", value: (row) => row.state, draw: (cell, row) => {
    if (!cell.firstChild || !cell.firstChild.classList) cell.replaceChildren(node("span"));
    cell.firstChild.className = "state " + ps.tone(row.state);
    words(cell.firstChild, row.state);
    if (row.straggler && cell.childNodes.length < 2) cell.append(node("span", "badge", "straggler"));
    if (!row.straggler && cell.childNodes.length > 1) cell.lastChild.remove();
  } };
  const text = (title, value, more) => ({ title, value, ...more });
  const number = (title, value, show) => ({ title, value, number: true, show: show || ps.number });
  const rate = (title, value, show) => number(title, (row) => (ps.isGone(row.state) ? null : value(row)), show);
  const percent = (share) => (share === null ? "–" : Math.round(share * 100) + " %");
  const pairs = (map, show) => Object.entries(map).map(([name, value]) => `${name} ${show ? show(value) : value}`).join(", ");
  const heard = rate("heard", (row) => row.heard_seconds, (seconds) => (seconds === null ? "–" : seconds.toFixed(1) + " s"));

  ps.COLUMNS = {
    workers: [
      state,
      number("step", (row) => row.steps),
      rate("clock", (row) => row.clock, (clock) => (clock === null ? "–" : String(clock))),
      rate("behind", (row) => row.behind),
      rate("steps/s", (row) => row.steps_per_second),
      rate("samples/s", (row) => row.samples_per_second),
      rate("staleness", (row) => row.staleness),
      rate("waits", (row) => row.wait_share, percent),
      text("waits for", (row) => row.waits_for),
      text("reported", (row) => pairs(row.reported, ps.number)),
      rate("data", (row) => row.bytes_per_second, (bytes) => (bytes === null ? "–" : ps.bytes(bytes) + "/s")),
      text("over", (row) => row.transport),
      heard,
      text("host", (row) => (row.host ? `${row.host} (${row.pid})` : "")),
      text("note", (row) => row.note, { wide: true }),
    ],
    shards: [
      state,
      text("version", (row) => { const all = Object.entries(row.versions); return all.length === 1 ? String(all[0][1]) : pairs(row.versions); }, { number: true, show: (v) => v }),
      rate("pushes/s", (row) => row.pushes_per_second),
      rate("data", (row) => row.bytes_per_second, (bytes) => (bytes === null ? "–" : ps.bytes(bytes) + "/s")),
      number("dropped", (row) => row.dropped),
      rate("queue", (row) => row.queued_pushes),
      number("holds", (row) => row.held_bytes + row.table_bytes, ps.bytes),
      text("streams", (row) => pairs(row.streams)),
      text("log", (row) => (row.log ? `${ps.bytes(row.log.unsaved_bytes)} since snapshot` : ps.isGone(row.state) ? "" : "none")),
      text("snapshot", (row) => (row.log ? (row.log.snapshot_age_seconds === null ? "none yet" : ps.duration(row.log.snapshot_age_seconds) + " ago") : "")),
      text("standby", (row) => (row.standby ? row.standby + (row.standby_lag === null ? "" : `, ${row.standby_lag} records behind`) : "")),
      heard,
      text("address", (row) => row.address),
      text("note", (row) => row.note, { wide: true }),
    ],
    tables: [
      text("model", (row) => row.model),
      number("rows", (row) => row.rows),
      number("rows/s", (row) => row.growth),
      number("on disk", (row) => row.on_disk),
      number("waiting", (row) => row.waiting),
      number("size", (row) => row.size_bytes, ps.bytes),
      number("admitted", (row) => row.inserted),
      number("expired", (row) => row.expired),
      number("evicted", (row) => row.evicted),
      number("shards", (row) => row.shards),
    ],
    publications: [
      text("model", (row) => row.model, { wide: true }),
      number("version", (row) => row.version || null),
      number("step", (row) => (row.version ? row.step : null)),
      number("age", (row) => (row.version ? Math.max(0, ps.now - row.at_seconds) : null), (age) => (age === null ? "–" : ps.duration(age))),
      number("size", (row) => row.size_bytes, ps.bytes),
      number("readers", (row) => row.readers),
      number("by relays", (row) => row.relayed || null),
      number("behind", (row) => (row.readers ? row.behind : null)),
      number("as deltas", (row) => row.delta_bytes, ps.bytes),
      number("whole", (row) => row.full_bytes, ps.bytes),
      number("saved", (row) => row.saved_bytes, ps.bytes),
    ],
    readers: [
      number("version", (row) => row.version || null),
      number("behind", (row) => row.behind),
      number("serves", (row) => row.serves || null),
      number("as deltas", (row) => row.delta_bytes, ps.bytes),
      number("whole", (row) => row.full_bytes, ps.bytes),
      number("saved", (row) => row.saved_bytes, ps.bytes),
    ],
    checkpoints: [
      number("step", (row) => row.step),
      number("size", (row) => row.size_bytes, ps.bytes),
      number("took", (row) => row.seconds, (seconds) => seconds.toFixed(1) + " s"),
      text("kept", (row) => row.kept, { wide: true }),
      text("folder", (row) => row.folder, { wide: true }),
    ],
  };

  // A table whose rows stay the same elements while their numbers change; a header sorts by its column.
  ps.Table = class {
    constructor(element, label, columns, name, sortable) {
      Object.assign(this, { element, columns, name, rows: new Map(), shown: [], sort: null, wanted: "" });
      const head = node("tr");
      this.heads = [{ title: label }, ...columns].map((column, at) => {
        const cell = node("th", column.number ? "number" : "");
        cell.scope = "col";
        if (sortable) {
          const button = node("button", "", column.title);
          button.type = "button";
          button.addEventListener("click", () => this.sortBy(at));
          cell.append(button);
        } else cell.textContent = column.title;
        head.append(cell);
        return cell;
      });
      this.body = node("tbody");
      const top = node("thead");
      top.append(head);
      element.append(top, this.body);
      this.data = [];
    }
    sortBy(at) {
      const down = this.sort && this.sort.at === at && !this.sort.down;
      this.sort = this.sort && this.sort.at === at && this.sort.down ? null : { at, down: Boolean(down) };
      this.heads.forEach((head, number) => {
        if (this.sort && number === this.sort.at) head.setAttribute("aria-sort", this.sort.down ? "descending" : "ascending");
        else head.removeAttribute("aria-sort");
      });
      this.update(this.data);
    }
    filter(wanted) { this.wanted = wanted.trim().toLowerCase(); this.update(this.data); }
    update(data) {
      this.data = data;
      const used = this.columns.map((column) => data.some((row) => { const value = column.value(row); return value !== "" && value !== null; }));
      this.heads.slice(1).forEach((head, at) => { head.hidden = !used[at]; });
      const seen = new Set();
      for (const row of data) {
        const key = this.name(row);
        seen.add(key);
        this.draw(key, row, used);
      }
      for (const [key, found] of this.rows) if (!seen.has(key)) { found.line.remove(); this.rows.delete(key); }
      this.order(data);
    }
    draw(key, row, used) {
      let found = this.rows.get(key);
      if (!found) {
        const line = node("tr"), head = node("th", "", key);
        head.scope = "row";
        line.append(head);
        const cells = this.columns.map((column) => {
          const cell = node("td", (column.number ? "number " : "") + (column.wide ? "wide" : ""));
          line.append(cell);
          return cell;
        });
        this.rows.set(key, (found = { line, cells }));
      }
      found.line.className = ps.isGone(row.state) ? "gone" : "";
      this.columns.forEach((column, at) => {
        const cell = found.cells[at];
        cell.hidden = !used[at];
        if (column.draw) column.draw(cell, row);
        else { const value = column.value(row); words(cell, column.show ? column.show(value) : value); }
      });
      found.line.hidden = Boolean(this.wanted) && !found.line.textContent.toLowerCase().includes(this.wanted);
    }
    order(data) {
      let keys = data.map(this.name);
      if (this.sort) {
        const column = this.columns[this.sort.at - 1], value = column ? column.value : this.name;
        const known = data.map((row, at) => [value(row), keys[at], at]);
        known.sort(([a, , i], [b, , j]) => {
          if (a === null || b === null) return (a === null) - (b === null) || i - j;
          const order = typeof a === "number" ? a - b : String(a).localeCompare(String(b), undefined, { numeric: true });
          return (this.sort.down ? -order : order) || i - j;
        });
        keys = known.map(([, key]) => key);
      }
      if (keys.join("\n") === this.shown.join("\n")) return;
      this.shown = keys;
      this.body.append(...keys.map((key) => this.rows.get(key).line));
    }
  };

  ps.drawTiles = function (list, head, elapsed) {
    const of = (there, expected) => (expected ? `${there} of ${expected}` : String(there));
    const tiles = [
      ["state", head.state + (head.moving ? ", moving slices" : ""), head.state.startsWith("stalled") ? "bad" : true], ["mode", head.mode, true], ["running for", ps.duration(elapsed), true],
      ["workers", of(head.live_workers, head.expected_workers)], ["shards", of(head.live_shards, head.expected_shards)],
      ["steps/s", ps.number(head.steps_per_second)], ["samples/s", ps.number(head.samples_per_second)], ["data/s", ps.bytes(head.bytes_per_second)],
      ...(head.straggler ? [["straggler", head.straggler, true]] : []),
      ...Object.entries(head.reported).map(([name, value]) => [name, ps.number(value)]),
    ];
    if (list.childNodes.length !== tiles.length) list.replaceChildren(...tiles.map(() => { const tile = node("div"); tile.append(node("dt"), node("dd")); return tile; }));
    tiles.forEach(([title, value, word], at) => {
      const tile = list.childNodes[at];
      tile.className = word ? `word ${word === "bad" ? "bad" : ""}` : "";
      words(tile.firstChild, title);
      tile.firstChild.title = title;
      words(tile.lastChild, value);
    });
  };

  ps.drawAlerts = function (area, alerts) {
    const known = [...area.childNodes].map((each) => each.textContent).join("\n");
    if (known !== alerts.map((alert) => alert.text).join("\n")) area.replaceChildren(...alerts.map((alert) => node("p", "alert", alert.text)));
  };

  ps.addEvents = function (list, events, most) {
    for (const event of events) {
      const item = node("li", event.warning ? "warning" : ""), time = node("time", "", ps.time(event.at_seconds, true));
      time.dateTime = new Date(event.at_seconds * 1000).toISOString();
      item.append(time, node("span", "", event.text));
      list.prepend(item);
    }
    while (list.childNodes.length > most) list.lastChild.remove();
  };

  ps.drawPairs = function (list, pairs) {
    list.replaceChildren(...Object.entries(pairs).flatMap(([name, value]) => [node("dt", "", name), node("dd", "", value)]));
  };
})(window.ps);
