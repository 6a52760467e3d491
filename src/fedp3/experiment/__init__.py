"""From a config to everything that a run needs.

- `assemble`: from a config, or from a user's network and data, to an `Experiment`.
- `own_settings`: settings of a run of a user's own network and data.
- `experiment`: a run that is ready to start, and what can be derived from it.
- `client_samples`: which samples each client has.
- `compatibility`: refusals of networks, data and hooks that do not fit together.
- `device_plans`: plans of a fleet of devices.
- `budgets`: noise and budget under differential privacy.
- `fingerprint`: what must be the same when a run is resumed.
- `stretches`: a schedule of layers as rounds in a row with the same plans.
"""
