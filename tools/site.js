// The theme puts wide tables into areas that scroll, when the page has loaded: those who scroll with keys must reach them.
// It also makes a landmark without a name of the button that copies a block of code, of which a page has many,
// and gives the search's dialog no name.
new MutationObserver(() => {
  for (const area of document.querySelectorAll(".md-typeset__scrollwrap:not([tabindex])")) {
    area.tabIndex = 0;
    area.setAttribute("role", "group");
    area.setAttribute("aria-label", "Table");
  }
  for (const buttons of document.querySelectorAll(".md-code__nav:not([role])")) buttons.setAttribute("role", "none");
  for (const search of document.querySelectorAll(".md-search:not([aria-label])")) search.setAttribute("aria-label", "Search");
}).observe(document, { childList: true, subtree: true });
