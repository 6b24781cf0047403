// The theme puts wide tables into areas that scroll, when the page has loaded. Those who scroll with keys must reach them.
new MutationObserver(() => {
  for (const area of document.querySelectorAll(".md-typeset__scrollwrap:not([tabindex])")) {
    area.tabIndex = 0;
    area.setAttribute("role", "group");
    area.setAttribute("aria-label", "Table");
  }
}).observe(document, { childList: true, subtree: true });
