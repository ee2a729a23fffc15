"""Pictures of a plan for papers and slides: Graphviz source, graph and timeline as SVG, PNG, PDF."""
