"""A mesh in virtual time: the real router and the real schedulers of workers, whose steps only take modelled time."""
