"""`fedp3 sample`: text from a language model."""

from pathlib import Path
from typing import Annotated

import typer

from fedp3.cli import terminal
from fedp3.cli.options import AsJson, DataDir


def sample(
    folder: Annotated[Path, typer.Argument(help="Run folder, or an export of one as pt2 or hf")],
    prompt: Annotated[str, typer.Option("--prompt", help="Beginning of the text")] = "\n",
    length: Annotated[
        int, typer.Option("--length", min=1, max=100_000, help="Characters or tokens to add")
    ] = 200,
    temperature: Annotated[
        float,
        typer.Option("--temperature", min=0.0, max=100.0, help="0 always takes the likeliest"),
    ] = 1.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="What tokens are drawn from")] = 0,
    data_dir: DataDir = None,
    json: AsJson = False,
) -> None:
    """Let a language model that was trained with fedp3 continue a text.

    The same model, prompt and seed give the same text.

    Example: fedp3 sample runs/a --prompt "First Citizen:" --length 300 --temperature 0.8
    """
    from fedp3.runs.sampling import read_language_model, write_text

    text = write_text(read_language_model(folder, data_dir), prompt, length, temperature, seed)
    if json:
        terminal.as_json({"text": text, "prompt": prompt, "seed": seed})
        return
    print(text)
