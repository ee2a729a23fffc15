// What the page takes from its graph libraries, as the global `graphs`.
import cytoscape from "cytoscape";
import { graphlib, layout } from "@dagrejs/dagre";

const Graph = graphlib.Graph;

export { cytoscape, Graph, layout };
