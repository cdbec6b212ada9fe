"""The `tandem` command.

__main__.py, main.py, parser.py  entry point; each subcommand has a module, most of them one of its name:
up.py                            a mesh in the foreground, also as `tandem serve`
  configuration/                 its command line and settings, also from the configuration of LMI, SageMaker and TGI
  local_mesh/                    its services: workers, cores, ports; processes that are started, watched, started again
  on_ray/                        workers on a Ray cluster instead
local_meshes.py                  ps, stop, logs: meshes on this machine
workers.py                       workers, drain, undrain, switch
models.py                        models, traffic
generate.py, chat.py             answers in the terminal
keys.py                          API keys
batch.py                         a file of requests, answered with idle capacity (gateway/batches/)
bench.py                         the load test (load_test/)
plan.py                          memory, speed and workers by formula (capacity/)
simulate.py                      a trace of requests in virtual time (simulation/)
optimize.py                      the best way to serve a model with given prompts (optimization/)
breakdown.py                     the phases of sample requests
convert.py, compile.py, partition.py, quantize.py  work ahead of time (model_files/)
completion.py                    what shells need to complete command lines
connection.py, terminal.py       what commands share: arguments for a running mesh, output
"""
