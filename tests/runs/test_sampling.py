"""Text from a trained and from an exported language model, with adapters merged."""

import json
from pathlib import Path

import pytest
import torch

import hf_folders
from fedp3 import api
from fedp3.cli import main
from fedp3.core.errors import InputError
from fedp3.runs import export
from fedp3.runs.networks import network, read_trained
from fedp3.runs.sampling import LanguageModel, read_language_model, write_text

PLAY = Path(__file__).parents[1] / "play.txt"
SMALL = (
    "method=ffa-lora", "adapter.rank=3", "data.name=text", "partition.kind=iid",
    "partition.clients=3", "run.clients_per_round=3", "run.rounds=1", "run.final_p=false",
    "local.steps=2", "local.batch=4", "local.lr=0.5", "data.length=12",
)  # fmt: skip
GPT = ("model.name=gpt", "model.width=0.125", "model.blocks=2", f"data.path={PLAY}")


def trained(folder: Path, *more: str) -> Path:
    from fedp3.engines.catalogue import make_engine
    from fedp3.experiment.assemble import assemble
    from fedp3.runs import session

    config = api.make_config(*SMALL, *more)
    session.train(assemble(config), folder, lambda e, states: make_engine(e, 1, states=states))
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("gpt") / "run", *GPT)


def test_the_likeliest_and_a_drawn_text_are_those_of_a_plain_loop(run: Path) -> None:
    net = network(read_trained(run), "global")
    assert {n for n, _ in net.named_parameters()} >= {
        "blocks.0.attention.qkv.weight",
        "head.weight",
    }
    model = read_language_model(run)
    tokens = list(b"Hello, ")
    for _ in range(30):
        with torch.no_grad():
            tokens.append(int(net(torch.tensor([tokens[-12:]]))[0, -1].argmax()))
    assert write_text(model, "Hello, ", 30, 0.0, 0) == bytes(tokens).decode(errors="replace")
    texts = [write_text(model, "Hello, ", 30, 1.0, seed) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2] and all(t.startswith("Hello, ") for t in texts)


def test_tokens_are_drawn_by_their_chances_at_each_temperature() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0]).log_softmax(0)
    model = LanguageModel(
        logits=lambda tokens: logits,
        context=1,
        encode=lambda text: [0],
        decode=lambda tokens: "".join(map(str, tokens)),
    )
    for temperature in (0.5, 1.0, 3.0):
        text = write_text(model, "x", 4000, temperature, 0)[1:]
        want = torch.softmax(logits / temperature, 0)
        for token in range(3):
            assert abs(text.count(str(token)) / 4000 - float(want[token])) < 0.03


def test_an_export_writes_the_same_text_and_holds_the_merged_weights(
    run: Path, tmp_path: Path
) -> None:
    about = export.export(read_trained(run), tmp_path / "pt2")
    assert about["parameters"] == about["parameters_of_the_global_network"]
    want = write_text(read_language_model(run), "Hello, ", 20, 0.0, 0)
    assert write_text(read_language_model(tmp_path / "pt2"), "Hello, ", 20, 0.0, 0) == want
    export.export(read_trained(run), tmp_path / "st", format="safetensors")
    from safetensors.torch import load_file

    stored = load_file(tmp_path / "st" / "model.safetensors")
    assert stored.keys() == network(read_trained(run), "global").state_dict().keys()
    with pytest.raises(InputError, match="holds weights and no network; export as pt2 or hf"):
        read_language_model(tmp_path / "st")


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_folder_of_merged_adapters_is_loaded_by_transformers(kind: str, tmp_path: Path) -> None:
    import transformers

    folder = hf_folders.folder(tmp_path / "model", kind)
    text = hf_folders.write_text(tmp_path / "words.txt")
    run = trained(tmp_path / "run", "model.name=hf", f"model.path={folder}", f"data.path={text}")
    about = export.export(read_trained(run), tmp_path / "out", format="hf")
    assert about["difference"] < 1e-5
    ours = network(read_trained(run), "global")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokens = torch.arange(24).view(2, 12) % hf_folders.VOCABULARY
    with torch.no_grad():
        assert torch.allclose(ours(tokens), theirs(tokens).logits, atol=1e-5)
    before = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():  # and training did something
        assert not torch.allclose(before(tokens).logits, theirs(tokens).logits, atol=1e-4)
    texts = [
        write_text(read_language_model(place), "red cat", 8, 0.0, 0)
        for place in (run, tmp_path / "out")
    ]
    assert texts[0] == texts[1] and texts[0].startswith("red cat ")


def test_the_command_prints_the_text(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--prompt", "Hello", "--length", "5", "--seed", "3", "--json"]
    with pytest.raises(SystemExit) as ended:
        main(["sample", str(run), *options])
    assert ended.value.code == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["text"] == write_text(read_language_model(run), "Hello", 5, 1.0, 3)


def test_models_that_write_no_text_are_refused(tmp_path: Path, run: Path) -> None:
    other = trained(
        tmp_path / "r", "method=fedavg", "adapter.rank=8", "data.length=64", "data.name=digits"
    )
    with pytest.raises(InputError, match="is a run on 'digits'; only a model"):
        read_language_model(other)
    with pytest.raises(InputError, match="the prompt is empty"):
        write_text(read_language_model(run), "", 5, 1.0, 0)
