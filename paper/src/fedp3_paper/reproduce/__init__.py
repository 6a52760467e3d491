"""The paper's tables and figures (Section 3) as data.

`targets` lists the runs behind each table, `published` has the paper's values, and `claims` judges
what the paper says about them.
"""
