"""The `tandem` command.

__main__.py, main.py, parser.py  entry point; each subcommand has a module, most of them one of its name:
up.py                            a mesh in the foreground, also as `tandem serve`
  up_arguments.py                its command line
  up_settings.py                 its settings, and those of the services
  low_code.py, low_code_keys.py, low_code_values.py  settings from the configuration of LMI, SageMaker and TGI
  deployment.py, hardware.py     models, workers, cores, devices and flags of the services
  preparation.py                 download, partition, and what a deployment takes from the services' settings
  launcher.py, on_ray/           where services run: processes of this machine, or workers on a Ray cluster
  supervisor.py, scaling.py      keep the services running; add and remove workers
  service_log.py                 keeps what services log
  display.py                     progress, the table of services, warnings
local_meshes.py                  ps, stop, logs: meshes on this machine
workers.py                       workers, drain, undrain, switch
models.py                        models, traffic
generate.py, chat.py             answers in the terminal
keys.py                          API keys
bench.py                         the load test (load_test/)
plan.py                          memory, speed and workers by formula (capacity/)
simulate.py                      a trace of requests in virtual time (simulation/)
optimize.py                      the best way to serve a model with given prompts (optimization/)
breakdown.py                     the phases of sample requests
convert.py, compile.py, partition.py, quantize.py  work ahead of time; what needs the engine is in modules beside them
model_folders.py                 finds models
completion.py                    what shells need to complete command lines
connection.py, terminal.py       what commands share: arguments for a running mesh, output
"""
