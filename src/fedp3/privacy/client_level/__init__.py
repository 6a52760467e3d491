"""Client-level differential privacy: a trusted server adds noise to what it releases.

It is another promise than LDP, to other people, and the two are never enabled together:
`docs/privacy.md` compares them.

- `settings`: the [client_privacy] section of a config.
- `mechanism`: the release of one round: sampled clients, one clip for each, noise, fixed divisors.
- `budget`: the noise of a run, what it may cost, and the ledger of its releases.
- `requirements`: every reason to refuse a run in this mode that the config alone does not show.
- `disclosure`: the statement: who is protected from whom, what epsilon covers and what it does not.
"""
