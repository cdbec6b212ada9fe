// Calls to the gateway with the user's API key, which is stored for this tab only.

import { tab } from "./remembered.js";

const KEY = "tandem-api-key";

export const savedKey = () => tab.get(KEY) ?? "";
export const saveKey = (key) => tab.set(KEY, key);

/** An error response of the gateway; status 0 if there was no response. */
export class Refusal extends Error {
  constructor(status, message, response = null) {
    super(message);
    this.status = status;
    this.retryAfter = response?.headers.get("retry-after") ?? null;
    this.requestId = response?.headers.get("x-request-id") ?? null;
  }
}

const STATUS = { unavailable: 503, timeout: 504, rate_limit_exceeded: 429, invalid_api_key: 401, model_not_found: 404 };

/** The status that an error would have had, had it come before the stream began. */
const statusOf = ({ code, type }) => STATUS[code] ?? (type === "invalid_request_error" ? 400 : 500);

async function call(path, options) {
  const key = savedKey();
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  let response;
  try {
    response = await fetch(path, { ...options, headers: { ...headers, ...options.headers } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal(0, "The gateway cannot be reached.");
  }
  if (!response.ok) {
    const body = await response.json().catch(() => ({}));
    const message = body.error?.message ?? body.error ?? body.message ?? `The gateway answered ${response.status}.`;
    throw new Refusal(response.status, String(message), response);
  }
  return response;
}

const jsonBody = (body, signal) => ({
  method: "POST",
  body: JSON.stringify(body),
  headers: { "content-type": "application/json" },
  signal,
});

export const get = async (path) => (await call(path, {})).json();
export const post = async (path, body, signal) => (await call(path, jsonBody(body, signal))).json();

const SILENCE_MS = 45_000; // the gateway sends something at least every 15 s

/** What a promise gives. If that takes too long, the connection is dead, though nobody said so: it is given up. */
function inTime(promise, connection) {
  let timer = null;
  const late = new Promise((_, refuse) => {
    timer = setTimeout(() => {
      refuse(new Refusal(0, `Nothing has come for ${SILENCE_MS / 1000} s.`));
      connection.abort();
    }, SILENCE_MS);
  });
  return Promise.race([promise, late]).finally(() => clearTimeout(timer));
}

/** The objects of a stream of server-sent events, until [DONE]. Throws Refusal for an error event. */
export async function* stream(path, body, signal) {
  signal.throwIfAborted();
  const connection = new AbortController();
  signal.addEventListener("abort", () => connection.abort(), { once: true });
  const response = await inTime(call(path, jsonBody({ ...body, stream: true }, connection.signal)), connection);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await inTime(reader.read(), connection).catch((error) => {
        if (signal.aborted || error instanceof Refusal) throw error;
        throw new Refusal(0, "The connection to the gateway was lost.", response);
      });
      if (done) throw new Refusal(0, "The answer ended before it was complete.", response);
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        if (!event.startsWith("data: ")) continue; // a comment that keeps the connection open
        const data = event.slice(6);
        if (data === "[DONE]") return;
        const object = JSON.parse(data);
        if (object.error) throw new Refusal(statusOf(object.error), object.error.message, response);
        yield object;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
