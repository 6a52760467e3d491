"""Attacks on the code that runs under LDP, over the whole life of a release.

- `audit`: what is audited, and the table of parts.
- `findings`: a check, and the probability that correct code fails it.
- `neighbours`: neighbouring data sets, with and without one canary record.
- `sensitivity`, `noise`, `sampling`, `distinguishing`: attacks on `local_update`.
- `rehearsal`: whole runs on made-up records; `charging` and `releases` attack what leaves them.
- `accounting`: the accountant against `bounds`, which are computed in another way.
"""
