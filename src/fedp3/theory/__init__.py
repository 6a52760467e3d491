"""The paper's theory as experiments: sketches, problems, and Theorems 1-3 with their constants checked.

`app` is the command line (`fedp3 theory NAME`); `docs/theory.md` tells what each experiment shows and
`docs/errata.md` lists where the printed statements differ from what holds.
"""
