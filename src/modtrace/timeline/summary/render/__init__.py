"""A summary as text, Markdown, HTML, CSV and JSON: one file per form."""
