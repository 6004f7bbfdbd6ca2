"""Findings: what stands out in a summary, ranked by how much of a step it explains; a file for each kind of rule.

Rules measure nothing: all figures are the summary's own, and what `Measured` joins to it.
"""

from .costs import low_mfu as low_mfu
from .finding import TRACE as TRACE
from .finding import Finding as Finding
from .finding import closing_line as closing_line
from .finding import findings_lines as findings_lines
from .finding import findings_markdown as findings_markdown
from .finding import findings_table as findings_table
from .measured import Measured as Measured
from .rank import find_findings as find_findings
from .rank import looked_at as looked_at
