"""`tandem optimize`: finds the fastest way to serve a model within limits, with the user's prompts.

candidates.py    what can be tried: precision x speculation x workers
recipe.py        the recipe: what shall be tried, and the limits; from flags and a TOML file
pruning.py       candidates that cannot run here, each with the reason: device, family, memory
questions.py     the user's prompts, references and judge
checkpoints.py   quantised checkpoints, made when a candidate needs them
subject.py       the model on this machine: what can be tried
command.py       the parts together
trial.py         measures a candidate and judges its precision: the five files below
serving.py       serves one candidate with `tandem up` in a child process and loads it
other_load.py    what other processes use of the cores meanwhile
quality.py       next-token distributions of a precision beside those of the base
search.py        successive halving; what was measured is kept in a file, so that an interrupted run goes on
choice.py        limits, Pareto front, the choice
result.py        OUT: serving.properties, checkpoint, report.json, report.md
plot.py          the plot, as SVG
progress.py      lines on standard error, and the time that is left
"""
