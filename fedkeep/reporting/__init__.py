"""Run folders and archives read back: tables, figures, the HTML report, pages of reproductions."""
