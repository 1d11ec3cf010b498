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

  function tell(element, kind, detail) {
    element.dispatchEvent(new CustomEvent(kind, { detail }));
  }

  // A dropped file goes to the input that lies over the drop zone; this adds the look.
  function mark(event, over) {
    event.currentTarget.classList.toggle("over", over);
  }

  return { append, replace, logScale, theme, upload, mark };
})();
