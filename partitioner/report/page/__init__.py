"""The report: one HTML file that shows a plan, and the data in it."""
