"""Placement of attempts on workers: the policy, the view of the mesh, and the work in flight."""
