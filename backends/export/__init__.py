"""Plans in the forms of other tools: a writer and a checker each, which load none of the tools."""
