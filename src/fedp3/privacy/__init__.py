"""LDP-FedP3: the mechanism, what it costs each client, and evidence that it does what it says.

`mechanism` is one private step, `clip` its per-example clipping, `account` the epsilon of many steps, `ledger` who has
spent what, `rules` what is refused or warned of before training, `audit` attacks on the code that runs.
"""
