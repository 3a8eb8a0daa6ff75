// Talks to the server: which model there is, and a chat as a stream of chunks. Knows nothing of the page.

export class ApiError extends Error {
  constructor(message, { status = 0, retryAfterS = null, isAway = status === 503 } = {}) {
    super(message);
    this.status = status;
    this.retryAfterS = retryAfterS;
    this.isAway = isAway; // the server is not there, or not yet
  }
}

const UNREACHABLE = "The server cannot be reached.";
const NO_KEY = "This is no API key: it has letters that no HTTP header may hold.";
const BROKEN_OFF = "The answer broke off.";

// The name of the model that is served. ApiError, of status 401 where a key is needed.
export async function fetchModel(key) {
  const response = await call("v1/models", { headers: headersFor(key) });
  const models = await response.json();
  return models.data[0].id;
}

// The chunks of a streamed chat completion, as objects. ApiError when it fails, before or after the first chunk.
export async function* streamChat(body, key, signal) {
  const response = await call("v1/chat/completions", {
    method: "POST",
    headers: { ...headersFor(key), "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message);
    yield chunk;
  }
  throw new ApiError(BROKEN_OFF);
}

function headersFor(key) {
  if (/[^ -~]/.test(key)) throw new ApiError(NO_KEY);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function call(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    throw error.name === "AbortError" ? error : new ApiError(UNREACHABLE, { isAway: true });
  }
  if (response.ok) return response;
  const wait = response.headers.get("retry-after");
  throw new ApiError(await messageOf(response), { status: response.status, retryAfterS: wait && Number(wait) });
}

async function messageOf(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `The server answered ${response.status}.`; // something between us and the server did
  }
}

// The data of each server-sent event; the server writes every event on one line.
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data: ")) yield line.slice("data: ".length);
      }
    }
  } catch (error) {
    throw error.name === "AbortError" ? error : new ApiError(BROKEN_OFF);
  } finally {
    await reader.cancel().catch(() => {}); // whoever stops reading ends the request
  }
}
