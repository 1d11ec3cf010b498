// What the pages need in the browser: charts that grow by their new points only, uploads in chunks.
window.studio = (() => {
  const CHUNK_BYTES = 4 << 20;
  const grown = new WeakMap(); // chart → one array of points a series

  function chartOf(id) {
    return getElement(id)?.chart;
  }

  function pointsOf(chart) {
    if (!grown.has(chart)) grown.set(chart, chart.getOption().series.map((s) => [...(s.data ?? [])]));
    return grown.get(chart);
  }

  // Add points: [[series index, [[x, y], …]], …]. Only these travel; the rest is here already.
  function append(id, additions) {
    const chart = chartOf(id);
    if (!chart) return void setTimeout(() => append(id, additions), 50);
    const series = pointsOf(chart);
    for (const [index, points] of additions) series[index].push(...points);
    draw(chart, series);
  }

  // Replace everything, for a run that went back to a checkpoint.
  function replace(id, all) {
    const chart = chartOf(id);
    if (!chart) return void setTimeout(() => replace(id, all), 50);
    grown.set(chart, all);
    draw(chart, all);
  }

  function draw(chart, series) {
    chart.setOption({ series: series.map((data) => ({ data })) });
  }

  function logScale(id, on) {
    const chart = chartOf(id);
    if (chart) chart.setOption({ yAxis: { type: on ? "log" : "value" } });
  }

  function theme(name) {
    const age = name === "auto" ? 0 : 31536000;
    document.cookie = `tessella_theme=${name}; path=/; max-age=${age}; samesite=strict`;
  }

  async function answer(response) {
    if (response.ok) return response.json();
    let text = `${response.status} ${response.statusText}`;
    try {
      text = (await response.json()).error ?? text;
    } catch {
      // not JSON: the status says enough
    }
    throw new Error(text);
  }

  // Send files in chunks that the server checks; tell the element when each is there.
  async function upload(element, files) {
    for (const file of files) {
      try {
        const query = new URLSearchParams({ name: file.name, nbytes: file.size });
        const { id } = await answer(await fetch(`/api/uploads?${query}`, { method: "POST" }));
        let sent = 0;
        while (sent < file.size) {
          const body = file.slice(sent, sent + CHUNK_BYTES);
          const url = `/api/uploads/${id}?offset=${sent}`;
          sent = (await answer(await fetch(url, { method: "PUT", body }))).received;
          tell(element, "sending", { name: file.name, sent, nbytes: file.size });
        }
        tell(element, "sent", { id, name: file.name });
      } catch (error) {
        tell(element, "unsent", { name: file.name, error: error.message });
      }
    }
  }

  // Send all files of a folder as one upload: [[path, file], …], several at a time.
  async function uploadFolder(element, name, entries) {
    const kept = entries.filter(([path]) => !path.split("/").some((part) => part.startsWith(".")));
    const nbytes = kept.reduce((sum, [, file]) => sum + file.size, 0);
    try {
      const query = new URLSearchParams({ name, files: kept.length, nbytes });
      const { id } = await answer(await fetch(`/api/uploads/folders?${query}`, { method: "POST" }));
      let sent = 0, next = 0, told = 0;
      async function work() {
        while (next < kept.length) {
          const [path, file] = kept[next++];
          for (let offset = 0; offset === 0 || offset < file.size; offset += CHUNK_BYTES) {
            const body = file.slice(offset, offset + CHUNK_BYTES);
            const where = new URLSearchParams({ path, offset });
            await answer(await fetch(`/api/uploads/${id}/files?${where}`, { method: "PUT", body }));
            sent += body.size;
          }
          if (Date.now() - told > 200) {
            told = Date.now();
            tell(element, "sending", { name, sent, nbytes });
          }
        }
      }
      await Promise.all([work(), work(), work(), work()]);
      await answer(await fetch(`/api/uploads/${id}/done`, { method: "POST" }));
      tell(element, "sent", { id, name });
    } catch (error) {
      tell(element, "unsent", { name, error: error.message });
    }
  }

  function chooseFolder(id) {
    const chooser = document.createElement("input");
    chooser.type = "file";
    chooser.webkitdirectory = true;
    chooser.addEventListener("change", () => sendChosen(getHtmlElement(id), [...chooser.files]));
    chooser.click();
  }

  function sendChosen(element, files) {
    if (!files.length) return;
    const name = files[0].webkitRelativePath.split("/")[0];
    uploadFolder(element, name, files.map((file) => [file.webkitRelativePath, file]));
  }

  // A dropped folder cannot go to the input: its files are looked up here.
  async function dropFolder(event, id) {
    const dropped = [...event.dataTransfer.items].map((i) => i.webkitGetAsEntry()).filter((e) => e);
    if (!dropped.some((entry) => entry.isDirectory)) return;
    event.preventDefault();
    const found = [];
    for (const entry of dropped) await walk(entry, entry.name, found);
    uploadFolder(getHtmlElement(id), dropped[0].name, found);
  }

  async function walk(entry, path, found) {
    if (entry.isFile) {
      found.push([path, await new Promise((done, failed) => entry.file(done, failed))]);
      return;
    }
    const reader = entry.createReader();
    for (;;) {
      const inside = await new Promise((done, failed) => reader.readEntries(done, failed));
      if (!inside.length) return;
      for (const each of inside) await walk(each, `${path}/${each.name}`, found);
    }
  }

  function tell(element, kind, detail) {
    element.dispatchEvent(new CustomEvent(kind, { detail }));
  }

  // A dropped file goes to the input that lies over the drop zone; this adds the look.
  function mark(event, over) {
    event.currentTarget.classList.toggle("over", over);
  }

  return { append, replace, logScale, theme, upload, mark, chooseFolder, sendChosen, dropFolder };
})();
