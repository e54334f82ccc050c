// Which view is shown and with what: kept in the address behind "#", so that back, forward and copies of it work.

/** The view and its parameters: "#samples?run=a&kind=train" is ["samples", {run: "a", kind: "train"}]. */
export function place() {
  const [view, query] = decodeURI(location.hash.slice(1) || "runs").split("?");
  return [view, Object.fromEntries(new URLSearchParams(query || ""))];
}

/** The address of a view; parameters that are empty are left out. */
export function address(view, parameters = {}) {
  const given = Object.entries(parameters).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const query = new URLSearchParams(given).toString();
  return `#${view}${query ? `?${query}` : ""}`;
}

/** Change the address without a step in the browser's history, and without showing the view anew. */
export function keepInAddress(view, parameters) {
  history.replaceState(null, "", address(view, parameters));
}
