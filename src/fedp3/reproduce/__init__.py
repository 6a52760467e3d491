"""The paper's tables and figures as data: cells to run, published values beside ours, claims judged (Section 3)."""
