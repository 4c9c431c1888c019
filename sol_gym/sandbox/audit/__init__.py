"""The audit: reads a solution's source text and says what it sees. Nothing is run or imported.

It looks for what execution cannot show: intent, hidden code, attempts on other processes. It
explains; it vetoes only what has no honest use in a kernel; and it is never the only defence. The
judge takes the ground from under a cheat whether the audit knows it or not, so a rule that can be
evaded costs nothing, and a rule that strikes an honest kernel would cost the trust of every author.

`rules.py` is the list of rules, `names.py` the tables they read, `python.py` (over `resolve.py`)
and `cpp.py` the two readers, `text.py` what both share, `llm.py` the optional opinion of a
language model.
"""

from .rules import RULES, Rule
from .scan import audit, audit_text, vetoes

__all__ = ["RULES", "Rule", "audit", "audit_text", "vetoes"]
