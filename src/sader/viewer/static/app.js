// The page: scenes, dates, jobs, results. All state is on the server; the page only shows it.

import { Background } from "/static/background.js";
import { SwipeMap } from "/static/map.js";

const $ = (id) => document.getElementById(id);
const state = { scene: null, job: null, shares: null, running: null, folder: "", chosen: new Set(), shown: new Set() };

const map = new SwipeMap({
  canvas: $("map"),
  handle: $("handle"),
  onPoint: (pixel, byKey) => point(pixel, byKey),
  onBroken: () => explain("a part of the image could not be read; details are in the server's terminal."),
});
map.background = new Background({
  onChange: () => map.draw(),
  onCredit: (seen) => { $("credit").hidden = !seen; },
});

// ------------------------------------------------------------------ requests

class Refusal extends Error {
  constructor(said) {
    super(said.detail || said.title || "the server refused the request");
    this.title = said.title;
    this.status = said.status;
  }
}

async function ask(method, path, body, headers = {}) {
  let answer;
  try {
    answer = await fetch(path, {
      method,
      headers: body === undefined ? headers : { "Content-Type": "application/json", ...headers },
      body: body === undefined ? undefined : JSON.stringify(body),
      credentials: "same-origin",
    });
  } catch {
    throw new Refusal({ title: "Offline", detail: "the server does not answer. Is it still running?" });
  }
  if (answer.status === 401) login();
  const text = await answer.text();
  const said = text ? JSON.parse(text) : null;
  if (!answer.ok) throw new Refusal(said || { status: answer.status });
  return said;
}

function explain(text) {
  $("error-text").textContent = text;
  $("error").hidden = false;
}

function clearError() {
  $("error").hidden = true;
}

// Runs the action of a button, which is disabled meanwhile; errors are shown.
async function attempt(button, work) {
  clearError();
  if (button) button.disabled = true;
  try {
    await work();
  } catch (error) {
    explain(error.message);
    if (error.title === "BandError") {
      $("dates-section").hidden = false;
      $("reading").open = true;
      $("bands").focus();
    }
    if (!(error instanceof Refusal)) console.error(error);
  } finally {
    if (button) button.disabled = false;
  }
}

function element(kind, attributes = {}, ...children) {
  const created = document.createElement(kind);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) created.addEventListener(key.slice(2), value);
    else if (value !== undefined && value !== null && value !== false) created.setAttribute(key, value === true ? "" : value);
  }
  created.append(...children);
  return created;
}

// ------------------------------------------------------------------ token

function login() {
  if (!$("login").open) $("login").showModal();
}

$("login").addEventListener("cancel", (event) => event.preventDefault());
$("login-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  $("login-error").textContent = "";
  const answer = await fetch("/session", {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ token: $("token").value.trim() }),
  });
  $("token").value = "";
  if (answer.ok) {
    $("login").close();
    clearError();
    begin();
  } else {
    $("login-error").textContent = "That is not this server's token.";
  }
});

// ------------------------------------------------------------------ choosing a scene

async function openDemo() {
  $("upload-status").textContent = "Creating the demo scene ...";
  try {
    const created = await ask("POST", "/scenes", { demo: true });
    await openScene(created.id);
  } finally {
    $("upload-status").textContent = "";
  }
}

$("demo").addEventListener("click", (event) => attempt(event.currentTarget, openDemo));
$("demo-big").addEventListener("click", (event) => attempt(event.currentTarget, openDemo));
$("error-close").addEventListener("click", clearError);

function send(path, file, tell) {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open("PUT", path);
    request.setRequestHeader("Content-Type", "application/octet-stream");
    request.upload.onprogress = (event) => tell(event.loaded);
    request.onload = () => {
      if (request.status === 201) return resolve();
      let said = { status: request.status };
      try { said = JSON.parse(request.responseText); } catch { /* not ours */ }
      return reject(new Refusal(said));
    };
    request.onerror = () => reject(new Refusal({ detail: `${file.name} was not sent: the server closed the connection or has stopped.` }));
    request.send(file);
  });
}

async function upload(files) {
  if (!files.length) return;
  const created = await ask("POST", "/scenes", {});
  const total = files.reduce((sum, file) => sum + file.size, 0) || 1;
  let before = 0;
  try {
    for (const file of files) {
      const tell = (loaded) => {
        const share = Math.floor((100 * (before + loaded)) / total);
        $("upload-status").textContent = `Sending ${file.name}: ${share} %`;
      };
      tell(0);
      await send(`/scenes/${created.id}/files/${encodeURIComponent(file.name)}`, file, tell);
      before += file.size;
    }
    await openScene(created.id);
  } catch (error) {
    if (error.title !== "BandError") ask("DELETE", `/scenes/${created.id}`).catch(() => {});
    throw error;
  } finally {
    $("upload-status").textContent = "";
  }
}

$("files").addEventListener("change", (event) => {
  const files = [...event.target.files];
  attempt(null, () => upload(files)).then(() => { event.target.value = ""; });
});
for (const kind of ["dragenter", "dragover"]) {
  document.addEventListener(kind, (event) => {
    event.preventDefault();
    $("drop").classList.add("over");
  });
}
document.addEventListener("dragleave", (event) => {
  if (!event.relatedTarget) $("drop").classList.remove("over");
});
document.addEventListener("drop", (event) => {
  event.preventDefault();
  $("drop").classList.remove("over");
  attempt(null, () => upload([...event.dataTransfer.files]));
});

$("browse").addEventListener("click", () => {
  const open = $("folder").hidden;
  $("folder").hidden = !open;
  $("browse").setAttribute("aria-expanded", String(open));
  if (open) attempt(null, () => list(""));
});
$("up").addEventListener("click", () => attempt(null, () => list(state.folder.split("/").slice(0, -1).join("/"))));
$("open-paths").addEventListener("click", (event) => attempt(event.currentTarget, async () => {
  const created = await ask("POST", "/scenes", { paths: [...state.chosen] });
  await openScene(created.id);
}));

async function list(path) {
  const entries = await ask("GET", `/folder?path=${encodeURIComponent(path)}`);
  state.folder = path;
  state.chosen.clear();
  $("here").textContent = `/${path}`;
  $("up").disabled = !path;
  $("open-paths").disabled = true;
  const rows = entries.map((entry) => {
    const box = element("input", { type: "checkbox", id: `e-${entry.path}`, onchange: () => {
      if (box.checked) state.chosen.add(entry.path); else state.chosen.delete(entry.path);
      $("open-paths").disabled = !state.chosen.size;
    } });
    const name = element("label", { for: `e-${entry.path}` }, entry.kind === "folder" ? `${entry.name}/` : entry.name);
    const row = element("li", {}, box, name);
    if (entry.kind === "folder") row.append(element("button", { type: "button", "aria-label": `Open folder ${entry.name}`, onclick: () => attempt(null, () => list(entry.path)) }, "→"));
    return row;
  });
  $("entries").replaceChildren(...(rows.length ? rows : [element("li", { class: "muted" }, "No readable files here.")]));
}

// ------------------------------------------------------------------ a scene

function dayOf(date, index) {
  return date.date ? date.date.slice(0, 10) : `${index + 1}: ${date.name}`;
}

async function openScene(id, job = null) {
  state.job = null;
  state.shares = null;
  state.scene = { id };
  let scene;
  try {
    scene = await ask("GET", `/scenes/${id}`);
  } catch (error) {
    if (error.title !== "BandError") state.scene = null;
    throw error;
  }
  showScene(scene);
  if (job) showResult(job);
  remember();
  const asked = id;
  ask("GET", `/scenes/${id}/clouds`).then((shares) => {
    if (state.scene?.id !== asked) return;
    state.shares = shares;
    drawFilm();
    fillReference();
  }).catch((error) => note(`No cloud share: ${error.message}`));
}

function showScene(scene) {
  state.scene = scene;
  for (const id of ["tools", "readout"]) $(id).hidden = false;
  $("empty").hidden = true;
  $("dates-section").hidden = false;
  $("run-section").hidden = false;
  $("result-section").hidden = true;
  $("scene-title").textContent = scene.title;
  $("bands").value = scene.reading.bands ?? "";
  $("offset").value = scene.reading.offset ?? "";
  $("scale").value = scene.reading.scale ?? "";
  $("notices").replaceChildren();
  state.shown.clear();
  scene.notices.forEach(note);
  drawFilm();
  fillReference();
  fillSides("0", scene.dates.length > 1 ? "1" : "0");
  offerBackground();
  map.show(scene.grid);
  map.setSplit(0.5);
  refresh();
}

// The background map is off for every new scene: nothing is fetched from another server until the user turns it on.
function offerBackground() {
  const { scene } = state;
  const box = $("background");
  box.checked = false;
  map.background.turn(null);
  $("background-choice").hidden = !scene?.grid?.crs;
  const why = scene?.kind === "demo" ? "The demo scene is synthetic and has no real location." : navigator.onLine === false ? "You are offline." : "";
  box.disabled = Boolean(why);
  $("background-choice").title = why || $("background-help").textContent;
}
for (const kind of ["online", "offline"]) addEventListener(kind, () => { if (state.scene && !$("background").checked) offerBackground(); });
$("background").addEventListener("change", (event) => attempt(null, async () => {
  const box = event.target;
  if (!box.checked) return map.background.turn(null);
  const asked = state.scene.id;
  try {
    const fit = await ask("GET", `/scenes/${asked}/mercator`);
    if (state.scene?.id === asked && box.checked) map.background.turn(fit);
  } catch (error) {
    box.checked = false;
    throw error;
  }
}));

function note(text) {
  if (state.shown.has(text)) return;
  state.shown.add(text);
  $("notices").append(element("li", {}, text));
}

function drawFilm() {
  const { scene, shares } = state;
  const factor = smallFactor(scene.grid);
  const focused = [...$("film").querySelectorAll("button")].indexOf(document.activeElement);
  $("film").replaceChildren(...scene.dates.map((date, index) => {
    const share = shares ? Math.round(100 * shares[index]) : null;
    const caption = element("span", { class: "caption" }, element("b", {}, dayOf(date, index)));
    const line = element("span", { class: "share" });
    if (share === null) line.append("estimating clouds ...");
    else line.append(element("meter", { min: 0, max: 100, value: share, "aria-hidden": "true" }), `${share} % hidden`);
    caption.append(line);
    const picture = element("img", { src: address(String(index), "true")(factor, 0, 0), alt: "", loading: "lazy", fetchpriority: "low" });
    if (!scene.combinations.includes("true")) picture.src = address(String(index), scene.combinations[0])(factor, 0, 0);
    const button = element("button", {
      type: "button", "aria-pressed": String($("left").value === String(index)), title: date.name,
      "aria-label": `Show ${dayOf(date, index)} on the left${share === null ? "" : `, ${share} percent hidden`}`,
      onclick: () => { $("left").value = String(index); refresh(); },
    }, picture, caption);
    return element("li", {}, button);
  }));
  if (focused >= 0) $("film").querySelectorAll("button")[focused]?.focus();
}

function smallFactor(grid) {
  let factor = 1;
  while (factor < 256 && Math.max(grid.width, grid.height) / factor > 512) factor *= 2;
  return factor;
}

function fillReference() {
  const { scene, shares } = state;
  const before = $("reference").value;
  let clearest = "";
  if (shares) {
    const at = shares.indexOf(Math.min(...shares));
    clearest = `: ${dayOf(scene.dates[at], at)}`;
  }
  $("reference").replaceChildren(
    element("option", { value: "auto" }, `the clearest${clearest}`),
    ...scene.dates.map((date, index) => element("option", { value: date.name }, dayOf(date, index))),
    element("option", { value: "none" }, "none: composite of all dates"),
  );
  if ([...$("reference").options].some((option) => option.value === before)) $("reference").value = before;
}

function fillSides(left, right) {
  const options = () => [
    ...(state.job ? [element("option", { value: "result" }, "Result")] : []),
    ...state.scene.dates.map((date, index) => element("option", { value: String(index) }, dayOf(date, index))),
  ];
  $("left").replaceChildren(...options());
  $("right").replaceChildren(...options());
  $("left").value = left;
  $("right").value = right;
}

function address(layer, combination) {
  const { scene, job } = state;
  return (factor, column, row) => {
    const query = new URLSearchParams({ combination, factor, column, row });
    if (["result", "uncertainty", "provenance"].includes(layer)) query.set("job", job.jobID);
    if (layer.startsWith("mask")) for (const [name, value] of Object.entries(maskSettings())) query.set(name, value);
    // The reading changes the image, so it is part of the URL under which the browser caches it.
    query.set("v", JSON.stringify(scene.reading));
    return `/scenes/${scene.id}/layers/${layer}?${query}`;
  };
}

// Settings of estimated masks; what is no number in their range leaves the default.
function maskSettings() {
  const found = { haze: $("haze").value };
  const [threshold, growth] = [Number($("threshold").value), Number($("growth").value || NaN)];
  if (threshold > 0 && threshold < 1) found.threshold = threshold;
  if (Number.isInteger(growth) && growth >= 0 && growth <= 64) found.growth = growth;
  return found;
}

const NEEDS = { true: ["B04", "B03", "B02"], false: ["B08", "B04", "B03"], ndvi: ["B08", "B04"] };

function refresh() {
  const { scene, job } = state;
  if (!scene?.grid) return;
  // A result may have fewer bands than its dates.
  const bands = job && [$("left").value, $("right").value].includes("result") ? job["sader:report"].bands : scene.bands;
  for (const input of document.querySelectorAll("input[name=combination]")) input.disabled = !NEEDS[input.value].every((band) => bands.includes(band));
  let chosen = document.querySelector("input[name=combination]:checked");
  if (chosen.disabled) {
    chosen = document.querySelector("input[name=combination]:not(:disabled)");
    if (!chosen) return explain(`the bands ${bands.join(", ")} cannot be displayed; expected red, green and blue, or red and near infrared.`);
    chosen.checked = true;
  }
  const combination = chosen.value;
  const has = (layer) => !layer || layer === "mask" || (job && job["sader:report"] && job.layers?.has(layer));
  for (const input of document.querySelectorAll("input[name=overlay]")) input.disabled = !has(input.value);
  const overlay = document.querySelector("input[name=overlay]:checked:not(:disabled)")?.value ?? "";
  // Masks lie over dates, the other overlays over the result.
  const sides = ["left", "right"].map((side) => {
    const shown = $(side).value;
    const over = overlay === "mask" ? (shown === "result" ? "" : `mask-${shown}`) : shown === "result" ? overlay : "";
    return [shown, over].filter(Boolean).map((layer) => address(layer, combination));
  });
  map.setLayers(...sides);
  for (const [side, id] of [["left", "tag-left"], ["right", "tag-right"]]) {
    $(id).hidden = false;
    $(id).textContent = $(side).selectedOptions[0]?.textContent ?? "";
  }
  $("handle").hidden = false;
  for (const [index, button] of [...$("film").querySelectorAll("button")].entries()) {
    button.setAttribute("aria-pressed", String($("left").value === String(index)));
  }
  return legend(combination, sides.some((side) => side.length > 1) ? overlay : "");
}

function legend(combination, overlay) {
  const parts = [];
  if (combination === "ndvi") parts.push("NDVI", element("i", { class: "ndvi" }), element("span", {}, element("b", {}, "−0.2"), element("b", {}, "0.9")));
  if (overlay === "uncertainty") parts.push("expected error, reflectance", element("i", { class: "heat" }), element("span", {}, element("b", {}, "0"), element("b", {}, "0.05")));
  if (overlay === "mask") parts.push(element("i", { class: "mask" }), "cloud or shadow, as the files state or the model estimates it");
  if (overlay === "provenance") parts.push(element("i", { class: "reconstructed" }), "reconstructed; all other pixels were observed");
  $("legend").replaceChildren(...parts);
  $("legend").hidden = !parts.length;
}

$("read-again").addEventListener("click", (event) => attempt(event.currentTarget, async () => {
  const scale = $("scale").value.trim();
  if (scale && !Number.isFinite(Number(scale))) throw new Refusal({ detail: `scale is ${scale}; expected a number such as 0.0001.` });
  const reading = { bands: $("bands").value.trim() || null, offset: $("offset").value.trim() || null, scale: scale ? Number(scale) : null };
  await ask("PUT", `/scenes/${state.scene.id}/reading`, reading);
  await openScene(state.scene.id);
}));
for (const id of ["left", "right", "threshold", "growth", "haze"]) $(id).addEventListener("change", refresh);
for (const input of document.querySelectorAll("input[name=combination], input[name=overlay]")) input.addEventListener("change", refresh);
$("zoom-in").addEventListener("click", () => map.zoom(1.5));
$("zoom-out").addEventListener("click", () => map.zoom(1 / 1.5));
$("fit").addEventListener("click", () => map.fit());

// ------------------------------------------------------------------ values under the cursor

let timer = 0;
let last = "";
function point(pixel, byKey = false) {
  const { scene, job } = state;
  if (!pixel || !scene?.grid) return;
  const [a, b, c, d, e, f] = scene.grid.transform;
  const x = a * (pixel.column + 0.5) + b * (pixel.row + 0.5) + c;
  const y = d * (pixel.column + 0.5) + e * (pixel.row + 0.5) + f;
  const digits = scene.grid.degrees ? 6 : 0;
  const place = scene.grid.crs ? `${scene.grid.crs}  ${x.toFixed(digits)}, ${y.toFixed(digits)}  ·  ` : "";
  const pixelText = `column ${pixel.column}, row ${pixel.row}`;
  $("place").textContent = place + pixelText;
  const key = `${scene.id} ${job?.jobID} ${pixel.column} ${pixel.row}`;
  if (key === last) return;
  last = key;
  clearTimeout(timer);
  timer = setTimeout(async () => {
    const query = new URLSearchParams({ column: pixel.column, row: pixel.row });
    if (job) query.set("job", job.jobID);
    try {
      const found = await ask("GET", `/scenes/${scene.id}/values?${query}`);
      if (key !== last) return;
      showValues(found);
      // Announced to screen readers for the keyboard only: a mouse would announce without pause.
      if (byKey) $("spoken").textContent = `${pixelText}. ${spokenValues()}`;
      if (found.place) $("place").textContent = `${place}${found.place.latitude.toFixed(5)}°, ${found.place.longitude.toFixed(5)}°  ·  ${pixelText}`;
    } catch { /* the next movement asks again */ }
  }, 120);
}

function showValues(found) {
  const near = found.bands.indexOf("B08");
  const red = found.bands.indexOf("B04");
  const row = (name, values, kind) => {
    const cells = found.bands.map((band, index) => element("td", {}, values ? values[index].toFixed(4) : "–"));
    const index = values && near >= 0 && red >= 0 ? (values[near] - values[red]) / Math.max(1e-6, values[near] + values[red]) : null;
    return element("tr", { class: kind ?? "" }, element("th", { scope: "row" }, name), ...cells, element("td", {}, index === null ? "–" : index.toFixed(3)));
  };
  const side = (id) => {
    const value = $(id).value;
    if (value === "result") return row(resultName(found), found.result, "result");
    return row(dayOf(state.scene.dates[Number(value)], Number(value)), found.dates[Number(value)]);
  };
  const rows = [side("left"), ...($("right").value === $("left").value ? [] : [side("right")])];
  if (found.uncertainty && [$("left").value, $("right").value].includes("result")) {
    const spread = found.uncertainty.map((value) => (value === null ? 0 : value));
    const created = row("± standard deviation", spread);
    created.lastChild.textContent = "";
    rows.push(created);
  }
  const head = element("tr", {}, element("th", { scope: "col" }, "reflectance"), ...found.bands.map((band) => element("th", { scope: "col" }, band)), element("th", { scope: "col" }, "NDVI"));
  $("values").replaceChildren(element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows)));
}

function spokenValues() {
  const heads = [...$("values").querySelectorAll("thead th")].map((cell) => cell.textContent);
  const rows = [...$("values").querySelectorAll("tbody tr")];
  return rows.map((row) => [...row.cells].map((cell, at) => (at ? `${heads[at]} ${cell.textContent}` : cell.textContent)).join(", ")).join(". ");
}

function resultName(found) {
  const code = found.provenance?.[0];
  return code === 2 ? "Result (reconstructed)" : code === 1 ? "Result (observed)" : "Result";
}

// ------------------------------------------------------------------ a job

$("run").addEventListener("click", (event) => attempt(event.currentTarget, async () => {
  const inputs = { scene: state.scene.id, reference: $("reference").value, uncertainty: true, provenance: true, report: true, seed: Number($("seed").value || 0) };
  const { threshold, growth, haze } = maskSettings();
  Object.assign(inputs, { cloud_threshold: threshold, mask_growth: growth, haze });
  if ($("mask").value) inputs.mask = $("mask").value;
  if ($("steps").value.trim()) inputs.steps = $("steps").value.trim();
  const job = await ask("POST", "/processes/remove-clouds/execution", { inputs }, { Prefer: "respond-async" });
  await follow(job, true);
}));

async function follow(job, pressed = false) {
  state.running = job.jobID;
  $("run").disabled = true;
  $("working").hidden = false;
  $("working").scrollIntoView({ block: "nearest" });
  $("result-section").hidden = true;
  const begun = Date.parse(job.created);
  $("cancel").disabled = false;
  if (pressed) $("cancel").focus({ preventScroll: true }); // the pressed button is disabled now
  let spoken = "";
  try {
    while (["accepted", "running"].includes(job.status)) {
      $("progress").value = job.progress;
      const seconds = Math.max(0, Math.round((Date.now() - begun) / 1000));
      $("progress-text").textContent = `${job.message}, ${job.progress} % (${seconds} s)`;
      // Announced at new stages and every 20 percent, not every second.
      const said = `${job.message.replace(/, tile .*/, "")}, ${20 * Math.floor(job.progress / 20)} percent`;
      if (said !== spoken) $("progress-spoken").textContent = spoken = said;
      await new Promise((resolve) => setTimeout(resolve, 400));
      job = await ask("GET", `/jobs/${job.jobID}`);
    }
  } finally {
    // A hidden button loses the focus; it returns to the button that started the job.
    const within = pressed && ($("working").contains(document.activeElement) || document.activeElement === document.body);
    $("working").hidden = true;
    $("progress-spoken").textContent = "";
    $("run").disabled = false;
    if (within) $("run").focus({ preventScroll: true });
    state.running = null;
  }
  job["sader:notices"].forEach(note);
  if (job.status === "failed") throw new Refusal({ detail: job.message });
  if (job.status === "dismissed") {
    $("upload-status").textContent = "";
    $("result-section").hidden = false;
    $("downloads").replaceChildren();
    $("result-text").textContent = "Cancelled. No result was stored.";
    return;
  }
  const results = await ask("GET", `/jobs/${job.jobID}/results`);
  showResult(job, results);
  remember();
  earlier();
}

$("cancel").addEventListener("click", async () => {
  if (!state.running) return;
  $("cancel").disabled = true;
  try {
    await ask("DELETE", `/jobs/${state.running}`);
  } catch (error) {
    explain(error.message);
  }
});

const NAMES = {
  clear: ["Cloud-free image", "Cloud Optimized GeoTIFF"],
  uncertainty: ["Uncertainty", "GeoTIFF, expected error"],
  provenance: ["Provenance", "GeoTIFF, 1 observed, 2 reconstructed"],
  count: ["Clear observations", "GeoTIFF"],
  item: ["STAC Item", "JSON"],
  preview: ["Preview", "PNG with all dates"],
  report: ["Report", "HTML page with images, masks and statistics"],
};

function showResult(job, results) {
  const report = job["sader:report"];
  job.layers = new Set(Object.keys(results));
  state.job = job;
  last = "";
  const total = Object.values(report.pixels).reduce((sum, count) => sum + count, 0) || 1;
  const share = (name) => `${(100 * (report.pixels[name] ?? 0) / total).toFixed(1)} %`;
  const at = state.scene.dates.findIndex((date) => date.name === report.reference);
  const cleaned = at >= 0 ? `${dayOf(state.scene.dates[at], at)} cleaned` : "Composite of all dates";
  $("result-text").textContent = `${cleaned}: ${share("observed")} observed, ${share("reconstructed")} reconstructed, in ${report.seconds.toFixed(0)} s with ${report.model}.`;
  $("downloads").replaceChildren(...Object.keys(NAMES).filter((name) => job.layers.has(name)).map((name) => element("li", {},
    element("a", { href: `/jobs/${job.jobID}/results/${name}`, download: name === "item" ? `sader_${report.date || "result"}_item.json` : "", id: `get-${name}` }, `↓ ${NAMES[name][0]}`, element("small", {}, NAMES[name][1])))));
  $("result-section").hidden = false;
  fillSides(at >= 0 ? String(at) : "0", "result");
  refresh();
  // In a narrow window the image is above the settings.
  (matchMedia("(max-width: 760px)").matches ? document.querySelector("header") : $("result-section")).scrollIntoView({ block: "nearest" });
}

async function earlier() {
  const { jobs } = await ask("GET", "/jobs?status=successful&limit=8");
  const rows = jobs.filter((job) => job["sader:scene"]).map((job) => element("li", {}, element("button", {
    type: "button", onclick: (event) => attempt(event.currentTarget, () => openJob(job.jobID)),
  }, job.finished.slice(0, 16).replace("T", " "), element("small", {}, `${job["sader:report"].dates.length} dates, ${job["sader:report"].size[1]} × ${job["sader:report"].size[0]}`))));
  $("earlier").replaceChildren(...rows);
  $("earlier-section").hidden = !rows.length;
}

async function openJob(id) {
  const job = await ask("GET", `/jobs/${id}`);
  if (!job["sader:scene"]) throw new Refusal({ detail: "this job was not started from a scene on this page; its files are listed in its results." });
  await openScene(job["sader:scene"]);
  if (job.status === "successful") showResult(job, await ask("GET", `/jobs/${id}/results`));
  else await follow(job);
  remember();
}

// ------------------------------------------------------------------ start

function remember() {
  const place = state.job ? `#job=${state.job.jobID}` : state.scene?.grid ? `#scene=${state.scene.id}` : "";
  history.replaceState(null, "", `${location.pathname}${place}`);
}

async function begin() {
  const session = await ask("GET", "/session");
  if (!session.open) return login();
  await attempt(null, async () => {
    await earlier();
    const [kind, id] = location.hash.slice(1).split("=");
    if (kind === "job" && id) await openJob(id);
    else if (kind === "scene" && id) await openScene(id);
  });
  document.body.dataset.ready = "yes";
  return undefined;
}

attempt(null, begin);
