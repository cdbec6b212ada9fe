"""The `tandem` command.

__main__.py, main.py, parser.py  entry point; each subcommand is the module of its name:
up.py                            a mesh in the foreground, also as `tandem serve`
  up_arguments.py                its command line
  up_settings.py                 its settings, and those of the services
  low_code.py, low_code_keys.py, low_code_values.py  settings from the configuration of LMI, SageMaker and TGI
  deployment.py, cores.py        models, workers, cores and flags of the services
  download_limit.py              the time limit of a download
  supervisor.py, child.py        the services' processes; service_log.py keeps what they log
  launcher.py, on_ray/           where they run: on this machine, or workers on a Ray cluster
  display.py                     progress, the table of services, warnings
ps.py, stop.py, logs.py          meshes on this machine, by the files of running.py
generate.py, chat.py             answers in the terminal
workers.py, models.py            what the mesh has
keys.py                          API keys
bench.py                         the load test (load_test/)
plan.py                          memory, speed and workers by formula (capacity/)
breakdown.py                     the phases of sample requests
partition.py                     weights ahead of time (partition_model.py)
completion.py                    what shells need to complete command lines
connection.py, terminal.py       what commands share: arguments for a running mesh, output
"""
