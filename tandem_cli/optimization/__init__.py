"""`tandem optimize`: finds the fastest way to serve a model within limits, with the user's prompts.

candidates.py       what can be tried: precision x speculation x workers; and what cannot run here, with the reason
recipe.py           the recipe: what shall be tried, and the limits; from flags and a TOML file
questions.py        the user's prompts, references and judge
subject.py          the model on this machine: what can be tried; quantised checkpoints, made when needed
command.py          the parts together
candidate_trial.py  measures a candidate, and compares its precision with the base
serving.py          serves one candidate with `tandem up` in a child process and loads it
search.py           successive halving; what was measured is kept in a file, so that an interrupted run goes on
choice.py           limits, Pareto front, the choice
result.py           OUT: serving.properties, checkpoint, report.json, report.md
plot.py             the plot, as SVG
progress.py         lines on standard error, and the time that is left
"""
