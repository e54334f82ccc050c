// What is shown is in the address behind "#", so that Back, Forward, copies of it and loading it again work: the view,
// the chosen runs, and the parameters of the view.

/** The view and its parameters: "#samples?runs=a%2Cb&kind=train" is ["samples", {runs: "a,b", kind: "train"}]. */
export function place() {
  const [view, query] = location.hash.slice(1).split("?");
  return [view || "runs", Object.fromEntries(new URLSearchParams(query || ""))];
}

/** The address of a view with the runs that are chosen now; parameters that are empty are left out. */
export function address(view, parameters = {}) {
  const all = { runs: place()[1].runs, ...parameters };
  const query = new URLSearchParams(Object.entries(all).filter(([, value]) => value !== "" && value !== null && value !== undefined));
  return `#${view}${query.size ? `?${query}` : ""}`;
}

/** Change the address without showing the view anew; "Back" leads to the address before, unless it replaces that one. */
export function keepInAddress(view, parameters, replaces = false) {
  const next = address(view, parameters);
  if (next !== location.hash) history[replaces ? "replaceState" : "pushState"](null, "", next);
}

/** What this browser remembers for every `verl view` on this machine: cookies do not know ports, and ports differ. */
export function remembered(name) {
  const found = document.cookie.split("; ").find((one) => one.startsWith(`verl_view_${name}=`));
  try {
    return JSON.parse(decodeURIComponent(found.slice(found.indexOf("=") + 1)));
  } catch {
    return null;  // there is none, or another page of this host wrote it
  }
}

export function remember(name, value) {
  document.cookie = `verl_view_${name}=${encodeURIComponent(JSON.stringify(value))}; path=/; max-age=31536000; samesite=strict`;
}
