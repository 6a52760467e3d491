"""Attacks on the code that runs under LDP.

- `attacks`: what is measured, and the limits it must stay within.
- `neighbours`: neighbouring data sets, with and without one canary record.
- `bounds`: the epsilon that a test of two neighbours proves.
"""
