"""Local differential privacy (LDP): mechanism, accounting and refusals, and attacks on all of it.

- `settings`: the [privacy] section of a config, and the mechanism that it resolves to.
- `mechanism`: one private step; `clipping` clips the gradient of each record.
- `per_record`: proof that a network computes each record by itself, which ghost clipping needs.
- `made_up`: records like a data set's own, on which networks are tried out.
- `accountant`: the epsilon of many steps, and the noise that a target epsilon needs.
- `budget`: what a run may cost each client; `ledger` records what each client has spent, and
  `record_ledger` what several runs cost each record.
- `statement`: the document about a run that a reviewer signs.
- `requirements`: every reason to refuse a run under LDP; `trial` tries a network out for them.
- `disclosure`: what a reader of a run must know about its privacy.
- `audit`: attacks on the code that runs.
- `client_level`: another mode, in which a trusted server adds the noise.
"""
