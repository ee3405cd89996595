// Follows the coordinator by server-sent events, and says when it does not answer.
"use strict";
(function (ps) {
  const SILENT_MS = 4000, AGAIN_MS = 1000;
  const page = new ps.Page(true);
  let source = null, last = Date.now(), fresh = true;

  function say(state, text) {
    const line = document.getElementById("connection"), words = document.getElementById("connection-text");
    if (line.dataset.state !== state) line.dataset.state = state;
    if (words.textContent !== text) words.textContent = text;
    document.body.classList.toggle("stale", state === "lost");
  }

  function lost() { say("lost", "the coordinator does not answer; trying again"); }

  function open() {
    fresh = true;
    source = new EventSource("events");
    source.onopen = () => { fresh = true; };
    source.onmessage = (event) => {
      last = Date.now();
      if (fresh) { page.reset(); fresh = false; }
      page.take(JSON.parse(event.data));
      say("live", "live");
    };
    source.onerror = () => {
      lost();
      if (source.readyState === EventSource.CLOSED) again();
    };
  }

  // A refusal ends an EventSource: the page itself says whether a token is needed.
  async function again() {
    source.close();
    try {
      const answer = await fetch("check", { cache: "no-store" });
      if (answer.status === 401 || answer.status === 403) { location.reload(); return; }
    } catch { /* nobody listens: the same is tried again */ }
    setTimeout(open, AGAIN_MS);
  }

  setInterval(() => { if (Date.now() - last > SILENT_MS) lost(); }, 500);
  open();
})(window.ps);
