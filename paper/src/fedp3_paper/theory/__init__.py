"""The paper's theory as experiments: sketches, problems, and Theorems 1-3 with their constants.

`app` is the command line (`fedp3 theory NAME`).  `paper/pages/theory.md` describes what each
experiment shows, and `paper/pages/errata.md` lists where printed statements differ from what holds.
"""
