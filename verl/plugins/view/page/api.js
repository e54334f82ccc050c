// Questions to the server, and its news.

/** Ask for JSON. Values of parameters that are empty are left out; a list repeats its name. */
export async function ask(path, parameters = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== "" && one !== null && one !== undefined) query.append(name, one);
    }
  }
  const answer = await fetch(`/api/${path}?${query}`);
  const body = await answer.json().catch(() => ({ error: `the server answered ${answer.status}` }));
  if (!answer.ok) throw new Error(body.error);
  return body;
}

/** Call back with the ids of runs that have something new. */
export function onNews(tell, connected) {
  const source = new EventSource("/api/events");
  source.onmessage = (event) => tell(JSON.parse(event.data).changed);
  source.onopen = () => connected(true);
  source.onerror = () => connected(false);
}
