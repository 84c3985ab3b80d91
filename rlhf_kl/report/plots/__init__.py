"""Pictures: a chart is defined once and drawn as a PNG, or as SVG for a page."""
