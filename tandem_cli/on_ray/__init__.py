"""`tandem up --on ray`: workers on the nodes of a Ray cluster. Router and gateway run where the command runs.

    resources.py      what each worker asks Ray for, and whether the cluster has it
    cluster.py        the connection to Ray: nodes, placement groups, actors
    launch.py         what each worker needs; the supervisor's Launcher: a placement group and an actor for each
    handover.py       a worker's settings, as its node gets them
    node.py           the actor: runs the worker as its child process
    bound_to_actor.py the first thing that process does: it will die with the actor

A worker that ends takes its actor with it, and Ray starts the actor again, on another node if that one is lost. The
launcher follows the actor, and hands the settings over again. Mesh key and Redis URL go to the actor in a call, so
Ray's own tables, logs and command lines do not contain them.
"""
