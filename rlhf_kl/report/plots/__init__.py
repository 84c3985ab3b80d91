"""Pictures: a chart is described once and drawn as a PNG or as SVG for a page."""
