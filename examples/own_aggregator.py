"""Add an aggregator of your own: the median of each coordinate over the clients that uploaded it.

As a file of a run:  fedp3 run my.toml aggregate.rule=median --use examples/own_aggregator.py
"""

import torch

import fedp3


@fedp3.register.aggregator("median")
def median(settings: fedp3.AggregateSettings, spec: fedp3.RunSpec) -> fedp3.Aggregator:
    def apply(W, updates, state):
        received, new = list(updates), dict(W)
        for layer in spec.layers.layers:
            for name, uploads in fedp3.uploads_of(received, layer, spec).items():
                masked = [
                    w.masked_fill(~fedp3.as_bool(m, w.shape), torch.nan) for _, w, m in uploads
                ]
                middle = torch.stack(masked or [W[name]]).nanmedian(0).values
                new[name] = torch.where(middle.isnan(), W[name], middle)  # nobody uploaded it
        return new, state

    return fedp3.Aggregator(apply=apply)


def main() -> fedp3.Result:
    net = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
    )
    run = {"rounds": 20, "clients_per_round": 8, "eval_every": 10}
    train = {"aggregate": {"rule": "median"}, "plan": {"layers": "full"}, "local": {"lr": 0.2}}
    result = fedp3.run(net, fedp3.load_dataset("digits"), run=run, **train)
    print(f"accuracy {100 * result.accuracy['G']:.1f} %")
    return result


if __name__ == "__main__":
    main()
