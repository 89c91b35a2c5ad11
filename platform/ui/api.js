// Calls to the platform that served this page.

const KEY_NAME = "remora-key";

/** An answer with an error, or none at all (status 0). */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** The key is kept for this tab only. */
export function setKey(key) {
  sessionStorage.setItem(KEY_NAME, key);
}

/** The JSON at a path; `query` holds parameters, of which empty ones are left out. Throws ApiError. */
export async function get(path, query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== "" && value !== null && value !== false);
  const key = sessionStorage.getItem(KEY_NAME);
  let response;
  try {
    response = await fetch(given.length ? `${path}?${new URLSearchParams(given)}` : path, {
      headers: key ? { authorization: `Bearer ${key}` } : {},
      signal: AbortSignal.timeout(8000),
    });
  } catch {
    throw new ApiError(0, "no answer");
  }
  const document = await response.json().catch(() => null);
  if (!response.ok) throw new ApiError(response.status, document?.error?.message ?? response.statusText);
  return document;
}
