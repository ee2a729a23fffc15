"""Pictures of a plan for papers and slides: Graphviz, and graph and timeline as SVG, PNG, PDF."""
