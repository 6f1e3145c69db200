"use strict";
(() => {
  const read = (id) => JSON.parse(document.getElementById(id)?.textContent ?? "null");
  const seconds = (value) => {
    if (Math.abs(value) < 5e-10) return "0 s";
    for (const [scale, unit] of [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]])
      if (Math.abs(value) >= scale || unit === "µs") {
        const scaled = value / scale;
        return `${scaled.toFixed(scaled < 9.995 ? 2 : scaled < 99.95 ? 1 : 0)} ${unit}`;
      }
  };
  const round = (span, most) => {
    const least = span / most, power = 10 ** Math.floor(Math.log10(least));
    return [1, 2, 5, 10].map((each) => each * power).find((each) => each >= least * 0.999999);
  };

  function schedule() {
    const data = read("schedule-data"), root = document.getElementById("timeline");
    if (!data || !root) return;
    const plot = root.querySelector(".plot"), svg = plot.querySelector("svg");
    const labels = plot.querySelector(".labels"), chosen = plot.querySelector(".selected");
    const ticks = root.querySelector(".ticks"), said = document.getElementById("schedule-said");
    const units = data.units, height = svg.viewBox.baseVal.height;
    const names = { F: "Forward", B: "Backward", I: "Backward of inputs", W: "Backward of weights",
      STEP: "Optimizer", SEND_F: "Activations sent", SEND_B: "Gradients sent",
      REDUCE: "Sum of gradients", GATHER: "Gathering of parameters" };
    const hint = said.textContent;
    let from = 0, to = units, place = null;

    const time = (unit) => (unit / units) * data.step;
    const percent = (unit) => (100 * (unit - from)) / (to - from);

    function text(rank, row, isWait) {
      const who = data.ranks.length > 1 ? `Rank ${rank}: ` : "";
      const when = `${seconds(time(row[1]))}, from ${seconds(time(row[0]))} to ${seconds(time(row[0] + row[1]))}`;
      if (isWait) {
        const [, , why, stage, microbatch] = row, what = data.waits[why];
        const of = `micro-batch ${microbatch} from stage ${stage}`;
        const reason = { message: stage < 0 ? "for a message" : `for the message of ${of}, which is on its way`,
          compute: `for ${of}, which is still being computed there`,
          gather: "for parameters, which are being gathered", sync: "for gradients, which are being summed",
          start: `the pipeline fills: ${of} has not arrived yet`, end: "its work is done; other ranks still compute" }[what];
        return `${who}bubble of ${when}: ${reason}.`;
      }
      const [, length, kind, stage, microbatch, , hidden] = row;
      const micro = microbatch >= 0 ? `, micro-batch ${microbatch}` : "";
      let more = "";
      if (row[5] > 0) more = hidden >= length - 1 ? " Compute hides all of it." : hidden > 0
        ? ` Compute hides ${seconds(time(hidden))} of it.` : " The rank computes nothing meanwhile.";
      return `${who}${names[data.kinds[kind]]}, stage ${stage}${micro}: ${when}.${more}`;
    }

    function draw() {
      svg.setAttribute("viewBox", `${from} 0 ${to - from} ${height}`);
      const width = plot.clientWidth, span = time(to - from), step = round(span, Math.max(3, width / 110));
      const marks = [];
      for (let at = Math.ceil(time(from) / step - 1e-9) * step; at <= time(to) + 1e-12; at += step) {
        const left = percent((at / data.step) * units);
        const side = left < 3 ? " class=first" : left > 96 ? " class=last" : "";
        marks.push(`<span${side} style="left:${left.toFixed(2)}%">${seconds(at)}</span>`);
      }
      ticks.innerHTML = marks.join("");
      const parts = [];
      data.ranks.forEach((rank) => {
        for (const [start, length, kind, stage, microbatch, lane] of rank.events) {
          if (lane !== 0 || start > to || start + length < from || microbatch < 0) continue;
          const wide = (length / (to - from)) * width;
          if (wide < 17 || parts.length > 600) continue;
          parts.push(`<span style="left:${percent(start).toFixed(3)}%;width:${((100 * length) / (to - from)).toFixed(3)}%;top:${rank.lanes[0][0]}px">${wide > 60 ? `${stage}${data.kinds[kind]}${microbatch}` : microbatch}</span>`);
        }
      });
      labels.innerHTML = parts.join("");
      mark();
    }

    function mark() {
      chosen.hidden = !place || place.row[0] > to || place.row[0] + place.row[1] < from;
      if (chosen.hidden) return;
      const [y, tall] = data.ranks[place.rank].lanes[place.isWait ? 0 : place.row[5]];
      chosen.style.cssText = `left:${percent(place.row[0])}%;width:max(4px,${(100 * place.row[1]) / (to - from)}%);top:${y}px;height:${tall}px`;
    }

    function choose(rank, row, isWait) {
      place = { rank, row, isWait };
      said.textContent = text(rank, row, isWait);
      mark();
    }

    function clear() { place = null; mark(); }

    function show(low, high) {
      const span = Math.min(units, Math.max(units / 20000, high - low));
      from = Math.min(Math.max(0, low), units - span);
      to = from + span;
      draw();
    }

    function zoom(factor, at = (from + to) / 2) {
      show(at - (at - from) * factor, at + (to - at) * factor);
    }

    const unitAt = (event) => {
      const box = plot.getBoundingClientRect();
      return from + ((event.clientX - box.left) / box.width) * (to - from);
    };
    let pressed = null;
    plot.addEventListener("pointerdown", (event) => { pressed = unitAt(event); });
    plot.addEventListener("pointerup", (event) => {
      const now = unitAt(event);
      if (pressed !== null && Math.abs(now - pressed) > (to - from) / 50) show(Math.min(pressed, now), Math.max(pressed, now));
      pressed = null;
    });
    plot.addEventListener("dblclick", () => show(0, units));
    plot.addEventListener("pointermove", (event) => {
      const y = event.clientY - plot.getBoundingClientRect().top, unit = unitAt(event);
      const rank = data.ranks.findIndex((each) => y >= each.top && y <= each.top + each.height + 4);
      if (rank < 0) return clear();
      const own = data.ranks[rank], near = (4 / plot.clientWidth) * (to - from);
      const lane = Math.max(0, own.lanes.findIndex(([top, tall]) => y >= top && y <= top + tall + 1));
      const gap = (row) => Math.max(0, row[0] - unit, unit - row[0] - row[1]);
      const hit = (row) => gap(row) === 0;
      const inLane = own.events.filter((row) => row[5] === lane);
      const found = inLane.find(hit);
      if (found) return choose(rank, found, false);
      const wait = own.waits.find(hit);
      if (wait && lane === 0) return choose(rank, wait, true);
      const nearest = inLane.reduce((best, row) => (best && gap(best) <= gap(row) ? best : row), null);
      if (nearest && gap(nearest) <= near) return choose(rank, nearest, false);
      clear();
      said.textContent = `${data.ranks.length > 1 ? `Rank ${rank}, ` : ""}${data.streams[lane]}: nothing at ${seconds(time(unit))}.`;
    });
    plot.addEventListener("pointerleave", () => { clear(); said.textContent = hint; });
    plot.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.shiftKey) return;
      event.preventDefault();
      zoom(event.deltaY + event.deltaX > 0 ? 1.25 : 0.8, unitAt(event));
    }, { passive: false });

    function move(rank, forward) {
      const rows = [...data.ranks[rank].events.filter((row) => row[5] === 0).map((row) => [row, false]),
        ...data.ranks[rank].waits.map((row) => [row, true])].sort((a, b) => a[0][0] - b[0][0]);
      const at = place && place.rank === rank ? rows.findIndex(([row]) => row === place.row) : -1;
      const start = place ? place.row[0] : from;
      let next = at + forward;
      if (at < 0) next = Math.max(0, rows.findIndex(([row]) => row[0] + row[1] > start));
      const [row, isWait] = rows[Math.min(rows.length - 1, Math.max(0, next))];
      if (row[0] < from || row[0] + row[1] > to) show(row[0] - (to - from) / 2, row[0] + (to - from) / 2);
      choose(rank, row, isWait);
    }

    root.addEventListener("keydown", (event) => {
      const rank = place ? place.rank : 0, last = data.ranks.length - 1;
      const keys = {
        ArrowRight: () => move(rank, 1), ArrowLeft: () => move(rank, -1),
        ArrowDown: () => move(Math.min(last, rank + 1), 0), ArrowUp: () => move(Math.max(0, rank - 1), 0),
        "+": () => zoom(0.5, place ? place.row[0] : undefined), "=": () => zoom(0.5, place ? place.row[0] : undefined),
        "-": () => zoom(2), Home: () => show(0, units), Escape: () => { clear(); show(0, units); },
      };
      if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      keys[event.key]();
    });
    const acts = { in: () => zoom(0.5), out: () => zoom(2), all: () => show(0, units),
      left: () => show(from - (to - from) / 3, to - (to - from) / 3),
      right: () => show(from + (to - from) / 3, to + (to - from) / 3) };
    document.querySelectorAll("[data-zoom]").forEach((button) =>
      button.addEventListener("click", acts[button.dataset.zoom]));
    addEventListener("resize", draw);
    draw();
  }

  function memory() {
    const data = read("memory-data"), svg = document.getElementById("memory-chart");
    if (!data || !svg) return;
    const pointer = svg.querySelector(".pointer"), said = document.getElementById("memory-said");
    let at = 0;
    const bytes = (mib) => (mib >= 1000 ? `${(mib / 1024).toFixed(1)} GiB` : `${mib} MiB`);
    function show(index) {
      at = Math.min(data.times.length - 1, Math.max(0, index));
      const x = data.left + data.times[at] * (data.right - data.left), row = data.mib[at];
      pointer.setAttribute("x1", x); pointer.setAttribute("x2", x);
      pointer.setAttribute("visibility", "visible");
      const parts = data.names.map((name, place) => [name, row[place]]).filter(([, size]) => size > 0);
      parts.sort((a, b) => b[1] - a[1]);
      said.textContent = `${seconds(data.times[at] * data.step)}, ${data.actions[at]}: ${bytes(row.reduce((a, b) => a + b, 0))} — ` +
        parts.map(([name, size]) => `${name} ${bytes(size)}`).join(", ");
    }
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const share = (((event.clientX - box.left) / box.width) * data.width - data.left) / (data.right - data.left);
      let index = data.times.findIndex((time) => time > share) - 1;
      if (index < -1) index = data.times.length - 1;
      show(index);
    });
    svg.addEventListener("keydown", (event) => {
      const steps = { ArrowRight: 1, ArrowLeft: -1 };
      if (!steps[event.key]) return;
      event.preventDefault();
      show(at + steps[event.key]);
    });
  }

  function sorting() {
    document.querySelectorAll("table.sortable").forEach((table) => {
      const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
      heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
        const up = head.getAttribute("aria-sort") !== "ascending";
        heads.forEach((each) => each.setAttribute("aria-sort", "none"));
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        const value = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent.trim();
        const order = (a, b) => (isNaN(value(a)) || isNaN(value(b)) ? String(value(a)).localeCompare(value(b)) : value(a) - value(b));
        [...body.rows].sort((a, b) => (up ? order(a, b) : order(b, a))).forEach((row) => body.append(row));
      }));
    });
  }

  schedule();
  memory();
  sorting();
})();
