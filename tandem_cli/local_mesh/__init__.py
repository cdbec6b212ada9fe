"""The work of `tandem up`: the processes of a mesh on this machine, their cores, ports, logs and restarts.

deployment.py, hardware.py     models, workers, cores, devices and flags of the services
ports.py, preparation.py       what is done before they start: ports, download, partition
launcher.py                    where services run: the seam between the supervisor and processes, or Ray (on_ray/)
supervisor.py, scaling.py      keep the services running; add and remove workers
service_log.py, display.py     what they log, and what the terminal shows
trial.py                       the first request
"""
